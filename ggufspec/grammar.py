"""Constrained generation: which tokens a grammar allows next. The grammar engine is llguidance.

A `GrammarSpec` says what a request asks for; `GrammarState` follows one stream. The committed state never
runs ahead: rows of a draft get states of their own (`rows`), and `advance` is for tokens that stand.

Differences from llguidance's own habits, all to follow llama.cpp: no forced tokens (a grammar only forbids,
the model chooses among spellings), control tokens match by their text, end-of-text tokens are allowed
exactly where the grammar is complete.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ggufspec.errors import RequestError, UnsupportedError
from ggufspec.gbnf import gbnf_to_lark
from ggufspec.thinking import BudgetState, ThinkingBudget

if TYPE_CHECKING:
    from ggufspec.sampling import Vocabulary

# llama.cpp's white space between JSON tokens: none, one blank, or one or two line ends and an indentation
_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})"
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Trigger:
    """What switches a lazy grammar on: a word, a token id, or a regular expression over the text so far.

    The grammar then starts at the word or token, or at the expression's first group that matched something
    (else at its whole match). `pattern_full` must match all of the text.
    """

    kind: Literal["word", "token", "pattern", "pattern_full"]
    value: str | int


@dataclass(frozen=True)
class GrammarSpec:
    """`text` is GBNF (start: `root`), a JSON schema (as text), a regular expression, or Lark (start: `start`);
    kind `none` constrains nothing, for a request that only limits its thinking.
    """

    kind: Literal["gbnf", "json_schema", "regex", "lark", "none"]
    text: str = ""
    lazy: bool = False
    triggers: tuple[Trigger, ...] = ()
    thinking: ThinkingBudget | None = None


class GrammarState:
    """One stream's place in its grammar. Not safe to share between threads.

    What goes wrong after `start` (a grammar that no token continues, one that grows too complex) is kept in `error`
    and constrains nothing from there on: it ends one request, while a step serves many.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: Any, pending: _Pending | None, budget: BudgetState | None,
                 error: RequestError | None = None):
        self.error = error
        self._vocabulary = vocabulary
        self._matcher = matcher  # None: no grammar
        self._pending = pending  # a lazy grammar that waits for its trigger
        self._budget = budget

    @classmethod
    def start(cls, spec: GrammarSpec, tokenizer: Vocabulary) -> GrammarState:
        """A fresh state. RequestError with the place of the mistake if the grammar is wrong or too complex."""
        vocabulary = _vocabulary(tokenizer)
        if spec.lazy and not spec.triggers:
            raise RequestError("grammar_lazy needs at least one trigger")
        matcher = None if spec.kind == "none" else vocabulary.matcher(spec, tokenizer)
        budget = None if spec.thinking is None else BudgetState.start(spec.thinking)
        return cls(vocabulary, matcher, _Pending.of(spec.triggers) if spec.lazy else None, budget)

    def clone(self) -> GrammarState:
        pending = None if self._pending is None else self._pending.clone()
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        return GrammarState(self._vocabulary, matcher, pending, self._budget, self.error)

    @property
    def is_waiting(self) -> bool:
        """True while a lazy grammar has not been triggered: everything is allowed."""
        return self._pending is not None

    @property
    def accepting(self) -> bool:
        """True where the text may end."""
        return self._forced is None and (self._free or self._matcher.is_accepting())

    @property
    def _free(self) -> bool:
        return self._pending is not None or self._matcher is None or self.error is not None

    @property
    def _forced(self) -> int | None:
        return None if self._budget is None else self._budget.forced

    @property
    def finished(self) -> bool:
        """True when nothing can follow and the vocabulary has no end-of-text token to say so."""
        return not self._free and not self._vocabulary.eog and self._matcher.is_stopped()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; much cheaper than the whole `allowed`."""
        if self._forced is not None:
            return token == self._forced
        if self._free:
            return True
        if token in self._vocabulary.eog:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1

    def words(self) -> np.ndarray:
        """Allowed tokens as bits of int32 words [ceil(n_vocab / 32)], lowest bit first."""
        n_words = -(-self._vocabulary.n_vocab // 32)
        if self._forced is not None:
            bits = np.zeros(n_words, dtype=np.uint32)
            bits[self._forced // 32] = np.uint32(1) << np.uint32(self._forced % 32)
            return bits.view(np.int32)
        if self._free:
            return np.full(n_words, -1, dtype=np.int32)
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[:n_words]
        return np.full(n_words, -1, dtype=np.int32) if self._failed() else words

    def allowed(self, n_vocab: int) -> Tensor:
        """Allowed tokens, bool [n_vocab] on the CPU; ids past the vocabulary are not allowed."""
        bits = np.unpackbits(self.words().view(np.uint8), bitorder="little")[: self._vocabulary.n_vocab]
        out = torch.zeros(n_vocab, dtype=torch.bool)
        out[: len(bits)] = torch.from_numpy(bits[:n_vocab]).bool()
        return out

    def advance(self, token: int) -> bool:
        """Take a token that stands. False, and no change, if the grammar forbids it."""
        if self.error is not None:
            return True
        if not self.allows(token):
            return False
        is_forced = self._forced is not None
        if self._budget is not None:
            self._budget = self._budget.push(token, self._vocabulary.pieces[token])
        if self._matcher is None or (is_forced and self._matcher.validate_tokens([token]) != 1):
            return True  # a forced token ends the thoughts whatever the grammar thinks of it
        if self._pending is None:
            self._matcher.consume_token(token)
            self._failed()
            return True
        if token in self._vocabulary.eog:
            return True
        constrained = self._pending.push(token, self._vocabulary.pieces[token])
        if constrained is not None:
            self._pending = None
            self._feed(constrained)
        return True

    def rows(self, draft: Sequence[int], n_rows: int | None = None) -> list[GrammarState | None]:
        """States for the rows of a verification: before draft[0], after it, ... ; `n_rows` entries (default
        all).

        Rows past a forbidden draft are None: such a draft cannot be chosen, so nobody reads them.
        """
        n_rows = len(draft) + 1 if n_rows is None else n_rows
        out: list[GrammarState | None] = [self]
        state = self
        for token in list(draft)[: n_rows - 1]:
            state = state.clone()
            if not state.advance(token):
                break
            out.append(state)
        return out[:n_rows] + [None] * (n_rows - len(out))

    def _feed(self, text: bytes) -> None:
        """Take bytes that need not fall on token borders."""
        try:
            tokens = self._vocabulary.spell(text)
        except RequestError as error:
            self.error = error
            return
        if not self._matcher.consume_tokens(tokens):
            shown = text[:80].decode(errors="replace")
            self.error = RequestError(f"grammar: the text that triggered it does not fit it: {shown!r}")

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.error = RequestError(f"grammar: {_one_line(self._matcher.get_error())}")
        return self.error is not None


@dataclass
class _Pending:
    """A lazy grammar's text so far and what it waits for."""

    tokens: frozenset[int]
    patterns: tuple[re.Pattern[str], ...]
    text: bytes = b""

    @classmethod
    def of(cls, triggers: Sequence[Trigger]) -> _Pending:
        tokens, patterns = set(), []
        for trigger in triggers:
            if trigger.kind == "token":
                tokens.add(int(trigger.value))
                continue
            text = str(trigger.value)
            forms = {"word": re.escape(text), "pattern": text, "pattern_full": f"(?:{text})\\Z"}
            source = forms[trigger.kind]
            if trigger.kind == "pattern_full" or (text.startswith("^") and text.endswith("$")):
                source = f"\\A{source}"
            try:
                patterns.append(re.compile(source, re.DOTALL if trigger.kind == "word" else 0))
            except re.error as error:
                raise RequestError(f"grammar trigger {text!r} is not a regular expression: {error}") from None
        return cls(frozenset(tokens), tuple(patterns))

    def clone(self) -> _Pending:
        return _Pending(self.tokens, self.patterns, self.text)

    def push(self, token: int, piece: bytes) -> bytes | None:
        """The bytes the grammar must read if `token` triggers it, else None."""
        if token in self.tokens:
            return piece
        self.text += piece
        # Latin-1 keeps byte positions; patterns are matched on UTF-8 text, so both are made of the same
        # bytes.
        text = self.text.decode(errors="replace")
        for pattern in self.patterns:
            match = pattern.search(text)
            if match:
                group = next((g for g in range(1, pattern.groups + 1) if match.group(g)), 0)
                return text[match.start(group) :].encode(errors="surrogateescape")
        return None


@dataclass
class _Vocabulary:
    """A tokenizer as llguidance sees it, made once per tokenizer."""

    pieces: list[bytes]
    eog: frozenset[int]
    lltokenizer: Any
    by_bytes: dict[bytes, int]
    limits: Any = field(repr=False)

    @property
    def n_vocab(self) -> int:
        return len(self.pieces)

    def matcher(self, spec: GrammarSpec, tokenizer: Vocabulary) -> Any:
        from llguidance import LLMatcher

        def token_id(text: str) -> int | None:
            found = tokenizer.encode(text, add_special=False, parse_special=True)
            return found[0] if len(found) == 1 else None

        grammar = (
            _NO_FORCING
            + {
                "gbnf": lambda: gbnf_to_lark(spec.text, token_id),
                "json_schema": lambda: f"start: %json {_schema_text(spec.text)}",
                "regex": lambda: f"start: /{_slashes_escaped(spec.text)}/",
                "lark": lambda: spec.text,
            }[spec.kind]()
        )
        source = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self.lltokenizer, source, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise RequestError(f"failed to parse grammar ({spec.kind}): {_one_line(matcher.get_error())}")
        return matcher

    def spell(self, text: bytes) -> list[int]:
        """Some tokens whose bytes are `text`: longest first. RequestError if the vocabulary lacks a byte."""
        out, at = [], 0
        longest = max(map(len, self.by_bytes))
        while at < len(text):
            for n in range(min(longest, len(text) - at), 0, -1):
                token = self.by_bytes.get(text[at : at + n])
                if token is not None:
                    out.append(token)
                    at += n
                    break
            else:
                raise RequestError(f"grammar: no token of the vocabulary begins with byte 0x{text[at]:02x}")
        return out


_vocabularies: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Vocabulary) -> _Vocabulary:
    found = _vocabularies.get(tokenizer)
    if found is None:
        found = _vocabularies[tokenizer] = _build(tokenizer)
    return found


def _build(tokenizer: Vocabulary) -> _Vocabulary:
    try:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
    except ImportError:
        raise UnsupportedError(
            "grammars and JSON schemas need the package llguidance: pip install 'ggufspec[server]'"
        ) from None
    eog = frozenset(tokenizer.eog)
    pieces = [tokenizer.piece(token) for token in range(tokenizer.n_vocab)]
    # A token without text, or that begins with NUL, never fits a grammar; end-of-text tokens are marked as
    # special.
    texts = [
        b"\xff" + piece if token in eog else (b"" if piece[:1] == b"\0" else piece)
        for token, piece in enumerate(pieces)
    ]

    class Source:
        tokens = texts
        bos_token_id = None
        # llguidance insists on one: without any, an id past the vocabulary, which is cut off every mask.
        eos_token_id = min(eog) if eog else len(texts)
        special_token_ids = sorted(eog)

        def __call__(self, text: str | bytes) -> list[int]:
            return []  # asked only for forced tokens, which are off

    if not eog:
        Source.tokens = [*texts, b"\xff<end>"]
    eos = sorted(eog) or [len(texts)]
    lltokenizer = LLTokenizer(TokenizerWrapper(Source()), eos_token=eos, slices=[])
    by_bytes = {piece: token for token, piece in enumerate(texts) if piece and token not in eog}
    limits = LLParserLimits(max_items_in_row=20_000, step_max_items=500_000, verbose_errors=False)
    return _Vocabulary(pieces, eog, lltokenizer, by_bytes, limits)


def _schema_text(text: str) -> str:
    """The schema with llama.cpp's reading of it: white space, closed objects, oneOf as anyOf."""
    try:
        schema = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise RequestError(f"json_schema is not valid JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema must be an object, but is {type(schema).__name__}")
    schema = _closed(schema)
    options = {"whitespace_pattern": _JSON_SPACE, "coerce_one_of": True, "lenient": True}
    return json.dumps({**schema, "x-guidance": options})


def _closed(schema: Any) -> Any:
    """`additionalProperties` is false where properties are named and nothing is said: llama.cpp's rule."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
        if isinstance(out.get(key), dict):
            out[key] = {name: _closed(value) for name, value in out[key].items()}
    for key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties", "additionalItems"):
        if key in out:
            out[key] = _closed(out[key])
    if isinstance(out.get("properties"), dict) and "patternProperties" not in out and "allOf" not in out:
        out.setdefault("additionalProperties", False)
    return out


def _slashes_escaped(regex: str) -> str:
    """A regular expression that can stand between slashes."""
    return re.sub(r"(\\.)|/|\n", lambda m: m.group(1) or ("\\/" if m.group() == "/" else "\\n"), regex, flags=re.DOTALL)


def _one_line(error: str) -> str:
    if "NoExtensionBias" in error:  # a bare word of the engine's
        return "no text can complete it: a rule refers to itself and nothing else"
    return error.strip().splitlines()[0] if error.strip() else "unknown error"
