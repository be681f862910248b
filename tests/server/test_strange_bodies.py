"""Bodies that no client should send: every one is read, or refused as the client's fault; never a 500."""

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import fake_loaded
from test_chat_forms import TEMPLATE

from ggufspec.chat import load_templates
from ggufspec.errors import GgufspecError
from ggufspec.tools.server import anthropic, responses
from ggufspec.tools.server.chat import read_chat
from ggufspec.tools.server.errors import ApiError, as_api_error
from ggufspec.tools.server.prompts import read_prompts
from ggufspec.tools.server.state import ServerState
from ggufspec.tools.settings import Settings

state = ServerState(Settings())
state.ready(fake_loaded(FakeEngine()))
state.model.chat = load_templates({"tokenizer.chat_template": TEMPLATE})

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["", "a", "text", "é"])
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def objects(**keys):
    """Objects with some of these keys; each value is of the right kind, or anything."""
    return st.fixed_dictionaries({}, optional={key: kind | anything for key, kind in keys.items()})


def words(*values):
    return st.sampled_from(values)


text = words("", "a", "{}", '{"a":1}', "{")
function = objects(name=words("f", "g"), arguments=text, parameters=objects(type=words("object"), properties=anything))
part = objects(
    type=words("text", "image_url", "image", "thinking", "tool_use", "tool_result", "input_text", "output_text", "zz"),
    text=text, thinking=text, input=anything, name=text, id=text, content=text, tool_use_id=text, source=anything,
)  # fmt: skip
content = text | st.lists(part, max_size=2)
call = objects(id=text, type=words("function"), function=function)
message = objects(
    role=words("user", "assistant", "system", "tool", "developer"), content=content, reasoning_content=text,
    tool_calls=st.lists(call, max_size=2), type=words("message", "function_call", "function_call_output", "reasoning"),
    call_id=text, name=text, arguments=text, output=content,
)  # fmt: skip
tool = objects(type=words("function"), function=function, name=words("f"), description=text, input_schema=anything)
named = objects(type=words("auto", "any", "tool", "function"), name=text, function=function)
choice = words("auto", "none", "required", "any") | named
body = objects(
    messages=st.lists(message, max_size=3),
    input=text | st.lists(message, max_size=3),
    system=content,
    instructions=text,
    tools=st.lists(tool, max_size=2),
    tool_choice=choice,
    parallel_tool_calls=st.booleans(),
    stream=st.booleans(),
    response_format=objects(type=words("text", "json_object", "json_schema"), schema=anything, json_schema=anything),
    json_schema=anything,
    grammar=text,
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 3),
    stop=text,
    n=st.integers(1, 2),
    chat_template_kwargs=objects(
        enable_thinking=st.booleans(), preserve_reasoning=anything, messages=anything, tools=anything,
        add_generation_prompt=anything, self=anything, bos_token=anything,
    ),
    reasoning_effort=text,
    continue_final_message=st.booleans() | words("reasoning_content"),
    add_generation_prompt=st.booleans(),
    reasoning_budget_tokens=st.integers(-2, 3),
    reasoning_budget_message=text,
    stream_options=anything,
    thinking=anything,
    stop_sequences=anything,
    max_tokens=st.integers(-2, 5),
    reasoning=anything,
    text=anything,
)

CONVERSIONS = {"chat": lambda b: b, "anthropic": anthropic.to_chat, "responses": responses.to_chat}


@pytest.mark.parametrize("api", CONVERSIONS)
@settings(max_examples=80, deadline=None)
@given(body=body)
def test_chat_bodies(api, body):
    body = {key: value for key, value in body.items() if value is not None}
    try:
        chat = read_chat(state, CONVERSIONS[api](body))
        chat.task.settings()
        chat.new_parser()
    except (ApiError, GgufspecError) as e:
        assert 400 <= as_api_error(e).status < 500


@pytest.mark.parametrize("api", CONVERSIONS)
@settings(max_examples=80, deadline=None)
@given(messages=st.lists(message, max_size=3), tools=st.lists(tool, max_size=2))
def test_messages_alone(api, messages, tools):
    test_chat_bodies.hypothesis.inner_test(api, {"messages": messages, "input": messages, "tools": tools})


@settings(max_examples=80, deadline=None)
@given(prompt=anything | st.lists(st.integers(-1, 300) | text | st.lists(st.integers(0, 3), max_size=2), max_size=3))
def test_prompts(prompt):
    try:
        prompts = read_prompts({"prompt": prompt}, state.model.tokenizer)
        for tokens in prompts:
            state.request(tokens, state.reader.read({}))
    except (ApiError, GgufspecError) as e:
        assert 400 <= as_api_error(e).status < 500
