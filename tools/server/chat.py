"""A chat request: checked as llama-server checks it, rendered by the template, its answer's parser and grammar chosen.

The three chat APIs meet here: each turns its body into a chat-completion body first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ggufspec.chat import ChatTemplate, preserve_variables
from ggufspec.chat_calls import detect_format
from ggufspec.chat_grammar import ChatGrammar, schema_grammar, tool_grammar
from ggufspec.chat_parse import ChatParser
from ggufspec.grammar import GrammarSpec, Trigger
from ggufspec.thinking import ThinkingBudget, thinking_budget

from .chat_messages import Prefill, check_messages, clean, split_prefill
from .errors import ApiError, type_error, type_name
from .fields import Field, Task
from .native import set_grammar
from .state import ServerState

DEFAULT_TOP_LOGPROBS = 20


@dataclass
class ChatPrompt:
    """A rendered request; `text` ends with what the answer continues."""

    task: Task
    text: str
    tokens: list[int]
    prefill: str  # content of the message that is continued: the whole answer begins with it
    prefill_thoughts: str  # and its thoughts
    opening: str  # the end of the prompt that the parser of an answer begins with
    thinking: tuple[str, str] | None
    call_format: str | None
    tools: list[dict[str, Any]]

    def new_parser(self) -> ChatParser:
        """A parser for one answer."""
        return ChatParser(
            self.thinking,
            self.call_format,
            self.tools,
            self.task.reasoning_format,
            self.opening,
        )


@dataclass
class ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request."""

    tools: list[dict[str, Any]]
    choice: str = "auto"  # "auto", "none", "required"
    only: str | None = None  # the function that `tool_choice` names
    parallel: bool | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """What the answer may call."""
        if self.choice == "none":
            return []
        return [tool for tool in self.tools if self.only in (None, tool["function"]["name"])]


def read_chat(state: ServerState, body: dict[str, Any]) -> ChatPrompt:
    settings = state.settings.chat
    messages = check_messages(body)
    use = read_tools(body, settings.jinja)
    schema = read_schema(body)
    check_constraints(body, use, schema)
    task = state.reader.read(_with_logprobs(body, bool(use.tools)))
    prefill = split_prefill(messages, body, settings.prefill_assistant)
    template = state.model.chat.pick(bool(use.tools))
    tags = None if settings.skip_parsing else template.thinking_tags
    variables = template_variables(state, template, body)
    if prefill is not None and template.thinking_tags is not None:
        variables["enable_thinking"] = prefill.is_reasoning or prefill.thoughts != ""
    wants_prompt = prefill is not None or body.get("add_generation_prompt", True) is not False
    shown = clean(messages if prefill is None else messages[:-1], template.capabilities, template.typed_only)
    tools = [_as_shown(tool) for tool in use.tools]
    bare = template.render(shown, tools, False, **variables)
    text = template.render(shown, tools, True, **variables) if wants_prompt else bare
    opening = text[len(bare) :] if text.startswith(bare) else ""
    content, thoughts = _continued(prefill, template)
    opening += thoughts
    task.generation_prompt = opening + content
    text = _without_marks(text, state) + thoughts + content
    call_format = detect_format(template.source) if use.callable and not settings.skip_parsing else None
    task.chat_format = call_format or "Content-only"
    set_grammar(state, task, body)
    chosen = choose_grammar(use, schema, call_format, template, _open_end(tags, opening))
    if chosen is not None:
        task.grammar, task.grammar_text = chosen, chosen.text
        task.grammar_lazy = chosen.lazy
        task.grammar_triggers = [{"type": trigger.kind, "value": trigger.value} for trigger in chosen.triggers]
    budget = read_budget(state, body, tags, opening)
    if budget is not None:
        task.grammar = replace(task.grammar or GrammarSpec("none"), thinking=budget)
    return ChatPrompt(
        task,
        text,
        state.model.tokenizer.encode(text, add_special=True, parse_special=True),
        *_begun(content, thoughts, opening, tags, task.reasoning_format == "none" and prefill is not None),
        tags,
        call_format,
        use.callable if call_format else [],
    )


# -- tools and schemas ---------------------------------------------------------------------------------------------


def read_tools(body: dict[str, Any], jinja: bool) -> ToolUse:
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError(f"Failed to parse tools: Expected 'tools' to be an array, got {json.dumps(tools)}")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ApiError(f"Failed to parse tools: Unsupported tool type: {json.dumps(tool, ensure_ascii=False)}")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError("Failed to parse tools: [json.exception.out_of_range.403] key 'name' not found")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ApiError(f"Failed to parse tools: {type_error('object', function['parameters'])}")
    if tools and not jinja:
        raise ApiError("tools param requires --jinja flag")
    use = ToolUse(tools)
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        use.only = _named(choice, tools)
        use.choice = "required"
    elif choice in ("auto", "none", "required"):
        use.choice = choice
    else:
        raise ApiError(f"Invalid tool_choice: {choice}")
    if body.get("parallel_tool_calls") is not None:
        use.parallel = Field("parallel_tool_calls", "bool").read(body["parallel_tool_calls"])
    return use


def _as_shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates see it: llama-server keeps these keys, in this order, and fills in what is missing."""
    function = tool["function"]
    shown = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters", {}),
    }
    return {"type": "function", "function": shown}


def _named(choice: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    function = choice.get("function")
    name: Any = function.get("name") if isinstance(function, dict) else None
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise ApiError(f"tool_choice names the function {name!r}; the tools are: {', '.join(known) or 'none'}")
    return name


def read_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema the answer must follow: `json_schema`, or that of `response_format`; {} is any object."""
    schema = body.get("json_schema")
    form = body.get("response_format")
    if isinstance(form, dict):
        kind = form.get("type")
        if kind == "json_object":
            schema = form.get("schema") or {"type": "object"}
        elif kind == "json_schema":
            wrapped = form.get("json_schema")
            schema = (wrapped.get("schema") if isinstance(wrapped, dict) else None) or {"type": "object"}
        elif kind not in (None, "text"):
            raise ApiError(f'response_format type must be one of "text" or "json_object", but got: {kind}')
    if schema is not None and not isinstance(schema, dict):
        raise ApiError(f"the JSON schema must be an object, but is {type_name(schema)}")
    return {"type": "object"} if schema == {} else schema


def check_constraints(body: dict[str, Any], use: ToolUse, schema: dict[str, Any] | None) -> None:
    has_grammar = isinstance(body.get("grammar"), str) and body["grammar"] != ""
    if has_grammar and use.tools:
        raise ApiError("Cannot use custom grammar constraints with tools.")
    if has_grammar and schema is not None:
        raise ApiError("Cannot use both json_schema and grammar")
    if schema is not None and use.callable:
        raise ApiError("response_format and tools cannot be used together, unless tool_choice is none")


def _with_logprobs(body: dict[str, Any], with_tools: bool) -> dict[str, Any]:
    """OpenAI's `logprobs` (a flag) and `top_logprobs` as this server's `n_probs`."""
    wants = body.get("logprobs")
    if wants is True:
        if with_tools and body.get("stream"):
            raise ApiError("logprobs is not supported with tools + stream")
        n_top = body.get("top_logprobs", DEFAULT_TOP_LOGPROBS)
        return body | {"n_probs": Field("top_logprobs", "int").read(n_top)}
    if "top_logprobs" in body:
        raise ApiError("top_logprobs requires logprobs to be set to true")
    return body


def choose_grammar(
    use: ToolUse,
    schema: dict[str, Any] | None,
    call_format: str | None,
    template: ChatTemplate,
    thinking_end: str,
) -> GrammarSpec | None:
    """None: the answer is free (or the request's own grammar holds)."""
    if schema is not None:
        if not thinking_end:
            return GrammarSpec("json_schema", json.dumps(schema))
        return _spec(schema_grammar(schema, thinking_end))
    if not use.callable or call_format is None:
        return None
    parallel = use.parallel if use.parallel is not None else template.capabilities.supports_parallel_tool_calls
    try:
        return _spec(tool_grammar(call_format, use.callable, use.choice == "required", parallel, thinking_end))
    except (AttributeError, KeyError, TypeError, ValueError) as e:  # a schema of the wrong shape somewhere inside
        raise ApiError(f"Failed to parse tools: a function's parameters are no JSON schema ({e})") from None


def read_budget(
    state: ServerState, body: dict[str, Any], tags: tuple[str, str] | None, generation_prompt: str
) -> ThinkingBudget | None:
    """The limit on thinking tokens: the request's, else the command line's; None without one, or without thoughts."""
    settings = state.settings.chat
    n_tokens = settings.reasoning_budget
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        if name in body:
            n_tokens = Field(name, "int", -1, 2**31 - 1, refuse=True).read(body[name])
            break
    if n_tokens < 0 or tags is None:
        return None
    message = body.get("reasoning_budget_message", settings.reasoning_budget_message) or ""
    if not isinstance(message, str):
        raise ApiError(f"Field 'reasoning_budget_message': {type_error('string', message)}")

    def encode(text: str) -> list[int]:
        return state.model.tokenizer.encode(text, add_special=False, parse_special=True)

    return thinking_budget(encode, n_tokens, tags, message, generation_prompt)


def _spec(grammar: ChatGrammar) -> GrammarSpec:
    return GrammarSpec("lark", grammar.lark, grammar.lazy, tuple(Trigger("word", word) for word in grammar.triggers))


# -- rendering -----------------------------------------------------------------------------------------------------


def _continued(prefill: Prefill | None, template: ChatTemplate) -> tuple[str, str]:
    """(content, thoughts with what stands between the two) of a message that is continued; a template that does not
    know thoughts leaves them out.
    """
    if prefill is None:
        return "", ""
    if not prefill.thoughts or template.thinking_tags is None:
        return prefill.content, ""
    return prefill.content, prefill.thoughts + ("" if prefill.is_reasoning else template.after_thoughts)


def _begun(
    content: str, thoughts: str, opening: str, tags: tuple[str, str] | None, unparsed: bool
) -> tuple[str, str, str]:
    """(content, thoughts) with which a whole answer begins, and the opening that its parser has to know.

    `unparsed`: thoughts stay in the content with their marks, so that all of it is what a whole answer begins with.
    """
    if tags is None:
        return content, "", opening
    if unparsed and tags[0] in opening:
        return opening[opening.rfind(tags[0]) :] + content, "", ""
    return content, thoughts.partition(tags[1])[0], opening


def template_variables(state: ServerState, template: ChatTemplate, body: dict[str, Any]) -> dict[str, Any]:
    """What a template sees beside messages and tools; the request's kwargs win over the command line's."""
    settings = state.settings.chat
    thinking = {"on": True, "off": False}.get(settings.reasoning, template.thinking_tags is not None)
    variables: dict[str, Any] = {"enable_thinking": thinking, **settings.template_kwargs}
    effort = body.get("reasoning_effort", settings.reasoning_effort)
    if isinstance(effort, str):
        if effort == "none":
            variables["enable_thinking"] = False
        else:
            variables |= {"reasoning_effort": effort, "reasoning_strength": effort}
    kwargs = body.get("chat_template_kwargs")
    if isinstance(kwargs, dict):
        given = kwargs.get("enable_thinking")
        if isinstance(given, str):
            raise ApiError(f'invalid type for "enable_thinking" (expected boolean, got {type_name(given)})')
        variables |= kwargs
    keep = variables.pop("preserve_reasoning", settings.reasoning_preserve)
    return preserve_variables(bool(keep)) | variables


def _without_marks(text: str, state: ServerState) -> str:
    """The vocabulary adds BOS (and EOS) itself: one that the template wrote would be a second."""
    tokenizer = state.model.tokenizer
    bos, eos = tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
    if tokenizer.add_bos and bos:
        text = text.removeprefix(bos)
    if tokenizer.add_eos and eos:
        text = text.removesuffix(eos)
    return text


def _open_end(tags: tuple[str, str] | None, generation_prompt: str) -> str:
    """The end mark of thoughts that the prompt has opened, else ""."""
    if tags is None:
        return ""
    at = generation_prompt.rfind(tags[0])
    return tags[1] if at >= 0 and tags[1] not in generation_prompt[at:] else ""
