"""The ways models write a tool call, each read piece by piece into a name and a JSON string of arguments.

qwen-xml     <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>
hermes       <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
llama3-json  {"name": NAME, "parameters": {...}}, as the whole answer or after <|python_tag|>
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .detokenizer import partial_suffix

Tools = Mapping[str, Mapping[str, Any]]  # parameters' JSON schema by function name


class Fallback(Exception):
    """What follows the mark is no call. `text` is all that was read since the mark."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


class CallReader(Protocol):
    """Reads one call. After `done`, `rest` is the text behind it."""

    triggers: Sequence[str]  # marks that begin a call anywhere in the content
    separators: str  # characters that may stand between two calls
    bare: Callable[[str], bool | None] | None  # whether content begins a call without a mark; None: cannot tell yet
    name: str | None
    done: bool
    rest: str

    def feed(self, text: str) -> str:
        """The arguments' next piece. Raises Fallback, only while `name` is None."""
        ...


class XmlCall:
    """`qwen-xml`. Parameters of type string are raw text, all others JSON."""

    triggers: Sequence[str] = ("<tool_call>",)
    separators = " \t\r\n"
    bare = None

    _END = "\n</parameter>\n"

    def __init__(self, tools: Tools):
        self._tools = tools
        self.name: str | None = None
        self.done, self.rest = False, ""
        self._buffer, self._out = "", ""
        self._n_values = 0
        self._state: Callable[[], bool] = self._function

    def feed(self, text: str) -> str:
        self._buffer += text
        self._out = ""
        while not self.done and self._state():
            pass
        self.rest = self._buffer
        return self._out

    def _function(self) -> bool:
        text = self._buffer.lstrip()
        match = re.match(r"<function=([^>\n]*)>", text)
        if match and match[1] in self._tools:
            self.name, self._out = match[1], "{"
            self._buffer, self._state = text[match.end() :], self._parameter
            return True
        if match is None and _may_become(text, "<function="):
            return False
        raise Fallback(self._buffer)

    def _parameter(self) -> bool:
        text = self._buffer.lstrip()
        match = re.match(r"<parameter=([^>\n]*)>\n?", text)
        if match and (match.end() < len(text) or match[0].endswith("\n")):
            self._key, self._schema = match[1], _property(self._tools[self.name or ""], match[1])
            self._is_text, self._opened = is_text(self._schema), False
            self._buffer, self._state = text[match.end() :], self._value
            return True
        if text.startswith("</function>"):
            self._out += "}"
            self._buffer, self._state = text[len("</function>") :], self._close
            return True
        if match or _may_become(text, "<parameter=") or "</function>".startswith(text):
            return False
        self._out += "}"  # no parameter and no end: the call is over, what follows is content
        self.done = True
        return True

    def _value(self) -> bool:
        if not self._opened and self._buffer.startswith("</parameter>"):  # an empty value may have one newline only
            self._buffer = "\n" + self._buffer
        at = self._buffer.find(self._END)
        if not self._is_text:
            if at < 0:
                return False
            self._emit_key()
            self._out += json_value(self._buffer[:at], self._schema)
        else:
            if at < 0 and not self._opened and "</parameter>".startswith(self._buffer):
                return False
            end = at if at >= 0 else len(self._buffer) - partial_suffix(self._buffer, (self._END,))
            if not self._opened:
                self._emit_key()
                self._out += '"'
            self._out += json_text(self._buffer[:end])
            if at < 0:
                self._buffer = self._buffer[end:]
                return False
            self._out += '"'
        self._buffer, self._state = self._buffer[at + len(self._END) :], self._parameter
        return True

    def _emit_key(self) -> None:
        self._out += ("," if self._n_values else "") + json.dumps(self._key, ensure_ascii=False) + ":"
        self._n_values += 1
        self._opened = True

    def _close(self) -> bool:
        text = self._buffer.lstrip()
        if not text.startswith("</tool_call>") and "</tool_call>".startswith(text):
            return False
        self._buffer = text.removeprefix("</tool_call>")
        self.done = True
        return True


_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonCall:
    """`hermes` and `llama3-json`: one JSON object, whose arguments are passed on as they come."""

    bare: Callable[[str], bool | None] | None = None
    triggers: Sequence[str] = ("<tool_call>",)
    separators = " \t\r\n"
    _closing = "</tool_call>"

    def __init__(self, tools: Tools):
        self._tools = tools
        self.name: str | None = None
        self.done, self.rest = False, ""
        self._buffer = ""
        self._object = JsonScanner()  # the whole call
        self._arguments: JsonScanner | None = None

    def feed(self, text: str) -> str:
        self._buffer += text
        out = ""
        if self.name is None:
            out = self._head(text)
        elif self._arguments is not None:
            out = self._pass_on()
        if self.name is not None and self._arguments is None and not self.done:
            self._tail()
        self.rest = self._buffer
        return out

    def _head(self, text: str) -> str:
        start = self._buffer.lstrip()
        if start and start[0] != "{":
            raise Fallback(self._buffer)
        match = _HEAD.match(start)
        if match:
            name = json.loads(match[1])
            if name not in self._tools:
                raise Fallback(self._buffer)
            self.name, self._buffer, self._arguments = name, start[match.end() :], JsonScanner()
            return self._pass_on()
        end = self._object.feed(text)
        if end < 0:
            return ""
        # The object ended in another order of keys: read it whole.
        at = len(self._buffer) - len(text) + end
        try:
            call = json.loads(self._buffer[:at])
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            raise Fallback(self._buffer) from None
        if name not in self._tools:
            raise Fallback(self._buffer)
        self.name, self._buffer = name, "}" + self._buffer[at:]
        return arguments

    def _pass_on(self) -> str:
        assert self._arguments is not None
        end = self._arguments.feed(self._buffer)
        if end < 0:
            out, self._buffer = self._buffer, ""
            return out
        out, self._buffer, self._arguments = self._buffer[:end], self._buffer[end:], None
        return out

    def _tail(self) -> None:
        at = self._buffer.find("}")  # keys behind the arguments (an id) are skipped
        if at < 0:
            return
        text = self._buffer[at + 1 :].lstrip() if self._closing else self._buffer[at + 1 :]
        if self._closing and not text.startswith(self._closing) and self._closing.startswith(text):
            return
        self._buffer = text.removeprefix(self._closing)
        self.done = True


class BareJsonCall(JsonCall):
    """`llama3-json`."""

    triggers = ("<|python_tag|>",)
    separators = " \t\r\n;"
    _closing = ""

    @staticmethod
    def _begins(text: str) -> bool | None:
        text = text.lstrip()
        if re.match(r'\{\s*"(name|type)"\s*:', text):
            return True
        return None if re.fullmatch(r'(\{\s*("[a-z]{0,4}("\s*)?)?)?', text) else False

    bare = _begins


FORMATS: dict[str, Callable[[Tools], Any]] = {
    "qwen-xml": XmlCall,
    "hermes": JsonCall,
    "llama3-json": BareJsonCall,
}


def detect_format(template: str) -> str | None:
    """The format that a chat template's source teaches, None if it has no calls of a known kind."""
    if all(mark in template for mark in ("<tool_call>", "<function=", "<parameter=")):
        return "qwen-xml"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3-json"
    return None


def make_reader(name: str, tools: Sequence[Mapping[str, Any]]) -> Callable[[], CallReader]:
    """A maker of readers for the request's tools (OpenAI's list form)."""
    table = schemas(tools)
    return lambda: FORMATS[name](table)


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parameters' schema by function name; a function without one takes any object."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}


class JsonScanner:
    """Finds the end of one JSON object or array fed in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int:
        """The index behind the closing bracket, or -1 if it has not come yet."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return -1


def is_text(schema: Mapping[str, Any]) -> bool:
    """True if the schema allows strings only: such a value is written raw."""
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return bool(values) and all(isinstance(value, str) for value in values)


def json_value(text: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON: the text itself if it is JSON, a Python literal rewritten, else a string."""
    stripped = text.strip()
    try:
        json.loads(stripped)
        return stripped
    except ValueError:
        pass
    try:
        return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def json_text(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = (schema.get("properties") or {}).get(key, {})
    reference = found.get("$ref", "") if isinstance(found, Mapping) else ""
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        schema = schema.get(part, {})
    return schema if reference.startswith("#/") else found


def _may_become(text: str, start: str) -> bool:
    """True while `text` is a beginning of `start`, or `start` and a name that has not ended."""
    return start.startswith(text) or (text.startswith(start) and ">" not in text and "\n" not in text)
