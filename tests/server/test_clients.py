"""The openai and anthropic packages as real clients of a server with the bundled model."""

import json

import pytest
from real import serve_model

openai = pytest.importorskip("openai", reason="the openai package is not installed (extra `test`)")
anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed (extra `test`)")

HELLO = [{"role": "user", "content": "Write add"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
# The bundled model knows nothing of tools; this layout makes a required call the whole answer, so that the
# grammar alone brings it out: {"name": ..., "parameters": {...}}.
TOOL_TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if tools %}{{- '<|im_start|>ipython\\n<|python_tag|>' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "additionalProperties": False,
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def http():
    with serve_model("-c", "2048", "-np", "2", "--alias", "tiny", "--api-key", "secret") as client:
        client.headers["authorization"] = "Bearer secret"
        yield client


@pytest.fixture(scope="module")
def client(http):
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def claude(http):
    return anthropic.Anthropic(base_url=str(http.base_url), api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    argv = ("-c", "1024", "-np", "1", "--alias", "tiny", "--chat-template-file", str(path))
    with serve_model(*argv) as http:
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_wrong_key(http):
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0).models.list()


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.message.content.startswith("```python")
    assert answer.usage.completion_tokens == 12 and answer.usage.total_tokens == 12 + answer.usage.prompt_tokens


def test_chat_stream(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({c.id for c in chunks}) == 1


def test_seed_fixes_a_sampled_answer(client):
    def ask(seed):
        return client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=16, temperature=1.5, seed=seed, n=2
        )

    one, two, other = ask(5), ask(5), ask(6)
    texts = [c.message.content for c in one.choices]
    assert texts == [c.message.content for c in two.choices]
    assert texts[0] != texts[1] and texts != [c.message.content for c in other.choices]


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 5
    assert b"".join(bytes(e.bytes) for e in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=120, temperature=0, response_format=form, stream=stream
    )
    text = (
        "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    )
    value = json.loads(text)
    assert value.keys() == {"name", "n"} and len(value["name"]) <= 5 and 0 <= value["n"] <= 9


def test_text_completion(client):
    options = {"model": "tiny", "prompt": "def add(a, b):\n", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**options, stop=["Add"])
    assert "Add" not in answer.choices[0].text and answer.choices[0].finish_reason == "stop"


def test_context_overflow_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model="tiny", prompt="a b " * 2000, max_tokens=4)


def test_responses(client):
    options = {"model": "tiny", "input": "Write add", "max_output_tokens": 8, "temperature": 0}
    answer = client.responses.create(**options)
    assert answer.status == "completed" and answer.output_text.startswith("```python")
    assert answer.usage.output_tokens == 8
    events = list(client.responses.create(**options, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == answer.output_text == events[-1].response.output_text


def test_tools(caller):
    """A required call: arguments that fit the schema, whole and streamed."""
    options = {
        "model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
        "max_tokens": 200, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "cache_prompt": False},
    }  # fmt: skip
    answer = caller.chat.completions.create(**options)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice.message.content
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather" and len(call.id) == 32
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    name, arguments = "", ""
    for chunk in caller.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.index == 0:
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, arguments) == ("get_weather", call.function.arguments)


def test_a_named_tool_and_none(caller):
    options = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert caller.chat.completions.create(**options, tool_choice=named).choices[0].message.tool_calls
    assert not caller.chat.completions.create(**options, tool_choice="none").choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="names the function 'f'"):
        named = {"type": "function", "function": {"name": "f"}}
        caller.chat.completions.create(**options, tool_choice=named)


def test_reasoning(caller):
    answer = caller.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=60)
    message = answer.choices[0].message
    assert message.reasoning_content and "</think>" not in (message.content or "") + message.reasoning_content


def test_a_thinking_budget_ends_the_thoughts(caller):
    def ask(**more):
        answer = caller.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_tokens=40, extra_body=more
        )
        return answer.choices[0].message

    free = ask().reasoning_content
    limited = ask(reasoning_budget_tokens=4, reasoning_budget_message="\nEnough.")
    assert limited.reasoning_content.endswith("\nEnough.\n") and limited.content
    assert free.startswith(limited.reasoning_content.removesuffix("\nEnough.\n"))
    assert not getattr(ask(reasoning_budget_tokens=0), "reasoning_content", None)


def test_messages(claude):
    greedy = {"temperature": 0}  # the package has no argument for it any more
    answer = claude.messages.create(model="tiny", messages=HELLO, max_tokens=8, extra_body=greedy)
    assert answer.stop_reason == "max_tokens" and answer.content[0].text.startswith("```python")
    assert answer.usage.output_tokens == 8
    with claude.messages.stream(model="tiny", messages=HELLO, max_tokens=8, extra_body=greedy) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    stopped = claude.messages.create(
        model="tiny", messages=HELLO, max_tokens=30, extra_body=greedy, stop_sequences=["def"], system="Be short"
    )
    assert stopped.stop_reason == "end_turn" and stopped.stop_sequence == "def"


def test_count_tokens(claude):
    assert claude.messages.count_tokens(model="tiny", messages=HELLO).input_tokens == 14
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="tiny", messages=[{"role": "user", "content": "a " * 4000}], max_tokens=4)
