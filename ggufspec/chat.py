"""Chat templates: messages to the prompt text a model was trained on.

A template is Jinja source from a stranger's file: it runs in a sandbox that cannot reach or change Python objects, and
whatever goes wrong in it becomes one clear line.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .chat_templates import BUILT_IN
from .errors import ConfigError, RequestError

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Raised(jinja2.TemplateError):
    """`raise_exception` was called by the template."""


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _plain_numbers(value: Any) -> Any:
    """Whole floats print without a fraction, as llama.cpp prints them."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(item) for item in value]
    return value


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Not Jinja's own filter: that one escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(_plain_numbers(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, tojson=_tojson)
    return environment


_ENVIRONMENT = _environment()


@dataclass(frozen=True)
class Capabilities:
    """What a template can do, found by trying; the names are those of `chat_template_caps` in /props."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_system_role: bool
    supports_parallel_tool_calls: bool
    supports_preserve_reasoning: bool
    supports_reasoning_effort: bool
    supports_string_content: bool
    supports_typed_content: bool
    supports_object_arguments: bool


class ChatTemplate:
    """A compiled template. Raises ConfigError if the source is no valid Jinja, naming `where` it came from."""

    def __init__(self, source: str, bos: str = "", eos: str = "", where: str = "tokenizer.chat_template"):
        self.source, self.bos, self.eos, self.where = source, bos, eos, where
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{where}: line {error.lineno}: {_one_line(error)}; the template is not valid Jinja, "
                              "give another with --chat-template-file") from None  # fmt: skip
        except (RecursionError, OverflowError, MemoryError, ValueError, SyntaxError) as error:
            raise ConfigError(f"{where}: the template cannot be compiled: {_one_line(error)}") from None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, /, **variables: Any) -> str:  # fmt: skip
        """The prompt text. Raises RequestError (status 400) when the template raises or fails on these messages.

        `variables` may have any name; `messages` and the tokens' texts among them replace the usual ones.
        """
        now = datetime.datetime.now()
        context = {
            "messages": messages, "bos_token": self.bos, "eos_token": self.eos,
            "date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y"), **variables,
        }  # fmt: skip
        context.pop("add_generation_prompt", None)
        if tools:
            context["tools"] = tools
        if add_generation_prompt:
            context["add_generation_prompt"] = True
        try:
            return self._template.render(context)
        except _Raised as error:
            raise RequestError(f"Jinja Exception: {_one_line(error)}") from None
        except Exception as error:  # any Python error can come out of a stranger's template
            raise RequestError(
                f"{self.where} fails on these messages: {type(error).__name__}: {_one_line(error)}"
            ) from None

    def _try(
        self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = False, **more: Any
    ) -> str:
        try:
            return self.render(messages, tools, add_generation_prompt, **more)
        except RequestError:
            return ""

    @cached_property
    def typed_only(self) -> bool:
        """True if a plain string as content does not come through, but a list of parts does."""
        return self.capabilities.supports_typed_content and not self.capabilities.supports_string_content

    @cached_property
    def capabilities(self) -> Capabilities:
        user: dict[str, Any] = {"role": "user", "content": "A user asks."}
        strings = "MARKED" in self._try([{"role": "user", "content": "MARKED"}])
        typed = self._try([{"role": "user", "content": [{"type": "text", "text": "MARKED"}]}])
        typed_content = "MARKED" in typed and "'type'" not in typed and '"type"' not in typed
        if typed_content and not strings:
            user = {"role": "user", "content": [{"type": "text", "text": "A user asks."}]}
        system = {**user, "role": "system"}
        system["content"] = "MARKED" if strings else [{"type": "text", "text": "MARKED"}]

        def calls(*arguments: Any) -> str:
            items = [{"id": f"{i}00000000", "type": "function", "function": {"name": f"call_{i}", "arguments": item}}
                     for i, item in enumerate(arguments)]  # fmt: skip
            return self._try([user, {"role": "assistant", "content": "", "tool_calls": items}, user], [_tool("call_0")])

        as_object, as_text = calls({"ARG": "VALUE"}), calls('{"ARG": "VALUE"}')
        objects = "ARG" in as_object and "'ARG'" not in as_object
        both = calls({"ARG": 1}, {"ARG": 2}) if objects else calls('{"ARG": 1}', '{"ARG": 2}')
        preserve = preserve_variables(True)
        kept = self._try(
            [user, {"role": "assistant", "content": "Yes.", "reasoning_content": "MARKED"}, user], **preserve
        )
        efforts = {self._try([user], None, True, reasoning_effort=effort) for effort in ("low", "high")}
        return Capabilities(
            supports_tools="MARKED" in self._try([user], [_tool("MARKED")]),
            supports_tool_calls="call_0" in as_object or "call_0" in as_text,
            supports_system_role="MARKED" in self._try([system, user]),
            supports_parallel_tool_calls="call_0" in both and "call_1" in both,
            supports_preserve_reasoning="MARKED" in kept,
            supports_reasoning_effort=len(efforts) > 1,
            supports_string_content=strings,
            supports_typed_content=typed_content,
            supports_object_arguments=objects,
        )

    @cached_property
    def _around_thoughts(self) -> tuple[str, str] | None:
        """What stands before the thoughts of the last assistant message, and between them and its content."""
        content: Any = "ANSWERED"
        user: Any = "A user asks."
        if self.typed_only:
            content, user = ([{"type": "text", "text": text}] for text in (content, user))
        turns = [{"role": "user", "content": user},
                 {"role": "assistant", "content": content, "reasoning_content": "THOUGHT"}]  # fmt: skip
        before, found, after = self._try(turns, enable_thinking=True, **preserve_variables(True)).partition("THOUGHT")
        return (before, after.partition("ANSWERED")[0]) if found and "ANSWERED" in after else None

    @cached_property
    def thinking_tags(self) -> tuple[str, str] | None:
        """The marks around thoughts, or None if the template has no thoughts.

        A template has them if it writes the `reasoning_content` of the last assistant message; a `<think>` in its
        generation prompt alone does not count (llama.cpp decides in the same way).
        """
        if self._around_thoughts is None:
            return None
        start, end = self._around_thoughts[0].split()[-1:], self._around_thoughts[1].split()[:1]
        if not start or not end or not re.search("think|thought|reason", start[0], re.IGNORECASE):
            return None
        # The start mark is the last word before the thought, without a turn header that stands right before it.
        opening = start[0][start[0].rfind("<") :] if start[0].endswith(">") else start[0]
        return opening, end[0]

    @property
    def after_thoughts(self) -> str:
        """What the template writes between thoughts and the content, the end mark in it; "" without thoughts."""
        return self._around_thoughts[1] if self.thinking_tags and self._around_thoughts else ""


def preserve_variables(keep: bool) -> dict[str, bool]:
    """The names by which templates ask whether old thoughts stay in the history (`--reasoning-preserve`)."""
    dropped = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    return {"preserve_thinking": keep, **{name: not keep for name in dropped}}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"ARG": {"type": "string", "description": "An argument."}},
                  "required": ["ARG"]}  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": "A function.", "parameters": parameters}}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def render(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None,
           add_generation_prompt: bool = True, /, **variables: Any) -> str:  # fmt: skip
    """`template.render`, as a free function."""
    return template.render(messages, tools, add_generation_prompt, **variables)


@dataclass(frozen=True)
class ChatTemplates:
    """A model's template, and the variant it may have for requests with tools."""

    default: ChatTemplate
    tool_use: ChatTemplate | None = None

    def pick(self, with_tools: bool) -> ChatTemplate:
        return self.tool_use if with_tools and self.tool_use is not None else self.default


def load_templates(metadata: Mapping[str, Any], bos: str = "", eos: str = "", override: str | None = None,
                   where: str = "--chat-template") -> ChatTemplates:  # fmt: skip
    """The template to use: `override` (a built-in name or Jinja source), else the file's, else ChatML.

    `bos` and `eos` are the texts of these tokens. Raises ConfigError for a template that does not compile or cannot
    render a plain question.
    """
    tool_use = None
    if override is not None:
        source = BUILT_IN.get(override, override)
        if source == override and "{" not in override:
            raise ConfigError(f"{where}: the supplied chat template is not supported: '{override}'; "
                              f"expected Jinja source or one of: {', '.join(BUILT_IN)}")  # fmt: skip
        default = ChatTemplate(source, bos, eos, where)
    else:
        source, where = _source(metadata, "tokenizer.chat_template")
        default = ChatTemplate(source or BUILT_IN["chatml"], bos, eos, where)
        source, where = _source(metadata, "tokenizer.chat_template.tool_use")
        tool_use = ChatTemplate(source, bos, eos, where) if source else None
    question: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    try:
        default.render(question)
    except RequestError as error:
        question[0]["content"] = [{"type": "text", "text": "Hello"}]
        if not default._try(question):
            raise ConfigError(f"{default.where}: a trial rendering fails: {error}; give another template with "
                              "--chat-template-file") from None  # fmt: skip
    return ChatTemplates(default, tool_use)


def _source(metadata: Mapping[str, Any], key: str) -> tuple[str, str]:
    value = metadata.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {type(value).__name__}, expected a string with Jinja source")
    return value, key
