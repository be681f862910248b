"""Thoughts, content and tool calls in the shapes of the three chat APIs, whole and streamed, from scripted answers."""

import contextlib
import json

import httpx
import pytest
from fake_engine import FakeEngine
from serving import fake_loaded, serve, wait_ready
from table import chunks_of

from ggufspec.chat import load_templates

TEMPLATE = """{%- for message in messages %}{{- '<' + message.role + '>' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{%- endfor %}
{%- if tools %}{{- '[' + tools | map(attribute='function.name') | join(',') + ']' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<assistant><think>\\n' }}
{%- if not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

CALL = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx é\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
SCRIPT = "I need\nit.\n</think>\n\nHere you are.\n" + CALL + "\n" + CALL.replace("x é", "y")
PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
HELLO = [{"role": "user", "content": "Hi"}]
ARGUMENTS = ['{"a":"x é","n":3}', '{"a":"y","n":3}']


@contextlib.contextmanager
def scripted(text):
    engine = FakeEngine(script=text, n_ctx=2048)

    def load():
        loaded = fake_loaded(engine)
        loaded.chat = load_templates({"tokenizer.chat_template": TEMPLATE})
        return loaded

    with serve(load) as (address, _):
        with httpx.Client(base_url=address, timeout=20) as client:
            wait_ready(client)
            yield client


@pytest.fixture(scope="module")
def client():
    with scripted(SCRIPT) as client:
        yield client


def test_chat_whole(client):
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS}).json()
    choice = answer["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("I need\nit.\n", "Here you are.\n")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": a} for a in ARGUMENTS]
    assert all(call["type"] == "function" and len(call["id"]) == 32 for call in message["tool_calls"])


def test_chat_stream_adds_up_to_the_whole(client):
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    chunks = [data for _, data in chunks_of(client.post("/v1/chat/completions", json=body).text)]
    assert chunks.pop() == "[DONE]"
    text = {"content": "", "reasoning_content": ""}
    calls = {}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        assert len([key for key in delta if delta[key]]) <= 1 or delta.get("role")
        for key in text:
            text[key] += delta.get(key) or ""
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"].get("arguments", "")
    assert text == {"content": "Here you are.\n", "reasoning_content": "I need\nit.\n"}
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [("f", a) for a in ARGUMENTS]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_messages_whole(client):
    tools = [{"name": "f", "input_schema": PARAMETERS}]
    answer = client.post("/v1/messages", json={"messages": HELLO, "tools": tools, "max_tokens": 900}).json()
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and answer["stop_reason"] == "tool_use"
    assert answer["content"][0] == {"type": "thinking", "thinking": "I need\nit.\n", "signature": ""}
    assert answer["content"][2]["input"] == {"a": "x é", "n": 3}


def test_messages_stream(client):
    body = {"messages": HELLO, "tools": [{"name": "f", "input_schema": PARAMETERS}], "max_tokens": 900, "stream": True}
    events = chunks_of(client.post("/v1/messages", json=body).text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events if name != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 4
    assert names == ["message_start", *blocks, "message_delta", "message_stop"]
    blocks = {}
    for name, data in events:
        if name == "content_block_start":
            blocks[data["index"]] = (data["content_block"]["type"], "")
        if name == "content_block_delta":
            kind, text = blocks[data["index"]]
            delta = data["delta"]
            piece = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            blocks[data["index"]] = (kind, text + piece)
    assert blocks == {
        0: ("thinking", "I need\nit.\n"), 1: ("text", "Here you are.\n"),
        2: ("tool_use", ARGUMENTS[0]), 3: ("tool_use", ARGUMENTS[1]),
    }  # fmt: skip
    signatures = [data for _, data in events if data.get("delta", {}).get("type") == "signature_delta"]
    assert [s["index"] for s in signatures] == [0]
    assert [data["delta"]["stop_reason"] for name, data in events if name == "message_delta"] == ["tool_use"]


def test_responses_whole_and_stream(client):
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}, {"type": "web_search"}]
    body = {"input": "Hi", "tools": tools}
    answer = client.post("/v1/responses", json=body).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert [item["arguments"] for item in answer["output"][2:]] == ARGUMENTS
    for item in answer["output"][2:]:
        assert item["id"][3:] == item["call_id"][5:] and item["name"] == "f"
    events = chunks_of(client.post("/v1/responses", json=body | {"stream": True}).text)
    done = events[-1][1]["response"]

    def without_ids(items):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert without_ids(done["output"]) == without_ids(answer["output"])
    arguments = "".join(d["delta"] for name, d in events if name == "response.function_call_arguments.delta")
    assert arguments == "".join(ARGUMENTS)
    thoughts = "".join(d["delta"] for name, d in events if name == "response.reasoning_text.delta")
    assert thoughts == "I need\nit.\n"


def test_tool_choice_none_leaves_the_text_alone(client):
    answer = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}).json()
    message = answer["choices"][0]["message"]
    assert "tool_calls" not in message and message["content"].endswith("</tool_call>")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_reasoning_format_none_keeps_the_mark(client):
    body = {"messages": HELLO, "reasoning_format": "none"}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"].startswith("<think>\nI need\nit.\n</think>") and "reasoning_content" not in message


def test_a_call_cut_by_the_limit_is_length(client):
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 75}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_history_reaches_the_template(client):
    """Thinking, calls and results of each API's own history come out in the prompt."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "R"}]}]},
    ]  # fmt: skip
    claude = {"system": "S", "messages": messages, "max_tokens": 1}
    items = [
        {"role": "user", "content": "Q"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a":"x"}'},
        {"type": "function_call_output", "call_id": "1", "output": "R"},
    ]
    openai = {"instructions": "S", "input": items, "max_output_tokens": 1}
    expected = (
        "<system>S<user>Q<assistant><think>\nhm\n</think>\n\nA<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"
        "</function>\n</tool_call><tool>R<assistant><think>\n"
    )
    n = len(expected.encode())
    assert client.post("/v1/messages/count_tokens", json=claude).json()["input_tokens"] == n
    assert client.post("/v1/responses/input_tokens", json=openai).json()["input_tokens"] == n


def test_prefill(client):
    messages = [*HELLO, {"role": "assistant", "content": "So"}]
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == "<user>Hi<assistant><think>\n\n</think>\n\nSo"
    thinking = [*HELLO, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    body = {"messages": thinking, "continue_final_message": "reasoning_content", "add_generation_prompt": False}
    assert client.post("/apply-template", json=body).json()["prompt"] == "<user>Hi<assistant><think>\nHm"
    assert client.post("/apply-template", json={"messages": thinking}).json()["prompt"].endswith("<think>\nHm")
    both = {"role": "assistant", "content": "So", "reasoning_content": "Hm"}
    prompt = client.post("/apply-template", json={"messages": [*HELLO, both]}).json()["prompt"]
    assert prompt == "<user>Hi<assistant><think>\nHm\n</think>\n\nSo"


def test_a_continued_answer_begins_with_what_it_continues():
    thinking = [*HELLO, {"role": "assistant", "content": None, "reasoning_content": "Hm"}]
    claude = [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]
    with scripted(" so.\n</think>\n\nYes.") as client:
        message = client.post("/v1/chat/completions", json={"messages": thinking}).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm so.\n", "Yes.")
        blocks = client.post("/v1/messages", json={"messages": claude}).json()["content"]
        assert [block.get("thinking") or block["text"] for block in blocks] == ["Hm so.\n", "Yes."]
        stream = client.post("/v1/chat/completions", json={"messages": thinking, "stream": True}).text
        deltas = [d["choices"][0]["delta"] for _, d in chunks_of(stream) if d != "[DONE]"]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == " so.\n"
        body = {"messages": thinking, "reasoning_format": "none"}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"] == "<think>\nHm so.\n</think>\n\nYes."


def test_an_error_names_the_field_that_was_sent(client):
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": "2"}
    message = client.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert message == "Field 'top_logprobs': [json.exception.type_error.302] type must be number, but is string"


def test_broken_arguments_in_history(client):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"messages": [*HELLO, said, {"role": "tool", "content": "R"}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "arguments as JSON" in answer.json()["error"]["message"]


def test_logprobs_of_thoughts_and_calls_are_all_there(client):
    body = {"messages": HELLO, "logprobs": True, "stream": True, "top_logprobs": 1}
    chunks = [d for _, d in chunks_of(client.post("/v1/chat/completions", json=body).text) if d != "[DONE]"]
    entries = [e for c in chunks for e in (c["choices"][0].get("logprobs") or {}).get("content", [])]
    assert json.dumps([e["id"] for e in entries]) == json.dumps([*SCRIPT.encode(), 256])
