"""OpenAI's Responses shapes: /v1/responses. Nothing is stored, so `previous_response_id` is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ggufspec.chat_parse import Delta, ParsedMessage, ToolCall

from .answer import Answer, Step
from .anthropic import block_name
from .chat import ChatPrompt, read_chat
from .errors import ApiError, read_object
from .native import run_completion
from .respond import Chunk, JsonResponse
from .state import ServerState, random_id
from .worker import Update

_NOT_PASSED_ON = ("input", "instructions", "max_output_tokens", "tools", "reasoning", "text", "previous_response_id")
_PART_TYPES = {"input_text": "text", "output_text": "text", "text": "text"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat-completion body that says the same as a Responses one."""
    if "previous_response_id" in body:
        raise ApiError("'previous_response_id' is not supported: this server stores no responses")
    if "input" not in body:
        raise ApiError("'input' is required")
    out = {key: value for key, value in body.items() if key not in _NOT_PASSED_ON}
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    value = body["input"]
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
    elif isinstance(value, list):
        for item in value:
            _item(item, messages)
    else:
        raise ApiError("'input' must be a string or array of objects")
    out["messages"] = messages
    if "max_output_tokens" in body:
        out["max_tokens"] = body["max_output_tokens"]
    if isinstance(body.get("tools"), list):
        tools = [_tool(tool) for tool in body["tools"] if isinstance(tool, dict) and tool.get("type") == "function"]
        if tools:
            out["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        out["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        out["reasoning_effort"] = reasoning["effort"]
    form = body["text"].get("format") if isinstance(body.get("text"), dict) else None
    if isinstance(form, dict):
        kind = form.get("type", "text")
        out["response_format"] = {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind}
    return out


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if key in tool}}


def _item(item: Any, messages: list[dict[str, Any]]) -> None:
    """Append one input item; calls and reasoning join the assistant's message they belong to."""
    if not isinstance(item, dict):
        raise ApiError("'input' must be a string or array of objects")
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        function = {"name": item.get("name", ""), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output", ""))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": content})
    elif kind == "reasoning":
        parts = item.get("content")
        texts = [p.get("text") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
        thoughts = "".join(text for text in texts if isinstance(text, str))
        message = {"role": "assistant", "content": "", "reasoning_content": thoughts}
        messages.append(message)
    elif kind in (None, "message") and role in ("user", "system", "developer", "assistant"):
        content = _content(item.get("content"))
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == "assistant" and last.get("content") == "":
            last["content"] = content  # the reasoning item before it is part of the same turn
        else:
            messages.append({"role": role, "content": content})
    else:
        raise ApiError("Cannot determine type of 'item'")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError("'content' must be a string or array of objects")
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PART_TYPES:
            parts.append({"type": "text", "text": part.get("text", "")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url", "")}})
        else:
            raise ApiError("'type' must be one of input_text, output_text, input_image")
    return parts


class ResponsesForm:
    done_mark = False

    def __init__(self, state: ServerState, chat: ChatPrompt):
        self.state = state
        self.chat = chat
        self.stream = chat.task.stream
        self.output = chat.new_parser()
        self.created = int(time.time())
        self.response_id = f"resp_{random_id()}"
        self.reasoning_id = f"rs_{random_id()}"
        self.message_id = f"msg_{random_id()}"
        self._begun = False
        self._open: str | None = None
        self._call = ToolCall("", "")
        self._so_far = ""  # text of the open item
        self._items: list[dict[str, Any]] = []

    # -- stream ----------------------------------------------------------------------------------------------

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        if not self.chat.task.return_progress:
            return
        yield from self._begin()
        done = [answer.n_cached] if answer.start_of_progress() else []
        for n in [*done, update.n_prompt_done]:
            progress = answer.progress(n, update.prompt_ms if n > answer.n_cached else 0)
            yield _event("response.in_progress", response=self._status(), prompt_progress=progress)

    def _status(self) -> dict[str, Any]:
        return {"id": self.response_id, "object": "response", "status": "in_progress"}

    def _begin(self) -> Iterable[Chunk]:
        if not self._begun:
            self._begun = True
            yield _event("response.created", response=self._status())
            yield _event("response.in_progress", response=self._status())

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        yield from self._begin()
        for delta in self.output.feed(step.text):
            yield from self._change(delta)

    def _change(self, delta: Delta) -> Iterable[Chunk]:
        name = block_name(delta)
        if name != self._open:
            yield from self._close()
            self._open, self._so_far = name, ""
            yield from self._start(delta)
        text = delta.arguments or delta.reasoning_content or delta.content
        self._so_far += text
        if not text:
            return
        if delta.index is not None:
            item_id = f"fc_{self._call.id}"
            yield _event("response.function_call_arguments.delta", item_id=item_id, delta=text)
        elif delta.reasoning_content:
            yield _event("response.reasoning_text.delta", item_id=self.reasoning_id, delta=text)
        else:
            yield _event("response.output_text.delta", item_id=self.message_id, delta=text)

    def _start(self, delta: Delta) -> Iterable[Chunk]:
        if delta.index is not None:
            self._call = ToolCall(delta.id or "", delta.name or "")
            yield _event("response.output_item.added", item=call_item(self._call, "in_progress"))
        elif delta.reasoning_content:
            item = reasoning_item(self.reasoning_id, "", "in_progress")
            yield _event("response.output_item.added", item=item)
        else:
            item = {"content": [], "id": self.message_id, "role": "assistant", "status": "in_progress"}
            yield _event("response.output_item.added", item=item | {"type": "message"})
            part = {"type": "output_text", "text": ""}
            yield _event("response.content_part.added", item_id=self.message_id, part=part)

    def _close(self) -> Iterable[Chunk]:
        if self._open is None:
            return
        text = self._so_far
        if self._open == "reasoning":
            item = reasoning_item(self.reasoning_id, text)
            yield _event("response.reasoning_text.done", item_id=self.reasoning_id, text=text)
        elif self._open == "content":
            item = message_item(self.message_id, text)
            yield _event("response.output_text.done", item_id=self.message_id, text=text)
            yield _event("response.content_part.done", item_id=self.message_id, part=item["content"][0])
        else:
            call = ToolCall(self._call.id, self._call.name, text)
            item = call_item(call)
            yield _event("response.function_call_arguments.done", item_id=item["id"], arguments=text)
        yield _event("response.output_item.done", item=item)
        self._items.append(item)
        self._open = None

    def last(self, answer: Answer) -> Iterable[Chunk]:
        yield from self._begin()
        for delta in self.output.finish():
            yield from self._change(delta)
        yield from self._close()
        response = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": "completed",
            "model": self.state.name,
            "output": self._items,
            "usage": usage(answer),
        }
        yield _event("response.completed", response=response, timings=answer.timings)

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        return ()

    def failed(self, error: ApiError) -> Chunk:
        return ("error", {"type": "error", **error.body()})

    # -- whole -----------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer]) -> Any:
        (answer,) = answers
        self.output.feed(answer.text)
        self.output.finish()
        message = self.output.message
        return {
            "completed_at": int(time.time()),
            "created_at": self.created,
            "id": self.response_id,
            "model": self.state.name,
            "object": "response",
            "output": self._output(message),
            "status": "completed",
            "usage": usage(answer),
        }

    def _output(self, message: ParsedMessage) -> list[dict[str, Any]]:
        items = []
        thoughts = self.chat.prefill_thoughts + message.reasoning_content
        if thoughts:
            items.append(reasoning_item(self.reasoning_id, thoughts))
        if message.content:
            items.append(message_item(self.message_id, self.chat.prefill + message.content))
        return items + [call_item(call) for call in message.tool_calls]


def usage(answer: Answer) -> dict[str, Any]:
    n_prompt, n = len(answer.prompt), answer.n_decoded
    return {
        "input_tokens": n_prompt,
        "output_tokens": n,
        "total_tokens": n_prompt + n,
        "input_tokens_details": {"cached_tokens": answer.n_cached},
    }


def reasoning_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": item_id,
        "summary": [],
        "type": "reasoning",
        "content": content,
        "encrypted_content": "",
        "status": status,
    }


def message_item(item_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    return {"content": [part], "id": item_id, "role": "assistant", "status": "completed", "type": "message"}


def call_item(call: ToolCall, status: str = "completed") -> dict[str, Any]:
    return {
        "type": "function_call",
        "status": status,
        "id": f"fc_{call.id}",
        "call_id": f"call_{call.id}",
        "name": call.name,
        "arguments": call.arguments,
    }


def _event(name: str, **data: Any) -> Chunk:
    return (name, {"type": name, **data})


async def responses(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, to_chat(await read_object(http)))
    return await run_completion(http, state, chat.task, [chat.tokens], ResponsesForm(state, chat))


async def input_tokens(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, to_chat(await read_object(http)))
    return JsonResponse({"input_tokens": len(chat.tokens), "object": "response.input_tokens"})
