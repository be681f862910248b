"""One chat request to the prompt, and to what is needed to read the answer: marks, call format, grammar.

prompt = build_prompt(templates, ChatRequest(messages=[...], tools=[...]), tokenizer)
ids = tokenizer.encode(prompt.text)
parser = prompt.parser()
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatTemplate, ChatTemplates, preserve_variables
from .chat_calls import detect_format
from .chat_grammar import ChatGrammar, schema_grammar, tool_grammar
from .chat_parse import ChatParser
from .errors import RequestError
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatRequest:
    """What a chat request or the command line asks for. Field names are the request's."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"  # auto, none, required, or {"function": {"name": ...}}
    parallel_tool_calls: bool | None = None  # None: as the template can
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False  # True, "content" or "reasoning_content"
    enable_thinking: bool | None = None  # None: on if the template has thoughts
    reasoning_format: str = "auto"
    reasoning_effort: str | None = None
    reasoning_preserve: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    json_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """`text` is tokenized with BOS as usual and special texts parsed."""

    text: str
    generation_prompt: str  # the end of `text` that belongs to the answer; a prefill is part of it
    thinking: tuple[str, str] | None  # marks around thoughts
    thinking_open: bool  # the prompt ends inside thoughts
    call_format: str | None
    tools: tuple[Mapping[str, Any], ...]
    reasoning_format: str
    grammar: ChatGrammar | None
    preserved: tuple[str, ...]  # texts of tokens that must appear in the output although they are control tokens

    def parser(self) -> ChatParser:
        """A new parser for one answer to this prompt."""
        return ChatParser(self.thinking, self.call_format, self.tools, self.reasoning_format, self.generation_prompt)


def build_prompt(templates: ChatTemplates, request: ChatRequest, tokenizer: Tokenizer | None = None) -> ChatPrompt:
    """Render a request. Raises RequestError (400) naming the wrong field or the template's complaint.

    `tokenizer`, if given, decides whether a BOS or EOS text that the template wrote is cut off again.
    """
    choice, tools = _choose(request.tool_choice, check_tools(request.tools))
    template = templates.pick(bool(tools))
    messages, prefill = _split_prefill(check_messages(request.messages), request)
    thinking = template.thinking_tags
    call_format = detect_format(template.source) if tools else None
    if tools and (call_format is None or not template.capabilities.supports_tools):
        # The template cannot show tools: say it in words, in the format that most models have seen.
        messages, call_format = _explain_tools(messages, tools), "hermes"
    variables = _variables(template, request)
    cleaned = clean_messages(messages, template)
    with_end = request.add_generation_prompt or prefill is not None
    before = template.render(cleaned, tools, False, **variables)
    text = template.render(cleaned, tools, True, **variables) if with_end else before
    generation_prompt = text[len(_common(before, text)) :] if with_end else ""
    text, generation_prompt = _trim(text, generation_prompt, tokenizer)
    if prefill is not None:
        text, generation_prompt = text + prefill, generation_prompt + prefill
    opened = thinking is not None and generation_prompt.rfind(thinking[0]) > generation_prompt.rfind(thinking[1])
    grammar = None
    end_mark = thinking[1] if thinking is not None and opened else ""
    if tools and call_format is not None and choice != "none":
        parallel = request.parallel_tool_calls
        parallel = template.capabilities.supports_parallel_tool_calls if parallel is None else parallel
        grammar = tool_grammar(call_format, tools, choice == "required", parallel, end_mark)
    if request.json_schema is not None:
        if grammar is not None and choice == "required":
            raise RequestError(
                "tool_choice 'required' and a JSON schema for the answer contradict one another: give one"
            )
        grammar = schema_grammar(request.json_schema, end_mark)
    preserved = tuple(thinking or ()) + (
        ("<tool_call>", "</tool_call>") if call_format in ("qwen-xml", "hermes") else ()
    )
    parsed = call_format if choice != "none" else None
    return ChatPrompt(
        text, generation_prompt, thinking, opened, parsed, tuple(tools), request.reasoning_format, grammar, preserved
    )


# -- checks ------------------------------------------------------------------------------------------------------------


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Raises RequestError naming the first message that is not as the chat API has it."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("'messages' is required: a list of at least one message")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}]: expected an object with a 'role'")
        content = message.get("content")
        calls = message.get("tool_calls")
        if content is None and not (message["role"] == "assistant" and (calls or message.get("reasoning_content"))):
            raise RequestError(f"messages[{i}]: 'content' is missing (role {message['role']})")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                    raise RequestError(f"messages[{i}]: unsupported content[].type {kind!r}, expected text parts")
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"messages[{i}]: 'content' must be a string or a list of parts")
        for call in calls or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(f"messages[{i}]: each tool call needs a 'function' with a 'name'")
        checked.append(dict(message))
    return checked


def check_tools(tools: Any) -> list[Mapping[str, Any]]:
    """Raises RequestError naming the first tool that is no OpenAI function tool."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError("'tools' must be a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}]: expected {{'type': 'function', 'function': {{'name': ...}}}}")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise RequestError(f"tools[{i}]: 'parameters' must be a JSON schema object")
    return list(tools)


def _choose(choice: Any, tools: list[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """The choice as a word, and the tools that it leaves."""
    if isinstance(choice, Mapping):
        name = (choice.get("function") or choice).get("name")
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise RequestError(f"Invalid tool_choice: no tool is named {name!r}")
        return "required", named
    if choice not in ("auto", "none", "required"):
        raise RequestError(f"Invalid tool_choice: {choice}")
    if choice == "required" and not tools:
        raise RequestError("Invalid tool_choice: 'required' needs 'tools'")
    return choice, tools


# -- messages ----------------------------------------------------------------------------------------------------------


def clean_messages(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages in the shape that the template reads: content as text or parts, arguments as object or text."""
    can = template.capabilities
    cleaned = []
    for message in messages:
        message = dict(message)
        if message["role"] == "developer":
            message["role"] = "system"
        content = message.get("content")
        if isinstance(content, list):
            parts = [{"type": "text", "text": part["text"]} for part in content]
            keep = can.supports_typed_content
            message["content"] = parts if keep else "\n".join(part["text"] for part in parts)
        elif template.typed_only:
            message["content"] = [{"type": "text", "text": content or ""}]
        else:
            message["content"] = content or ""
        if message.get("tool_calls"):
            message["tool_calls"] = [_clean_call(call, can.supports_object_arguments) for call in message["tool_calls"]]
        cleaned.append(message)
    if cleaned[0]["role"] == "system" and not can.supports_system_role:
        system = _text(cleaned.pop(0)["content"])
        if cleaned:
            first = dict(cleaned[0])
            text = system + "\n" + _text(first["content"])
            first["content"] = [{"type": "text", "text": text}] if template.typed_only else text
            cleaned[0] = first
        else:
            cleaned = [{"role": "user", "content": system}]
    return cleaned


def _clean_call(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments", {})
    if as_object and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise RequestError(f"the arguments of the call to {function['name']!r} are not valid JSON") from None
    elif not as_object and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": function}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _explain_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        "You can call these functions:\n" + listed + "\nTo call one, answer with a JSON object between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )  # fmt: skip
    plain = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{"name": call["function"]["name"], "arguments": call["function"].get("arguments", {})}
                     for call in message["tool_calls"]]  # fmt: skip
            said = "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
            message = {**message, "content": (_text(message.get("content")) + "\n" + said).strip(), "tool_calls": None}
        elif message["role"] == "tool":
            result = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            message = {"role": "user", "content": result}
        plain.append(message)
    if plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": _text(plain[0]["content"]) + "\n\n" + text}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _split_prefill(messages: list[dict[str, Any]], request: ChatRequest) -> tuple[list[dict[str, Any]], str | None]:
    """A last message of the assistant is the beginning of its answer, put behind the generation prompt."""
    last = messages[-1]
    if request.continue_final_message:
        if last["role"] != "assistant":
            raise RequestError("continue_final_message needs a last message of role assistant")
        if request.add_generation_prompt and request.continue_final_message is True and len(messages) == 1:
            raise RequestError("continue_final_message needs a message before the assistant's")
    if last["role"] != "assistant" or not (request.add_generation_prompt or request.continue_final_message):
        return messages, None
    if last.get("tool_calls"):
        raise RequestError("the last message is the assistant's and has tool calls: it cannot be continued")
    if len(messages) < 2 or messages[-2]["role"] == "assistant":
        raise RequestError("cannot continue the answer: two messages of the assistant at the end, or none before it")
    content = last.get("content")
    text = content if isinstance(content, str) else "\n\n".join(part["text"] for part in content or ())
    return messages[:-1], text


# -- rendering ---------------------------------------------------------------------------------------------------------


def _variables(template: ChatTemplate, request: ChatRequest) -> dict[str, Any]:
    given = dict(request.chat_template_kwargs)
    thinking = given.pop("enable_thinking", request.enable_thinking)
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError(f"chat_template_kwargs.enable_thinking is {thinking!r}, expected true or false")
    keep = given.pop("preserve_reasoning", request.reasoning_preserve)
    effort = given.pop("reasoning_effort", request.reasoning_effort)
    if effort == "none":
        thinking = False
    if request.messages[-1].get("role") == "assistant" and request.add_generation_prompt:
        thinking = False  # a prefilled answer is behind the thoughts
    has_thoughts = template.thinking_tags is not None
    variables = {**preserve_variables(bool(keep)), "enable_thinking": has_thoughts if thinking is None else thinking}
    if effort is not None and effort != "none":
        variables |= {"reasoning_effort": effort, "reasoning_strength": effort}
    return variables | given


def _trim(text: str, generation_prompt: str, tokenizer: Tokenizer | None) -> tuple[str, str]:
    """Cut off one BOS in front and one EOS behind that tokenizing will add again."""
    if tokenizer is not None and tokenizer.add_bos and (bos := tokenizer.text(tokenizer.bos)):
        text = text.removeprefix(bos)
    if tokenizer is not None and tokenizer.add_eos and (eos := tokenizer.text(tokenizer.eos)) and text.endswith(eos):
        text, generation_prompt = text.removesuffix(eos), generation_prompt.removesuffix(eos)
    return text, generation_prompt


def _common(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:n]
