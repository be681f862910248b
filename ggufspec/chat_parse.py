"""A model's output, as it streams, split into thoughts, content and tool calls.

`ChatParser.feed` takes any cut of the text and returns what became certain; text that may still turn into a tag waits.
However the text is cut, the concatenated deltas are the same.
"""

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat_calls import CallReader, Fallback, make_reader
from .detokenizer import partial_suffix
from .errors import ConfigError

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


@dataclass(frozen=True)
class Delta:
    """One piece of the answer: exactly one of thoughts, content, or a piece of tool call `index`.

    The first piece of a call carries its id and name; `arguments` pieces concatenate to a JSON object.
    """

    content: str = ""
    reasoning_content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """The `delta` object of a streamed chat completion."""
        if self.index is None:
            return (
                {"reasoning_content": self.reasoning_content} if self.reasoning_content else {"content": self.content}
            )
        call: dict[str, Any] = {"index": self.index}
        if self.id is not None:
            call |= {"id": self.id, "type": "function"}
        function = {"name": self.name} if self.name is not None else {}
        return {"tool_calls": [call | {"function": function | {"arguments": self.arguments}}]}


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedMessage:
    """Everything said so far."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def as_openai(self) -> dict[str, Any]:
        """The `message` object of a chat completion; thoughts and calls only when there are any."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
                for call in self.tool_calls
            ]
        return message


def new_call_id() -> str:
    return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=32))


class ChatParser:
    """Splits one answer.

    thinking        the marks around thoughts, None for a template without any
    call_format     a name of `chat_calls.FORMATS`, None when calls are not to be looked for
    tools           the request's tools: a call must name one of them
    generation_prompt  the end of the prompt that belongs to the answer: a mark opened there counts
    """

    def __init__(self, thinking: tuple[str, str] | None = None, call_format: str | None = None,
                 tools: Sequence[Mapping[str, Any]] = (), reasoning_format: str = "auto", generation_prompt: str = "",
                 new_id: Callable[[], str] = new_call_id):  # fmt: skip
        if reasoning_format not in REASONING_FORMATS:
            expected = ", ".join(REASONING_FORMATS)
            raise ConfigError(f"unknown reasoning format '{reasoning_format}', expected one of: {expected}")
        self.message = ParsedMessage()
        self._new_id = new_id
        self._make: Callable[[], CallReader] | None = make_reader(call_format, tools) if call_format and tools else None
        self._triggers = self._make().triggers if self._make else ()
        self._thinking = thinking
        self._buffer = ""
        self._reader: CallReader | None = None
        self._state = self._content_start
        if thinking is None:
            return
        opened = _opened_in(generation_prompt, thinking)
        if reasoning_format == "none":
            # Thoughts stay in the content, with the marks that the prompt has already written.
            at = generation_prompt.rfind(thinking[0])
            self._thinking, self._buffer = None, generation_prompt[at:] if at >= 0 else ""
            self._state = self._content
        elif opened:
            begun = opened.removeprefix(thinking[0]).strip()
            self._state = self._thought if begun else self._thought_start
        elif thinking[1] not in generation_prompt:
            self._state = self._before_thought

    def feed(self, text: str) -> list[Delta]:
        """What `text` makes certain."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        """The rest, once no more text comes: a tag that never completed is plain text, a cut call stays as it is."""
        return self._run(final=True)

    # -- states: each takes what it can from the buffer, and returns False when it has to wait --------------------

    def _run(self, final: bool) -> list[Delta]:
        self._final, self._out = final, list[Delta]()
        while self._state():
            pass
        return _joined(self._out)

    def _before_thought(self) -> bool:
        start = self._thinking[0]  # type: ignore[index]
        text = self._buffer.lstrip()
        if text.startswith(start):
            self._buffer = text[len(start) :]
            self._state = self._thought_start
        elif start.startswith(text) and not self._final:
            return False
        else:
            self._state = self._content_start
        return True

    def _thought_start(self) -> bool:
        self._buffer = self._buffer.lstrip()  # thoughts of blanks alone are none
        if not self._buffer:
            return False
        self._state = self._thought
        return True

    def _thought(self) -> bool:
        end = self._thinking[1]  # type: ignore[index]
        at, mark = _first(self._buffer, (end, *self._closing_triggers()))
        self._say("reasoning_content", self._take(at, (end, *self._closing_triggers())))
        if at < 0:
            return False
        if mark == end:
            self._buffer = self._buffer[len(end) :]
        self._state = self._after_thought
        return True

    def _closing_triggers(self) -> Sequence[str]:
        """Marks of a call that end the thoughts too; a bare brace does not."""
        return [trigger for trigger in self._triggers if trigger.startswith("<")]

    def _after_thought(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._content_start
        return True

    def _content_start(self) -> bool:
        """The very beginning of the content, where some formats have a call without a mark."""
        if self._make is None:
            self._state = self._content
            return True
        reader = self._make()
        if reader.bare is None:
            self._state = self._content
            return True
        match = reader.bare(self._buffer)
        if match is None and not self._final:
            return False
        if match:
            self._reader, self._held = reader, ""
            self._state = self._call
        else:
            self._state = self._content
        return True

    def _content(self) -> bool:
        at, mark = _first(self._buffer, self._triggers)
        self._say("content", self._take(at, self._triggers))
        if at < 0:
            return False
        self._buffer = self._buffer[len(mark) :]
        self._reader, self._held = self._make(), mark  # type: ignore[misc]  # a trigger implies a format
        self._state = self._call
        return True

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        text, self._buffer = self._buffer, ""
        try:
            before = reader.name
            arguments = reader.feed(text)
        except Fallback as error:
            # No call after all: what was read is content, and the search goes on behind the mark.
            self._say("content", self._held)
            self._buffer = error.text
            self._state = self._content
            self._reader = None
            return True
        if before is None and reader.name is not None:
            call = ToolCall(self._new_id(), reader.name)
            self.message.tool_calls.append(call)
            self._out.append(Delta(index=len(self.message.tool_calls) - 1, id=call.id, name=call.name))
        if arguments:
            self.message.tool_calls[-1].arguments += arguments
            self._out.append(Delta(index=len(self.message.tool_calls) - 1, arguments=arguments))
        if reader.done:
            self._buffer = reader.rest
            self._state = self._after_call
            return True
        if self._final and reader.name is None:
            self._say("content", self._held + reader.rest)
            self._reader = None
            self._state = self._content
        return False

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip(self._make().separators)  # type: ignore[misc]
        if not self._buffer:
            return False
        self._state = self._content_start
        return True

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _take(self, at: int, marks: Sequence[str]) -> str:
        """Cut the certain text off the buffer: up to `at`, or all but an end that may become a mark."""
        if at < 0:
            at = len(self._buffer) if self._final else len(self._buffer) - partial_suffix(self._buffer, marks)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        return text

    def _say(self, kind: str, text: str) -> None:
        if text:
            setattr(self.message, kind, getattr(self.message, kind) + text)
            self._out.append(Delta(content=text) if kind == "content" else Delta(reasoning_content=text))


def _opened_in(generation_prompt: str, thinking: tuple[str, str]) -> str:
    """The part of the generation prompt from an opened and not closed mark on; "" if there is none."""
    at = generation_prompt.rfind(thinking[0])
    return generation_prompt[at:] if at >= 0 and thinking[1] not in generation_prompt[at:] else ""


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Where the earliest mark stands, and which; (-1, "") if none does."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else (-1, "")


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one; the first piece of a call takes its first arguments along."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        same = last is not None and delta.id is None and last.index == delta.index
        if last is not None and same and bool(last.reasoning_content) == bool(delta.reasoning_content):
            out[-1] = Delta(last.content + delta.content, last.reasoning_content + delta.reasoning_content,
                            last.index, last.id, last.name, last.arguments + delta.arguments)  # fmt: skip
        else:
            out.append(delta)
    return out
