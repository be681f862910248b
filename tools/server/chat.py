"""A chat request: checked as llama-server checks it, rendered by the template, its output parsed into parts.

The three chat APIs meet here: each turns its body into a chat-completion body first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .answer import Answer
from .errors import ApiError
from .fields import Task
from .native import set_grammar
from .state import ServerState


@dataclass
class Delta:
    """What became visible: a piece of reasoning, of content, or of a tool call's arguments."""

    kind: str  # "reasoning", "content", "tool"
    text: str = ""
    index: int = 0  # of the tool call
    id: str = ""  # only in a call's first delta
    name: str = ""


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class Output:
    """The text of one answer as parts, parsed anew as it grows; `push` and `finish` give the difference."""

    def __init__(self) -> None:
        self.message = Message()

    def push(self, text: str) -> list[Delta]:
        self.message.content += text
        return [Delta("content", text)] if text else []

    def finish(self, answer: Answer) -> list[Delta]:
        return []


@dataclass
class ChatPrompt:
    task: Task
    text: str
    tokens: list[int]
    prefill: str = ""  # text of a trailing assistant message: the answer begins with it

    def new_output(self) -> Output:
        return Output()


def read_chat(state: ServerState, body: dict[str, Any]) -> ChatPrompt:
    messages = check_messages(body)
    task = state.reader.read(body)
    set_grammar(state, task, body)
    text = state.model.chat.render(messages)
    tokens = state.model.tokenizer.encode(text, add_special=True, parse_special=True)
    return ChatPrompt(task, text, tokens)


def check_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
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
        if role == "assistant" and message.get("content") is None and "tool_calls" not in message:
            raise ApiError("Assistant message must contain either 'content' or 'tool_calls'!")
        if not isinstance(role, str):
            raise ApiError(f"Failed to parse messages: Missing 'role' in message: {message}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise ApiError("Expected 'content' to be a string or an array")
        for part in content:
            _check_part(part)
    return messages


_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


def _check_part(part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA:
        raise ApiError(
            f"{_MEDIA[kind]} input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
        )
    if kind != "text":
        raise ApiError("unsupported content[].type")
    if not isinstance(part.get("text"), str):
        raise ApiError("Failed to parse messages: [json.exception.out_of_range.403] key 'text' not found")
