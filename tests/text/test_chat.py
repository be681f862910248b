"""Chat templates: sandboxed, clear when broken, and the prompts are llama.cpp's."""

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from ggufspec.chat import ChatTemplate, ChatTemplates, load_templates, render
from ggufspec.chat_prompt import ChatRequest, build_prompt
from ggufspec.chat_templates import BUILT_IN
from ggufspec.errors import ConfigError, RequestError
from ggufspec.tokenizer import Tokenizer

from .peer import Peer
from .templates import FULL, HERMES, PLAIN, SWITCH, TOOLS, TYPED
from .vocabularies import byte_bpe, metadata, sentencepiece, write_model

HI = [{"role": "user", "content": "hi"}]


def prompt(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return build_prompt(ChatTemplates(ChatTemplate(source)), ChatRequest(messages, **options)).text


# -- rendering ---------------------------------------------------------------------------------------------------------


def test_globals_and_filters() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if loop.index > 2 -%}{%- break -%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }} {{ tools | tojson }} {{ {'a': 1.0, 'b': 1e20} | tojson }} "
        "{{ {'a': '<é>'} | tojson(indent=1) }} {%- generation %} [{{ messages[::-1][0].content }}]{% endgeneration -%} "
        "{{ strftime_now('%Y') | int > 2000 }}{% for k, v in {'x': 1} | items %}{{ k ~ v }}{% endfor %}"
    )
    text = render(ChatTemplate(source), [*HI, *HI, {"role": "user", "content": "<b>"}], [{"a": "'&'"}])
    assert text == '2 [{"a": "\'&\'"}] {"a": 1, "b": 1e+20} {\n "a": "<é>"\n} [<b>]Truex1'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ x", "line 2"),
        ("{% nosuchtag %}", "nosuchtag"),
        ("{{ x | nosuchfilter }}", "nosuchfilter"),
        ("{{ messages[0].content.nope.deep }}", "trial rendering"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", "trial rendering"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_broken_template_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_templates({"tokenizer.chat_template": source})
    assert (
        message in str(error.value) and "tokenizer.chat_template" in str(error.value) and "\n" not in str(error.value)
    )


def test_a_template_cannot_change_its_input_or_reach_python() -> None:
    assert ChatTemplate("{{ messages.__class__ }}").render(HI) == ""
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os }}"):
        with pytest.raises(RequestError):
            ChatTemplate(source).render(list(HI))


def test_the_templates_own_complaint_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="Jinja Exception: roles must alternate") as error:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HI)
    assert error.value.status == 400


def test_sources_in_order() -> None:
    keys = {"tokenizer.chat_template": "file", "tokenizer.chat_template.tool_use": "{{ tools | length }} tools"}
    assert load_templates(keys).default.render(HI) == "file"
    assert load_templates(keys).pick(with_tools=True).render(HI, TOOLS) == "1 tools"
    assert load_templates(keys, override="llama3").default.render(HI).startswith("<|start_header_id|>user")
    assert load_templates(keys, override="{{ 'own' }}").default.render(HI) == "own"
    assert load_templates({}).default.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="not supported: 'lama3'"):
        load_templates(keys, override="lama3")


# -- a request to a prompt ---------------------------------------------------------------------------------------------


def test_thinking_switches() -> None:
    opened, closed = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt(FULL, HI).endswith(opened)
    assert prompt(FULL, HI, enable_thinking=False).endswith(closed)
    assert prompt(FULL, HI, enable_thinking=False, chat_template_kwargs={"enable_thinking": True}).endswith(opened)
    assert prompt(FULL, HI, reasoning_effort="none").endswith(closed)
    assert prompt(SWITCH, HI).endswith(closed), "a template that writes no thoughts does not think by default"
    with pytest.raises(RequestError, match="enable_thinking"):
        prompt(FULL, HI, chat_template_kwargs={"enable_thinking": "false"})


def test_history_keeps_or_drops_thoughts() -> None:
    turns = [*HI, {"role": "assistant", "content": "A", "reasoning_content": "why"}, *HI]
    assert "why" in prompt(FULL, turns) and "why" not in prompt(FULL, turns, reasoning_preserve=False)
    assert prompt(FULL, [*turns[:2], *HI, {"role": "assistant", "content": "B"}, *HI]).startswith(
        prompt(FULL, turns).removesuffix("<|im_start|>assistant\n<think>\n")
    ), "the next prompt extends this one, so the cache can be used"


def test_generation_prompt_and_prefill() -> None:
    templates = ChatTemplates(ChatTemplate(FULL))
    made = build_prompt(templates, ChatRequest(HI))
    assert made.generation_prompt == "<|im_start|>assistant\n<think>\n" and made.thinking_open
    prefilled = build_prompt(templates, ChatRequest([*HI, {"role": "assistant", "content": "The answer"}]))
    assert prefilled.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nThe answer")
    assert not prefilled.thinking_open
    with pytest.raises(RequestError, match="tool calls"):
        prompt(FULL, [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])


def test_a_begin_token_is_not_written_twice() -> None:
    tokenizer = Tokenizer.from_metadata(metadata(sentencepiece()))
    templates = load_templates({"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}, "<s>", "</s>")
    ids = tokenizer.encode(build_prompt(templates, ChatRequest(HI), tokenizer).text)
    assert ids.count(tokenizer.bos or 0) == 1 and ids[0] == tokenizer.bos


BAD = [
    ([], "'messages' is required"),
    ([{"content": "x"}], r"messages\[0\]"),
    ([{"role": "user"}], "'content' is missing"),
    ([{"role": "user", "content": 5}], "must be a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported content"),
    (
        [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *HI],
        "not valid JSON",
    ),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_bad_messages(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt(FULL, messages)


def test_tool_choice() -> None:
    templates = ChatTemplates(ChatTemplate(FULL))
    for choice, lazy in (
        ("auto", True),
        ("required", False),
        ({"type": "function", "function": TOOLS[0]["function"]}, False),
    ):
        grammar = build_prompt(templates, ChatRequest(HI, TOOLS, choice)).grammar
        assert grammar is not None and grammar.lazy == lazy
    none = build_prompt(templates, ChatRequest(HI, TOOLS, "none"))
    assert none.grammar is None and none.call_format is None and "get_weather" in none.text
    for wrong in ("sometimes", {"function": {"name": "nope"}}):
        with pytest.raises(RequestError, match="Invalid tool_choice"):
            build_prompt(templates, ChatRequest(HI, TOOLS, wrong))
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        build_prompt(templates, ChatRequest(HI, [{"type": "function"}]))


def test_tools_with_a_template_that_has_none() -> None:
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    made = build_prompt(
        ChatTemplates(ChatTemplate(PLAIN)), ChatRequest([*HI, called, {"role": "tool", "content": "7"}], TOOLS)
    )
    assert "get_weather" in made.text and '{"name": "f"' in made.text and "<tool_response>\n7" in made.text
    assert made.call_format == "hermes"


# -- the same prompts as llama.cpp -------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": " Be brief. "}
TALK = [
    SYSTEM,
    {"role": "user", "content": " U1 "},
    {"role": "assistant", "content": " A1 "},
    {"role": "user", "content": "U2"},
]


@pytest.mark.peer
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates(name: str, tmp_path: Path) -> None:
    peer = Peer(write_model(tmp_path / "model.gguf", byte_bpe("qwen2")), use_jinja=False, chat_template=name)
    for messages in (TALK, TALK[1:], TALK[:2]):
        ours = load_templates({}, override=name).default.render(messages)
        assert ours == peer.post("/apply-template", {"messages": messages})["prompt"]


CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "question": {"messages": HI},
    "talk": {"messages": TALK},
    "developer": {"messages": [{**SYSTEM, "role": "developer"}, *HI]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "thoughts": {"messages": [*HI, {"role": "assistant", "content": "A", "reasoning_content": "why"}, *HI]},
    "no thinking": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "prefill": {"messages": [*HI, {"role": "assistant", "content": "The answer"}]},
    "no generation prompt": {"messages": HI, "add_generation_prompt": False},
    "tools": {"messages": HI, "tools": TOOLS},
    "tool result": {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                 {"role": "tool", "content": "rain", "tool_call_id": "1"}], "tools": TOOLS},
}  # fmt: skip
SOURCES = {"full": FULL, "hermes": HERMES, "plain": PLAIN, "switch": SWITCH, "typed": TYPED}
EMULATED = {"tools", "tool result"}  # templates without tools get them in our own words


@pytest.mark.peer
@pytest.mark.parametrize("source", SOURCES)
def test_same_prompts(source: str, tmp_path: Path) -> None:
    peer = Peer(write_model(tmp_path / "model.gguf", byte_bpe("qwen2"), template=SOURCES[source]))
    templates = load_templates({"tokenizer.chat_template": SOURCES[source]})
    for name, body in CONVERSATIONS.items():
        if name in EMULATED and source in ("plain", "switch", "typed"):
            continue
        try:
            theirs = peer.post("/apply-template", body)["prompt"]
        except urllib.error.HTTPError as error:
            theirs = json.loads(error.read())
        assert build_prompt(templates, ChatRequest(**body)).text == theirs, name
    caps = peer.get("/props")["chat_template_caps"]
    assert vars(templates.default.capabilities) == caps
