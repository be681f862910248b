"""Anthropic's shapes: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ggufspec.chat_parse import Delta

from .answer import Answer, Step
from .chat import ChatPrompt, read_chat
from .errors import ApiError, read_object, type_error
from .native import run_completion
from .respond import Chunk, JsonResponse
from .state import ServerState, random_id
from .worker import Update

DEFAULT_MAX_TOKENS = 4096
DEFAULT_BUDGET = 10000
_PASSED_ON = (
    "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "id_slot", "seed",
    "timings_per_token", "return_progress", "min_p", "reasoning_format", "speculative",
)  # fmt: skip


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat-completion body that says the same as an Anthropic one."""
    if "messages" not in body:
        raise ApiError("'messages' is required")
    if not isinstance(body["messages"], list):
        raise ApiError("Expected 'messages' to be an array")
    out = {key: body[key] for key in _PASSED_ON if key in body}
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": _text(system)})
    for message in body["messages"]:
        messages += _message(message)
    out["messages"] = messages
    out["max_tokens"] = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "stop_sequences" in body:
        out["stop"] = body["stop_sequences"]
    if "tools" in body:
        if not isinstance(body["tools"], list):
            raise ApiError("Expected 'tools' to be an array")
        out["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        kind: Any = choice.get("type")
        known = {"any": "required", "tool": "required", "none": "none"}
        out["tool_choice"] = known.get(kind, "auto") if isinstance(kind, str) else "auto"
        if kind == "tool" and isinstance(choice.get("name"), str):
            out["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        if choice.get("disable_parallel_tool_use"):
            out["parallel_tool_calls"] = False
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        out["thinking_budget_tokens"] = thinking.get("budget_tokens", DEFAULT_BUDGET)
    return out


def _text(value: Any) -> str:
    """A string, or the text blocks of a list joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError("Expected 'content' to be a string or an array")
    return "".join(b["text"] for b in value if isinstance(b, dict) and isinstance(b.get("text"), str))


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ApiError("every tool needs a 'name'")
    function = {"name": tool["name"], "parameters": tool.get("input_schema", {"type": "object"})}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _message(message: Any) -> list[dict[str, Any]]:
    """One Anthropic message is one chat message, or several where it carries tool results."""
    if not isinstance(message, dict):
        raise ApiError("Expected every message to be an object")
    role, content = message.get("role"), message.get("content")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content if content is not None else ""}]
    if not isinstance(content, list):
        raise ApiError("Expected 'content' to be a string or an array")
    parts: list[dict[str, Any]] = []
    reasoning = ""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text", "")})
        elif kind == "image":
            parts.append(_image(block))
        elif kind == "thinking":
            reasoning += _string(block, "thinking")
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            function = {"name": _string(block, "name"), "arguments": arguments}
            calls.append({"id": _string(block, "id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content", "")
            text = result if isinstance(result, str) else _text(result)
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": text})
    out: list[dict[str, Any]] = list(results)
    if parts or calls or reasoning:
        single = len(parts) == 1 and parts[0]["type"] == "text"
        one: dict[str, Any] = {"role": role, "content": parts[0]["text"] if single else parts or ""}
        if reasoning:
            one["reasoning_content"] = reasoning
        if calls:
            one["tool_calls"] = calls
        out.append(one)
    return out


def _string(block: dict[str, Any], key: str) -> str:
    """A text member of a block; absent and null count as empty."""
    value = block.get(key)
    if value is not None and not isinstance(value, str):
        raise ApiError(f"Field '{key}': {type_error('string', value)}")
    return value or ""


def _image(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise ApiError("an image block needs a 'source'")
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


class MessagesForm:
    done_mark = False

    def __init__(self, state: ServerState, chat: ChatPrompt):
        self.state = state
        self.chat = chat
        self.stream = chat.task.stream
        self.output = chat.new_parser()
        self.id = f"chatcmpl-{random_id()}"
        self._begun = False
        self._open: str | None = None  # kind of the open block, "tool3" for the fourth call
        self._index = -1

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        return ()

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        yield from self._begin(answer)
        for delta in self.output.feed(step.text):
            yield from self._block(delta)

    def _begin(self, answer: Answer) -> Iterable[Chunk]:
        if self._begun:
            return
        self._begun = True
        message = self._message(answer, [], None, None) | {"usage": self._usage(answer, 0)}
        yield _event("message_start", message=message)

    def _block(self, delta: Delta) -> Iterable[Chunk]:
        name = block_name(delta)
        if name != self._open:
            yield from self._close()
            self._open = name
            self._index += 1
            yield _event("content_block_start", index=self._index, content_block=_empty_block(delta))
        change = _block_delta(delta)
        if change is not None:
            yield _event("content_block_delta", index=self._index, delta=change)

    def _close(self) -> Iterable[Chunk]:
        if self._open is None:
            return
        if self._open == "reasoning":
            signature = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=self._index, delta=signature)
        yield _event("content_block_stop", index=self._index)
        self._open = None

    def last(self, answer: Answer) -> Iterable[Chunk]:
        yield from self._begin(answer)
        for delta in self.output.finish():
            yield from self._block(delta)
        yield from self._close()
        stop = {"stop_reason": self._stop_reason(answer), "stop_sequence": answer.stopping_word or None}
        yield _event("message_delta", delta=stop, usage={"output_tokens": answer.n_decoded})
        yield _event("message_stop")

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        return ()

    def whole(self, answers: Sequence[Answer]) -> Any:
        (answer,) = answers
        self.output.feed(answer.text)
        self.output.finish()
        message = self.output.message
        blocks: list[dict[str, Any]] = []
        thoughts = self.chat.prefill_thoughts + message.reasoning_content
        if thoughts:
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": self.chat.prefill + message.content})
        for call in message.tool_calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
        reason = self._stop_reason(answer)
        out = self._message(answer, blocks, reason, answer.stopping_word or None)
        return out | {"usage": self._usage(answer, answer.n_decoded)}

    def failed(self, error: ApiError) -> Chunk:
        return ("error", {"type": "error", **error.body()})

    def _stop_reason(self, answer: Answer) -> str:
        if answer.finish_reason == "length":
            return "max_tokens"
        return "tool_use" if self.output.message.tool_calls else "end_turn"

    def _message(self, answer: Answer, content: list[Any], reason: str | None, word: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.state.name,
            "stop_reason": reason,
            "stop_sequence": word,
        }

    def _usage(self, answer: Answer, n_output: int) -> dict[str, int]:
        n_input = len(answer.prompt) - answer.n_cached
        return {"cache_read_input_tokens": answer.n_cached, "input_tokens": n_input, "output_tokens": n_output}


def _event(name: str, **data: Any) -> Chunk:
    return (name, {"type": name, **data})


def block_name(delta: Delta) -> str:
    """What a delta belongs to: "reasoning", "content", or "tool3" for the fourth call."""
    if delta.index is not None:
        return f"tool{delta.index}"
    return "reasoning" if delta.reasoning_content else "content"


def _empty_block(delta: Delta) -> dict[str, Any]:
    if delta.index is not None:
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    return {"type": "thinking", "thinking": ""} if delta.reasoning_content else {"type": "text", "text": ""}


def _block_delta(delta: Delta) -> dict[str, Any] | None:
    """None for the first piece of a call when it has no arguments yet."""
    if delta.index is not None:
        return {"type": "input_json_delta", "partial_json": delta.arguments} if delta.arguments else None
    if delta.reasoning_content:
        return {"type": "thinking_delta", "thinking": delta.reasoning_content}
    return {"type": "text_delta", "text": delta.content}


def _input(arguments: str) -> Any:
    """The arguments as an object; a call cut off by the length limit has none that can be read."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


async def messages(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, to_chat(await read_object(http)))
    return await run_completion(http, state, chat.task, [chat.tokens], MessagesForm(state, chat))


async def count_tokens(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, to_chat(await read_object(http)))
    return JsonResponse({"input_tokens": len(chat.tokens)})
