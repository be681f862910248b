"""The chat of `ggufspec cli`: history, commands, thoughts, and the lines a user types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ggufspec.chat import ChatTemplate, load_templates, preserve_variables
from ggufspec.chat_parse import ChatParser, Delta
from ggufspec.errors import ConfigError, GgufspecError
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Request
from ggufspec.thinking import thinking_budget
from ggufspec.tools.runtime import Runtime
from ggufspec.tools.settings import ChatSettings, Settings
from ggufspec.tools.terminal import Interrupt, Screen, drafter_lines, edit_lines, rates

HELP = """available commands:
  /exit, Ctrl-C    leave
  /regen           drop the last answer and ask again
  /clear           forget the conversation
  /read FILE       put a text file before the next message
  /help            this list"""
COMMANDS = ("/exit", "/regen", "/clear", "/read", "/help")


@dataclass
class Chat:
    """A conversation: messages in OpenAI's form, and what it takes to answer them."""

    runtime: Runtime
    request: Request
    template: ChatTemplate
    screen: Screen
    messages: list[dict[str, Any]] = field(default_factory=list)
    attached: str = ""  # text of /read, for the next message

    @property
    def settings(self) -> Settings:
        return self.runtime.settings

    def ask(self, text: str) -> bool:
        """Add a message and stream its answer. False if the user ended it by Ctrl-C."""
        self.messages.append({"role": "user", "content": self.attached + text})
        self.attached = ""
        return self.answer()

    def answer(self) -> bool:
        """Stream the answer to the last message into the history."""
        prompt, generation_prompt = render(self.template, self.messages, self.settings.chat)
        tokenizer = self.runtime.tokenizer
        ids = tokenizer.encode(prompt, add_special=not prompt.startswith(tokenizer.text(tokenizer.bos) or "\0"))
        chat = self.settings.chat
        parser = ChatParser(
            self.template.thinking_tags,
            reasoning_format="none" if chat.skip_parsing else chat.reasoning_format,
            generation_prompt=generation_prompt,
        )
        shown = _Shown(self.screen)
        request = replace(self.request, prompt=ids, grammar=self.constraint(generation_prompt))
        job = None
        with Interrupt() as interrupt:
            events = self.runtime.engine.generate(request)
            for event in events:
                job = event.job
                shown.show(parser.feed(event.text))
                if interrupt.pressed:
                    break
            events.close()
        shown.show(parser.finish())
        shown.end()
        self.messages.append(parser.message.as_openai())
        if job is not None and self.settings.cli.show_timings and self.settings.common.perf:
            self.screen.write(f"\n{rates(job.stats)}\n")
        return not interrupt.pressed

    def constraint(self, generation_prompt: str) -> GrammarSpec | None:
        """The request's grammar, and a limit on thinking where there is one."""
        chat, tags = self.settings.chat, self.template.thinking_tags
        if chat.reasoning_budget < 0 or tags is None:
            return self.request.grammar
        thinking = thinking_budget(
            partial(self.runtime.tokenizer.encode, add_special=False, parse_special=True),
            chat.reasoning_budget,
            tags,
            chat.reasoning_budget_message or "",
            generation_prompt,
        )
        return replace(self.request.grammar or GrammarSpec("none"), thinking=thinking)


class _Shown:
    """Writes deltas; thoughts stand between marks."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self.thinking = False

    def show(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.reasoning_content:
                if not self.thinking:
                    self.screen.thought("[Start thinking]\n")
                    self.thinking = True
                self.screen.thought(delta.reasoning_content)
            if delta.content:
                self.end_thought()
                self.screen.write(delta.content)

    def end_thought(self) -> None:
        if self.thinking:
            self.screen.thought("\n[End thinking]\n\n")
            self.thinking = False

    def end(self) -> None:
        self.end_thought()
        self.screen.write("\n")


def template_of(runtime: Runtime) -> ChatTemplate:
    """The template that the options name, else the model's. ConfigError if neither is there."""
    settings, tokenizer = runtime.settings.chat, runtime.tokenizer
    override, where = settings.template, "--chat-template"
    if settings.template_file is not None:
        where = f"--chat-template-file {settings.template_file}"
        try:
            override = Path(settings.template_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    if override is None and "tokenizer.chat_template" not in runtime.file.metadata:
        raise ConfigError(
            f"{runtime.file.path} has no chat template: give one with --chat-template, or a raw prompt with -p"
        )
    metadata, bos, eos = runtime.file.metadata, tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
    return load_templates(metadata, bos, eos, override, where).default


def render(template: ChatTemplate, messages: list[dict[str, Any]], settings: ChatSettings) -> tuple[str, str]:
    """(prompt, the part of it that opens the answer)."""
    variables: dict[str, Any] = dict(preserve_variables(settings.reasoning_preserve))
    variables["enable_thinking"] = settings.reasoning != "off"
    if settings.reasoning_effort is not None:
        variables["reasoning_effort"] = settings.reasoning_effort
    variables |= settings.template_kwargs
    if template.typed_only:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    prompt = template.render(messages, **variables)
    without = template.render(messages, None, False, **variables)
    return prompt, prompt[len(without) :] if prompt.startswith(without) else ""


def chat(runtime: Runtime, request: Request, screen: Screen) -> int:
    """The loop. Exit status 0; KeyboardInterrupt of a second Ctrl-C goes through."""
    settings = runtime.settings
    template = template_of(runtime)
    if template.thinking_tags is not None:
        # In some vocabularies the marks are control tokens, and without them thoughts can't be told from the answer.
        request = replace(request, parse_special_out=True)
    session = Chat(runtime, request, template, screen)
    if settings.cli.system:
        session.messages.append({"role": "system", "content": settings.cli.system})
    banner(runtime)
    if not settings.cli.simple_io:
        edit_lines()
    try:
        goes_on = True
        if settings.cli.prompt is not None:
            screen.write("\n> ")
            screen.prompt(settings.cli.prompt + "\n\n")
            session.ask(settings.cli.prompt)
            goes_on = not settings.cli.single_turn
        while goes_on:
            line = read_message(screen, settings.cli.multiline_input)
            goes_on = line is not None and turn(session, line)
    finally:
        if settings.cli.transcript:
            write_transcript(settings.cli.transcript, session.messages)
    screen.write("\nExiting...\n")
    if settings.common.perf and runtime.drafter is not None:
        print(*drafter_lines(runtime.drafter), sep="\n", file=sys.stderr)
    return 0


def turn(session: Chat, line: str) -> bool:
    """One line of the user: a command or a message. False to leave."""
    name, _, rest = line.strip().partition(" ")
    found = next((c for c in COMMANDS if name.startswith("/") and len(name) > 1 and c.startswith(name)), None)
    if not line.strip():
        return True
    if found is None:
        answered = _safely(session, lambda: session.ask(line))
        return not (answered and session.settings.cli.single_turn)
    if found == "/exit":
        return False
    if found == "/clear":
        session.messages = [m for m in session.messages if m["role"] == "system"]
        session.screen.write("The conversation is forgotten.\n")
    elif found == "/regen":
        regenerate(session)
    elif found == "/read":
        attach(session, rest.strip())
    else:
        session.screen.write(HELP + "\n")
    return True


def regenerate(session: Chat) -> None:
    if not session.messages or session.messages[-1]["role"] != "assistant":
        session.screen.write("There is no answer to drop.\n")
        return
    session.messages.pop()
    # The random numbers depend on seed and position alone: the same seed would give the same answer.
    seed = (session.request.sampling.seed + 1) % 0xFFFFFFFF
    session.request = replace(session.request, sampling=replace(session.request.sampling, seed=seed))
    _safely(session, session.answer)


def attach(session: Chat, name: str) -> None:
    try:
        content = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        session.screen.write(f"{name}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}\n")
        return
    session.attached += f"--- File: {name} ---\n{content}\n"
    session.screen.write(f"{name} goes before the next message.\n")


def _safely(session: Chat, answer: Callable[[], bool]) -> bool:
    """A request that cannot be served takes back its message; the chat goes on."""
    n = len(session.messages)
    try:
        answer()
        return True
    except GgufspecError as error:
        del session.messages[n:]
        session.screen.write(f"error: {error}\n")
        return False


def banner(runtime: Runtime) -> None:
    name = runtime.config.name or runtime.file.path.name
    drafter = f", drafting: {runtime.drafter.name}" if runtime.drafter is not None else ""
    print(f"model: {name} ({runtime.file.path.name}){drafter}\n\n{HELP}", file=sys.stderr)


def read_message(screen: Screen, multiline: bool) -> str | None:
    """The user's next message; None at the end of the input or after Ctrl-C."""
    lines: list[str] = []
    while True:
        try:
            with screen.user_input():
                line = input("\n> " if not lines else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            return None
        more = line.endswith("\\") != multiline
        lines.append(line.removesuffix("\\"))
        if not more:
            return "\n".join(lines)


def write_transcript(path: str, messages: list[dict[str, Any]]) -> None:
    text = "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
