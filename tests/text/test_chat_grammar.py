"""The grammars accept the calls that the parser reads, and nothing else, in the real grammar engine."""

import json
from typing import Any

import llguidance
import pytest

from ggufspec.chat_grammar import ChatGrammar, schema_grammar, tool_grammar
from ggufspec.chat_parse import ChatParser

from .templates import TOOLS

CLOCK = {"type": "function", "function": {"name": "clock"}}
UNIT = {"type": "function", "function": {"name": "unit", "parameters": {
    "type": "object", "required": ["to", "from"], "$defs": {"rate": {"type": "number"}}, "properties": {
        "from": {"type": "string", "enum": ["C", "F"]}, "to": {"type": "string"}, "rate": {"$ref": "#/$defs/rate"}},
}}}  # fmt: skip
ALL = [*TOOLS, CLOCK, UNIT]


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def call(**item: Any) -> str:
    return f"<tool_call>\n{json.dumps(item)}\n</tool_call>"


def accepts(grammar: ChatGrammar, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


WEATHER = {"name": "get_weather", "arguments": {"city": "Oslo"}}
# format, text, right or wrong, what the parser must make of it
CALLS = [
    ("qwen-xml", xml("get_weather", city="Oslo\n</p <b>"), True),
    ("qwen-xml", xml("get_weather", city="Oslo", days="3"), True),
    ("qwen-xml", xml("get_weather", city="Oslo", days="three"), False),
    ("qwen-xml", xml("get_weather", days="3"), False),
    ("qwen-xml", xml("get_weather", town="Oslo"), False),
    ("qwen-xml", xml("set_weather", city="Oslo"), False),
    ("qwen-xml", xml("clock"), True),
    ("qwen-xml", xml("unit", **{"from": "C", "to": "x", "rate": "1.5"}), True),
    ("qwen-xml", xml("unit", **{"to": "x", "from": "F"}), True),
    ("qwen-xml", xml("unit", **{"to": "x", "from": "K"}), False),
    ("hermes", call(**WEATHER), True),
    ("hermes", call(name="get_weather", arguments={"city": 1}), False),
    ("hermes", call(name="clock", arguments={}), True),
    ("hermes", call(name="unit", arguments={"from": "C", "to": "x", "rate": 2}), True),
    ("hermes", call(name="nope", arguments={}), False),
]


@pytest.mark.parametrize(("call_format", "text", "right"), CALLS)
def test_calls(call_format: str, text: str, right: bool) -> None:
    lazy = tool_grammar(call_format, ALL, required=False, parallel=True)
    assert lazy.lazy and text.startswith(lazy.triggers)
    assert accepts(lazy, text) == right
    assert accepts(lazy, text + "\n" + text) == right
    single = tool_grammar(call_format, ALL, required=False, parallel=False)
    assert accepts(single, text) == right and not accepts(single, text + "\n" + text)
    required = tool_grammar(call_format, ALL, required=True, parallel=False)
    assert not required.lazy and accepts(required, "Well, <b>\n" + text) == right and not accepts(required, "Well")
    after = tool_grammar(call_format, ALL, True, False, thinking_open="</think>")
    assert accepts(after, f"hm\n</think>\n\n{text}") == right and not accepts(after, "hm </think> no call")
    if right:
        parser = ChatParser(call_format=call_format, tools=ALL)
        parser.feed(text)
        (made,) = parser.message.tool_calls
        assert isinstance(json.loads(made.arguments), dict) and parser.message.content == ""


def test_bare_json() -> None:
    text = json.dumps({"name": "get_weather", "parameters": {"city": "Oslo"}})
    assert accepts(tool_grammar("llama3-json", ALL, True, False), text)
    assert accepts(tool_grammar("llama3-json", ALL, True, True), f"{text}; {text}")
    lazy = tool_grammar("llama3-json", ALL, False, False)
    assert lazy.triggers == ("<|python_tag|>",) and accepts(lazy, "<|python_tag|>" + text)


def test_answers_with_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(schema_grammar(schema), '{"a": 3}') and not accepts(schema_grammar(schema), '{"a": "3"}')
    assert accepts(schema_grammar(schema, "</think>"), 'hm\n</think>\n\n{"a": 3}')
    assert not accepts(schema_grammar(schema, "</think>"), '{"a": 3}')
