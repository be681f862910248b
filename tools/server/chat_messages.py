"""Messages of a chat request: their checks, and the shape in which a template gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggufspec.chat import Capabilities

from .errors import ApiError, type_error

_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


def check_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's messages. ApiError in llama-server's words for the first that is wrong."""
    if "messages" not in body:
        raise ApiError("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise ApiError("Expected 'messages' to be an array")
    for message in messages:
        if not isinstance(message, dict):
            raise ApiError("All non-assistant messages must contain 'content'")
        role = message.get("role")
        if role != "assistant" and "content" not in message:
            raise ApiError("All non-assistant messages must contain 'content'")
        if role == "assistant" and "content" not in message and "tool_calls" not in message:
            raise ApiError("Assistant message must contain either 'content' or 'tool_calls'!")
        if not isinstance(role, str):
            shown = json.dumps(message, ensure_ascii=False)
            raise ApiError(f"Failed to parse messages: Missing 'role' in message: {shown}")
        _check_content(message.get("content"))
        _check_calls(message.get("tool_calls"))
        if not isinstance(message.get("reasoning_content") or "", str):
            kind = type_error("string", message["reasoning_content"])
            raise ApiError(f"Failed to parse messages: reasoning_content: {kind}")
    return messages


def _check_content(content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ApiError("Expected 'content' to be a string or an array")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise ApiError(
                f"{_MEDIA[kind]} input is not supported - hint: if this is unexpected, "
                "you may need to provide the mmproj"
            )
        if kind != "text":
            raise ApiError("unsupported content[].type")
        if not isinstance(part.get("text"), str):
            raise ApiError("Failed to parse messages: [json.exception.out_of_range.403] key 'text' not found")


def _check_calls(calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise ApiError("Failed to parse messages: Expected 'tool_calls' to be an array")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError("Failed to parse messages: Missing tool call function name")


@dataclass(frozen=True)
class Prefill:
    """The beginning of the answer, given by the last message. With `is_reasoning` the thoughts go on, and there is
    no content yet.
    """

    content: str
    thoughts: str = ""
    is_reasoning: bool = False


def split_prefill(messages: Sequence[dict[str, Any]], body: dict[str, Any], enabled: bool) -> Prefill | None:
    """The last message, if it is to be continued: the assistant's is by default, any if the request says so.

    Its thoughts are continued if it has no content, or if the request says so.
    """
    go_on = body.get("continue_final_message", False)
    if not isinstance(go_on, bool) and go_on not in ("content", "reasoning_content"):
        raise ApiError('Invalid continue_final_message: expected a boolean, "content" or "reasoning_content"')
    if go_on and body.get("add_generation_prompt", True) is not False:
        raise ApiError("Cannot set both add_generation_prompt and continue_final_message to true.")
    last = messages[-1] if messages else {}
    if not last or not (go_on or (enabled and last["role"] == "assistant")):
        return None
    if last["role"] == "assistant" and len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise ApiError("Cannot have 2 or more assistant messages at the end of the list.")
    if last.get("tool_calls"):
        raise ApiError("Cannot continue an assistant message that has tool calls.")
    content, thoughts = last.get("content") or "", last.get("reasoning_content") or ""
    if not isinstance(content, str):
        content = "\n\n".join(part["text"] for part in content)
    if go_on == "reasoning_content" or (thoughts and not content and go_on != "content"):
        return Prefill("", thoughts, is_reasoning=True)
    return Prefill(content, thoughts)


def clean(messages: Sequence[dict[str, Any]], can: Capabilities, typed_only: bool) -> list[dict[str, Any]]:
    """The messages as this template understands them; the request's own are not changed."""
    out = []
    for message in messages:
        one = dict(message)
        if one["role"] == "developer":
            one["role"] = "system"
        one["content"] = _content(one.get("content"), can, typed_only)
        if one.get("tool_calls"):
            one["tool_calls"] = [_call(call, can) for call in one["tool_calls"]]
        out.append(one)
    return out if can.supports_system_role else _without_system(out)


def _content(content: Any, can: Capabilities, typed_only: bool) -> Any:
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if typed_only else content
    if can.supports_typed_content:
        return [{"type": "text", "text": part["text"]} for part in content]
    return "\n".join(part["text"] for part in content)


def _call(call: dict[str, Any], can: Capabilities) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments", {})
    if can.supports_object_arguments and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError:
            raise ApiError(f"Failed to parse tool call arguments as JSON: {arguments[:200]}") from None
    elif not can.supports_object_arguments and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A leading system text goes in front of the next message; alone it is dropped."""
    if not messages or messages[0]["role"] != "system":
        return messages
    if len(messages) == 1:
        return []
    system, first = messages[0]["content"], dict(messages[1])
    if isinstance(system, str) and isinstance(first["content"], str):
        first["content"] = f"{system}\n{first['content']}"
    else:
        parts = system if isinstance(system, list) else [{"type": "text", "text": system}]
        rest = first["content"] if isinstance(first["content"], list) else [{"type": "text", "text": first["content"]}]
        first["content"] = [*parts, *rest]
    return [first, *messages[2:]]
