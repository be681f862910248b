"""Chat templates: sandboxed, clear when broken, and the prompts are llama.cpp's."""

from pathlib import Path
from typing import Any

import pytest

from ggufspec.chat import ChatTemplate, load_templates, render
from ggufspec.chat_templates import BUILT_IN
from ggufspec.errors import ConfigError, RequestError
from ggufspec.tools.server.errors import ApiError

from .peer import Peer
from .request import read_request
from .templates import FULL, HERMES, PLAIN, SWITCH, TOOLS, TYPED
from .vocabularies import byte_bpe, sentencepiece, write_model

HI = [{"role": "user", "content": "hi"}]


def prompt(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return read_request(source, {"messages": messages, **options}).text


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


def test_variables_may_have_any_name():
    template = ChatTemplate("{{ self_ }}{{ tools }}{{ messages | length }}{{ add_generation_prompt }}")
    assert template.render(HI, None, False, self_=1, tools=2, messages="abc", add_generation_prompt=True) == "123"
    names = {"self": 1, "tools": 2, "add_generation_prompt": False}
    assert template.render(HI, [{"a": 1}], **names) == "[{'a': 1}]1True"


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
    assert prompt(FULL, HI, chat_template_kwargs={"enable_thinking": False}).endswith(closed)
    assert prompt(FULL, HI, reasoning_effort="none").endswith(closed)
    assert prompt(SWITCH, HI).endswith(closed), "a template that writes no thoughts does not think by default"
    with pytest.raises(ApiError, match="enable_thinking"):
        prompt(FULL, HI, chat_template_kwargs={"enable_thinking": "false"})


def test_thinking_marks() -> None:
    assert ChatTemplate(FULL).thinking_tags == ChatTemplate(HERMES).thinking_tags == ("<think>", "</think>")
    assert ChatTemplate(FULL.replace("think>", "seed:think>")).thinking_tags == ("<seed:think>", "</seed:think>")
    assert [ChatTemplate(source).thinking_tags for source in (PLAIN, SWITCH, TYPED)] == [None] * 3


def test_history_keeps_or_drops_thoughts() -> None:
    turns = [*HI, {"role": "assistant", "content": "A", "reasoning_content": "why"}, *HI]
    dropped = prompt(FULL, turns, chat_template_kwargs={"preserve_reasoning": False})
    assert "why" in prompt(FULL, turns) and "why" not in dropped
    longer = [*turns, {"role": "assistant", "content": "B", "reasoning_content": "so"}, *HI]
    kept = prompt(FULL, turns).removesuffix("<think>\n")
    assert prompt(FULL, longer).startswith(kept), "the next prompt extends this one, so the cache can be used"


def test_a_begin_token_is_not_written_twice() -> None:
    made = read_request("{{ bos_token }}{{ messages[0].content }}", {"messages": HI}, sentencepiece())
    assert made.text == "hi" and made.tokens.count(1) == 1 and made.tokens[0] == 1


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
    "tools with more or less than usual": {"messages": HI, "tools": [
        {"type": "function", "x": 1, "function": {"strict": True, "parameters": {"type": "object"}, "name": "f"}},
        {"type": "function", "function": {"name": "g"}}]},
    "tools": {"messages": HI, "tools": TOOLS},
    "tool result": {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                 {"role": "tool", "content": "rain", "tool_call_id": "1"}], "tools": TOOLS},
}  # fmt: skip
SOURCES = {"full": FULL, "hermes": HERMES, "plain": PLAIN, "switch": SWITCH, "typed": TYPED}


@pytest.mark.peer
@pytest.mark.parametrize("source", SOURCES)
def test_same_prompts(source: str, tmp_path: Path) -> None:
    peer = Peer(write_model(tmp_path / "model.gguf", byte_bpe("qwen2"), template=SOURCES[source]))
    for name, body in CONVERSATIONS.items():
        theirs = peer.post("/apply-template", body)["prompt"]
        assert read_request(SOURCES[source], body).text == theirs, name
    assert vars(ChatTemplate(SOURCES[source]).capabilities) == peer.get("/props")["chat_template_caps"]
