"""Thoughts, content and calls are split alike however the stream is cut, and as llama.cpp splits them."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.chat_calls import detect_format, json_value
from ggufspec.chat_parse import ChatParser, Delta
from ggufspec.errors import ConfigError

from .peer import Peer
from .request import read_request
from .scripted import scripted_model
from .templates import FULL, HERMES, PLAIN, SWITCH, TOOLS

HI = [{"role": "user", "content": "hi"}]
THINK = ("<think>", "</think>")
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
XML2 = XML.format("A").replace("</function>", "<parameter=days>\n3\n</parameter>\n</function>")
JSON = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo }\\"", "days": 2}}\n</tool_call>'


def read(text: str, cuts: list[int] | None = None, call_format: str | None = None, **options: Any) -> dict[str, Any]:
    """The message; checks that the deltas add up to it."""
    ids = (f"id{i}" for i in itertools.count())
    parser = ChatParser(call_format=call_format, tools=TOOLS, new_id=lambda: next(ids), **options)
    ends = [0, *sorted(cuts or []), len(text)]
    deltas = [delta for a, b in zip(ends, ends[1:]) for delta in parser.feed(text[a:b])] + parser.finish()
    assert parser.message.as_openai() == add_up(deltas)
    return parser.message.as_openai()


def add_up(deltas: list[Delta]) -> dict[str, Any]:
    """What an OpenAI client builds from the stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (delta.as_openai() for delta in deltas):
        assert any(delta.values())
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                function = {"name": piece["function"]["name"], "arguments": ""}
                calls.append({"type": "function", "function": function, "id": piece["id"]})
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


def said(content: str = "", thought: str = "", *calls: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        functions = [{"name": "get_weather", "arguments": text} for text in calls]
        message["tool_calls"] = [{"type": "function", "function": f, "id": f"id{i}"} for i, f in enumerate(functions)]
    return message


OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
# name: (text, options, message)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "thought": ("hm.\n</think>\n\n42.\n", {"generation_prompt": OPEN}, said("42.\n", "hm.\n")),
    "blank thought": (" \n</think>\n\n42", {"generation_prompt": OPEN}, said("42")),
    "cut thought": ("hm </thi", {"generation_prompt": OPEN}, said("", "hm </thi")),
    "closed": ("42 </think>", {"generation_prompt": CLOSED}, said("42 </think>")),
    "own mark": ("\n<think>\nhm</think>42", {}, said("42", "hm")),
    "no mark": ("hm</think>42", {}, said("hm</think>42")),
    "looks like a mark": ("<thin air", {}, said("<thin air")),
    "format none": ("hm</think>42", {"generation_prompt": OPEN, "reasoning_format": "none"},
                    said("<think>\nhm</think>42")),
    "format none, closed": ("42", {"generation_prompt": CLOSED, "reasoning_format": "none"},
                            said("<think>\n\n</think>\n\n42")),
    "xml": ("Sure.\n" + XML2, {"call_format": "qwen-xml"}, said("Sure.\n", "", '{"city":"A","days":3}')),
    "xml text": (XML.format('a "q"\n</p\n\\é'), {"call_format": "qwen-xml"},
                 said("", "", '{"city":"a \\"q\\"\\n</p\\n\\\\é"}')),
    "xml twice": (XML.format("a") + "\n" + XML.format("b"), {"call_format": "qwen-xml"},
                  said("", "", '{"city":"a"}', '{"city":"b"}')),
    "xml empty": (XML.format("").replace("\n\n", "\n"), {"call_format": "qwen-xml"}, said("", "", '{"city":""}')),
    "xml in a thought": ("hm\n" + XML.format("a"), {"call_format": "qwen-xml", "generation_prompt": OPEN},
                         said("", "hm\n", '{"city":"a"}')),
    "xml unknown name": (XML.format("a").replace("get_", "set_"), {"call_format": "qwen-xml"},
                         said(XML.format("a").replace("get_", "set_"))),
    "xml cut": ("x" + XML.format("Oslo")[:-40], {"call_format": "qwen-xml"}, said("x", "", '{"city":"Os')),
    "mark only": ("a <tool_call> b", {"call_format": "qwen-xml"}, said("a <tool_call> b")),
    "mark at the end": ("a <tool_call>", {"call_format": "qwen-xml"}, said("a <tool_call>")),
    "half a mark": ("a <tool_ca", {"call_format": "qwen-xml"}, said("a <tool_ca")),
    "no calls wanted": (JSON, {}, said(JSON)),
    "json": ("Ok " + JSON, {"call_format": "hermes"}, said("Ok ", "", '{"city": "Oslo }\\"", "days": 2}')),
    "json twice": (JSON + "\n" + JSON, {"call_format": "hermes"},
                   said("", "", *['{"city": "Oslo }\\"", "days": 2}'] * 2)),
    "json other order": ('<tool_call>{"arguments": {"city": "{"}, "name": "get_weather"}</tool_call>',
                         {"call_format": "hermes"}, said("", "", '{"city": "{"}')),
    "json as text": ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": 1}"}</tool_call>',
                     {"call_format": "hermes"}, said("", "", '{"city": 1}')),
    "json with id": ('<tool_call>{"name": "get_weather", "arguments": {}, "id": 3}</tool_call> x',
                     {"call_format": "hermes"}, said("x", "", "{}")),
    "json broken": ('<tool_call>{"name": get}</tool_call>', {"call_format": "hermes"},
                    said('<tool_call>{"name": get}</tool_call>')),
    "json none": ("<tool_call>nothing", {"call_format": "hermes"}, said("<tool_call>nothing")),
    "bare": ('{"name": "get_weather", "parameters": {"city": "a"}}', {"call_format": "llama3-json"},
             said("", "", '{"city": "a"}')),
    "bare twice": ('{"type": "function", "name": "get_weather", "parameters": {"city": "a"}}; '
                   '{"name": "get_weather", "parameters": {}}', {"call_format": "llama3-json"},
                   said("", "", '{"city": "a"}', "{}")),
    "python tag": ('<|python_tag|>{"name": "get_weather", "parameters": {}}', {"call_format": "llama3-json"},
                   said("", "", "{}")),
    "bare but an answer": ('{"answer": 3}', {"call_format": "llama3-json"}, said('{"answer": 3}')),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases_in_every_cut(name: str) -> None:
    text, options, message = CASES[name]
    options = {"thinking": THINK, **options}
    if not options.get("generation_prompt") and options.get("call_format"):
        options["generation_prompt"] = CLOSED
    assert read(text, **options) == message
    assert read(text, list(range(len(text))), **options) == message, "one character at a time"
    for cut in range(len(text)):
        assert read(text, [cut], **options) == message, f"cut at {cut}"


_PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=get_weather>",
        "<function=x>",
        "</function>",
        "\n",
    ),
    *("<parameter=city>", "<parameter=days>", "</parameter>", "\n</parameter>\n", "3", "None", "a", " ", '{"name": '),
    *('"get_weather"', ', "arguments": ', "{", "}", '"', "\\", "<", "<|python_tag|>", ";"),
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=14), st.sampled_from([None, "qwen-xml", "hermes", "llama3-json"]),
       st.sampled_from(["", OPEN, CLOSED]), st.sampled_from(["auto", "none"]), st.randoms())  # fmt: skip
def test_any_text_in_any_cut(
    pieces: list[str], call_format: Any, generation: str, shape: str, rng: random.Random
) -> None:
    text = "".join(pieces)
    options = {
        "thinking": THINK,
        "generation_prompt": generation,
        "reasoning_format": shape,
        "call_format": call_format,
    }
    cuts = [rng.randrange(len(text) + 1) for _ in range(5)] if text else []
    whole = read(text, **options)
    assert read(text, cuts, **options) == whole
    if call_format is None and shape == "none":
        assert whole["content"] == generation.removeprefix("<|im_start|>assistant\n") + text, "nothing is lost"


def test_nothing_of_a_mark_is_sent_early() -> None:
    parser = ChatParser(THINK, "qwen-xml", TOOLS, generation_prompt=CLOSED)
    assert parser.feed("Sure <tool") == [Delta(content="Sure ")]
    assert parser.feed("box") == [Delta(content="<toolbox")]
    parser.feed("<tool_call>\n<function=get_weather>\n")
    assert parser.message.tool_calls[0].arguments == "{" and len(parser.message.tool_calls[0].id) == 32


def test_unknown_reasoning_format() -> None:
    with pytest.raises(ConfigError, match="deepseek-legacy"):
        ChatParser(reasoning_format="sometimes")


def test_values_become_json() -> None:
    values = {"3": "3", ' {"a": 1}': '{"a": 1}', "True": "true", "None": "null", "['x', 1]": '["x",1]', "a b": '"a b"'}
    assert {text: json_value(text, {}) for text in values} == values
    assert all(json.loads(value) is not ... for value in values.values())


def test_format_of_a_template() -> None:
    assert [detect_format(source) for source in (FULL, HERMES, PLAIN)] == ["qwen-xml", "hermes", None]


# -- against llama.cpp, which reads the same text from a model that says it ----------------------------------------


def chunks_of(text: str) -> list[str]:
    """A random cut into unique chunks of at least two characters."""
    rng = random.Random(len(text))
    for size in itertools.chain.from_iterable(itertools.repeat(size, 200) for size in range(6, 40)):
        chunks, at = [], 0
        while at < len(text):
            n = rng.randint(3, size) if len(text) - at > size + 3 else len(text) - at
            chunks.append(text[at : at + n])
            at += n
        if len(set(chunks)) == len(chunks):
            return chunks
    raise AssertionError("no cut has unique chunks")


SPOKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "thought": (FULL, "I think.\n</think>\n\nThe answer is 42.\n", {}),
    "blank thought": (FULL, "  \n</think>\n\nThe answer is 42. ", {}),
    "cut thought": (FULL, "cut off in the thought", {}),
    "format none": (FULL, "I think.\n</think>\n\nThe answer is 42.\n", {"reasoning_format": "none"}),
    "thinking off": (FULL, "The answer is </think> 42.", {"chat_template_kwargs": {"enable_thinking": False}}),
    "format none, thinking off": (FULL, "The answer", {"reasoning_format": "none",
                                                       "chat_template_kwargs": {"enable_thinking": False}}),
    "deepseek-legacy": (FULL, "hm\n</think>\n\nThe answer", {"reasoning_format": "deepseek-legacy"}),
    "no thoughts known": (SWITCH, "<think>\nhm\n</think>\n\nThe answer", {}),
    "plain": (PLAIN, "The <think> answer\n", {}),
    "xml": (FULL, "hm\n</think>\n\nSure.\n" + XML2, {"tools": TOOLS}),
    "xml text": (FULL, "hm\n</think>\n\n" + XML.format('x "y"\n</p\n\\ é'), {"tools": TOOLS}),
    "xml in a thought": (FULL, "hm.\n" + XML.format("Bergen"), {"tools": TOOLS}),
    "text with tools": (FULL, "hm\n</think>\n\nJust <tool text < more", {"tools": TOOLS}),
    "tools but none": (FULL, "hm\n</think>\n\nOk " + XML.format("Rome"), {"tools": TOOLS, "tool_choice": "none"}),
    "json": (HERMES, "hm\n</think>\n\n" + JSON.replace('Oslo }\\"', "Oslo"), {"tools": TOOLS}),
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", SPOKEN)
def test_same_split(name: str, tmp_path: Path) -> None:
    source, text, body = SPOKEN[name]
    chunks = chunks_of(text)
    peer = Peer(scripted_model(tmp_path / "model.gguf", chunks, source))
    answer = peer.post("/v1/chat/completions", {"messages": HI, "temperature": 0, "max_tokens": 300, **body})
    theirs = answer["choices"][0]["message"]
    parser = read_request(source, {"messages": HI, **body}).new_parser()
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish()
    ours = parser.message.as_openai()
    assert add_up(deltas) == ours
    for message in (ours, theirs):
        for call in message.get("tool_calls", ()):
            assert len(call.pop("id")) == 32
    if name == "json":  # llama.cpp writes this format's arguments anew, we pass the model's own text on
        for message in (ours, theirs):
            function = message["tool_calls"][0]["function"]
            function["arguments"] = json.loads(function["arguments"])
    assert ours == theirs
