"""llama.cpp's grammar notation (GBNF) as a Lark grammar for llguidance.

Every character becomes a lexeme of its own. llguidance's lexer takes the longest match, GBNF has no lexer
at all: with longer lexemes `[a-z]+ "end"` would refuse "friend". One-character lexemes make the two agree
on every text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ggufspec.errors import RequestError

MAX_REPETITIONS = 2000  # llama.cpp's bound on {m,n}
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def gbnf_to_lark(text: str, token_id: Callable[[str], int | None] | None = None) -> str:
    """The Lark grammar of a GBNF text; its start is the rule `root`.

    `token_id` resolves `<text>`, a reference to one token by its text (None: no such single token).
    RequestError names line and column of the first mistake.
    """
    parser = _Parser(text, token_id)
    try:
        rules = parser.rules()
    except RecursionError:
        raise RequestError("grammar: parentheses are nested too deeply") from None
    if "root" not in rules:
        raise RequestError("grammar: there is no rule named 'root'")
    for name, at in parser.uses.items():
        if name not in rules:
            raise parser.error(f"undefined rule {name!r}", at)
    names = {name: f"r{i}" for i, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, body in rules.items():
        lines.append(f"{names[name]}: " + "".join(names[p.name] if isinstance(p, _Rule) else p for p in body))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Rule:
    name: str


_Body = list["str | _Rule"]  # Lark text with rule references not yet renamed


@dataclass
class _Parser:
    """Recursive descent; each method reads one construct at `at` and returns its Lark form."""

    text: str
    token_id: Callable[[str], int | None] | None
    at: int = 0
    uses: dict[str, int] = field(default_factory=dict)

    def error(self, what: str, at: int | None = None) -> RequestError:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        near = self.text[at : at + 20].splitlines()[:1] or [""]
        return RequestError(f"grammar: {what} at line {line}, column {column}, before {near[0]!r}")

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def expect(self, what: str) -> None:
        if self.peek(len(what)) != what:
            raise self.error(f"expected {what!r}")
        self.at += len(what)

    def space(self, newlines: bool) -> None:
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "#":
                while self.peek() and self.peek() not in "\r\n":
                    self.at += 1
            elif c in " \t" or (newlines and c in "\r\n"):
                self.at += 1
            else:
                return

    def name(self) -> str:
        start = self.at
        while (c := self.peek()) and (c.isascii() and c.isalnum() or c in "-_"):
            self.at += 1
        if start == self.at:
            raise self.error("expected a name")
        return self.text[start : self.at]

    def rules(self) -> dict[str, _Body]:
        found: dict[str, _Body] = {}
        self.space(True)
        while self.at < len(self.text):
            name = self.name()
            self.space(False)
            self.expect("::=")
            self.space(True)
            found[name] = self.alternatives(nested=False)
            if self.peek() and self.peek() not in "\r\n":
                raise self.error("expected the end of the rule")
            self.space(True)
        return found

    def alternatives(self, nested: bool) -> _Body:
        out = self.sequence(nested)
        while self.peek() == "|":
            self.at += 1
            self.space(True)
            out = [*out, " | ", *self.sequence(nested)]
        return out

    def sequence(self, nested: bool) -> _Body:
        out: _Body = ['""']
        while True:
            item = self.item()
            if item is None:
                return out
            self.space(nested)
            item = self.repeated(item, nested)
            out = [*out, " ", *item]

    def item(self) -> _Body | None:
        """One element of a sequence; None where the sequence ends."""
        c = self.peek()
        if c == '"':
            return self.literal()
        if c == "[":
            return [self.character_class()]
        if c == ".":
            self.at += 1
            return ["/(?s:.)/"]
        if c == "(":
            self.at += 1
            self.space(True)
            inner = self.alternatives(nested=True)
            self.expect(")")
            return ["(", *inner, ")"]
        if c == "<" or self.peek(2) == "!<":
            return [self.token()]
        if c and c.isascii() and (c.isalnum() or c in "-_"):
            at = self.at
            name = self.name()
            self.uses.setdefault(name, at)
            return [_Rule(name)]
        return None

    def literal(self) -> _Body:
        start = self.at
        self.at += 1
        points = []
        while self.peek() != '"':
            if not self.peek():
                raise self.error("a string without its closing quote", start)
            points.append(self.character())
        self.at += 1
        return ["(" + " ".join(f"/[{_hex(p)}]/" for p in points) + ")" if points else '""']

    def character_class(self) -> str:
        start = self.at
        self.at += 1
        negative = self.peek() == "^"
        self.at += negative
        parts = []
        while self.peek() != "]":
            if not self.peek():
                raise self.error("a character class without its closing bracket", start)
            first = last = self.character()
            if self.peek() == "-" and self.peek(2) != "-]":
                self.at += 1
                if not self.peek():
                    raise self.error("a character class without its closing bracket", start)
                last = self.character()
                if last < first:
                    raise self.error("a character range that runs backwards", start)
            parts += _without_surrogates(first, last)
        self.at += 1
        if not parts:
            if negative:
                return "/(?s:.)/"
            raise self.error("an empty character class matches nothing", start)
        inside = "".join(_hex(a) if a == b else f"{_hex(a)}-{_hex(b)}" for a, b in parts)
        return f"/[{'^' if negative else ''}{inside}]/"

    def character(self) -> int:
        """Code point of the next character, escapes resolved."""
        start = self.at
        c = self.peek()
        self.at += 1
        if c != "\\":
            point = ord(c)
        else:
            kind = self.peek()
            self.at += 1
            if kind in _HEX_DIGITS and kind:
                digits = self.peek(_HEX_DIGITS[kind])
                if len(digits) < _HEX_DIGITS[kind] or any(d not in "0123456789abcdefABCDEF" for d in digits):
                    raise self.error(f"expected {_HEX_DIGITS[kind]} hex digits after \\{kind}", start)
                self.at += len(digits)
                point = int(digits, 16)
            elif kind in _ESCAPES and kind:
                point = ord(_ESCAPES[kind])
            else:
                raise self.error(f"unknown escape \\{kind}", start)
        if point > _LAST_CODE_POINT:
            raise self.error(f"U+{point:X} is not a character", start)
        return point

    def token(self) -> str:
        """`<[123]>`, `<text>`, and both with `!` in front (any other token)."""
        start = self.at
        negative = self.peek() == "!"
        self.at += 1 + negative
        end = self.text.find(">", self.at)
        if end < 0:
            raise self.error("a token without its closing '>'", start)
        inside = self.text[self.at : end]
        self.at = end + 1
        if inside.startswith("[") and inside.endswith("]") and inside[1:-1].isdecimal():
            token: int | None = int(inside[1:-1])
        else:
            token = self.token_id(f"<{inside}>") if self.token_id else None
        if token is None:
            raise self.error(f"<{inside}> is not one token of this vocabulary", start)
        return f"<[{'^' if negative else ''}{token}]>"

    def repeated(self, item: _Body, nested: bool) -> _Body:
        """`item` with the `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}` that follow it."""
        while (c := self.peek()) and c in "*+?{":
            start = self.at
            self.at += 1
            mark = c
            if c == "{":
                self.space(nested)
                low = self.number()
                high: int | None = low
                self.space(nested)
                if self.peek() == ",":
                    self.at += 1
                    self.space(nested)
                    high = self.number() if self.peek().isdigit() else None
                    self.space(nested)
                self.expect("}")
                if max(low, high or 0) > MAX_REPETITIONS:
                    raise self.error(f"more than {MAX_REPETITIONS} repetitions", start)
                if high is not None and high < low:
                    raise self.error("a repetition whose bounds run backwards", start)
                mark = f"{{{low},{'' if high is None else high}}}"
            item = ["(", *item, ")", mark] if mark != "{0,0}" else ['""']
            self.space(nested)
        return item

    def number(self) -> int:
        start = self.at
        while self.peek().isdecimal() and self.peek().isascii():
            self.at += 1
        if start == self.at:
            raise self.error("expected a number")
        return int(self.text[start : self.at])


def _hex(point: int) -> str:
    return f"\\x{{{point:x}}}"


def _without_surrogates(first: int, last: int) -> list[tuple[int, int]]:
    """The range without U+D800..U+DFFF, which no UTF-8 text holds."""
    below, above = (first, min(last, _SURROGATES[0] - 1)), (max(first, _SURROGATES[1] + 1), last)
    return [(a, b) for a, b in (below, above) if a <= b]
