"""llama.cpp's options as a table, and the rules by which a command line is read against it.

The table (`OPTIONS`) lies in `options_*.py`, one file a group. The parser, `--help` and docs/cli.md all
read it. An option's value goes to one place, `key`, in `settings.Settings`, whose default is the option's
default.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal

from ggufspec.errors import ConfigError
from ggufspec.tools.option_values import unescaped
from ggufspec.tools.settings import Settings

Status = Literal["supported", "no-op", "unsupported", "removed"]
Parser = Callable[[str], Any]
Warn = Callable[[str], None]

ALL = frozenset({"cli", "server", "perplexity", "bench", "plan"})
TEXT = ALL - {"perplexity", "plan"}  # tools that generate


@dataclass(frozen=True)
class Option:
    """One row of the table.

    `names`: spellings, the most readable one last. Without `metavar` it is a flag: its names set `const`
    (True), those of `negative` set False. With `appends`, repeated use adds up. `note` says why an option
    is no-op, unsupported or removed; `refused` says for single values why they are not supported,
    `warned` why they have no effect.
    """

    names: tuple[str, ...]
    group: str
    help: str = ""
    key: str = ""
    metavar: str = ""
    parse: Parser | None = None
    negative: tuple[str, ...] = ()
    const: Any = True
    env: str = ""
    tools: frozenset[str] = ALL
    appends: bool = False
    status: Status = "supported"
    note: str = ""
    refused: tuple[tuple[Any, str], ...] = ()
    warned: tuple[tuple[Any, str], ...] = ()

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def is_flag(self) -> bool:
        return not self.metavar

    @property
    def negative_env(self) -> str:
        return self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) if self.negative and self.env else ""


@cache
def table() -> tuple[Option, ...]:
    """All options, in the order of `--help`."""
    from ggufspec.tools import (
        options_cli,
        options_context,
        options_model,
        options_sampling,
        options_server,
        options_speculative,
    )

    parts = (options_model, options_context, options_sampling, options_speculative, options_server, options_cli)
    return tuple(option for part in parts for option in part.OPTIONS)


def for_tool(tool: str) -> tuple[Option, ...]:
    return tuple(option for option in table() if tool in option.tools)


@cache
def _by_name(tool: str) -> dict[str, tuple[Option, bool]]:
    """name -> (option, False for a negative form)."""
    found: dict[str, tuple[Option, bool]] = {}
    for option in for_tool(tool):
        for name in option.names:
            found[name] = (option, True)
        for name in option.negative:
            found[name] = (option, False)
    return found


def parse(
    tool: str,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    warn: Warn | None = None,
    base: Settings | None = None,
) -> Settings:
    """The settings of a command line: defaults (`base`), then the environment, then `argv`; later wins.

    ConfigError, one line, for the first argument that is wrong or not supported; `Shown` for --help and its
    like.
    """
    warn = warn or (lambda line: print(f"warn: {line}", file=sys.stderr))
    environ = os.environ if environ is None else environ
    base = base or defaults(tool)
    reader = _Reader(tool, warn)
    for option in for_tool(tool):
        reader.environment(option, environ)
    reader.from_environment = {key for key in reader.values}
    reader.arguments(list(argv), environ)
    return with_escapes(build(base, reader.values))


def with_escapes(settings: Settings) -> Settings:
    """Backslash escapes resolved in prompts, reverse prompts and DRY breakers, unless --no-escape."""
    if not settings.cli.escape:
        return settings
    read = unescaped
    cli, chat, sampling = settings.cli, settings.chat, settings.sampling
    return replace(
        settings,
        cli=replace(
            cli,
            prompt=None if cli.prompt is None else read(cli.prompt),
            system=None if cli.system is None else read(cli.system),
        ),
        chat=replace(chat, reverse_prompts=tuple(map(read, chat.reverse_prompts))),
        sampling=replace(sampling, dry_sequence_breakers=tuple(map(read, sampling.dry_sequence_breakers))),
    )


def defaults(tool: str) -> Settings:
    """What a tool starts from where it differs from the rest."""
    settings = Settings()
    if tool in ("server", "plan"):
        return build(settings, {"context.n_parallel": -1}, given=False)
    if tool == "cli":
        return build(settings, {"common.verbosity": 2}, given=False)
    if tool == "perplexity":
        return build(settings, {"context.n_ctx": 512, "cli.escape": False}, given=False)
    return settings


def build(base: Settings, values: Mapping[str, Any], given: bool = True) -> Settings:
    """`base` with `group.name[.name]` keys replaced, and noted as given by the user."""
    settings = _replaced(base, {tuple(key.split(".")): value for key, value in values.items()})
    return replace(settings, given=base.given | frozenset(values)) if given else settings


def _replaced(node: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    changes: dict[str, Any] = {}
    for f in fields(node):
        below = {path[1:]: value for path, value in values.items() if path[0] == f.name}
        if () in below:
            changes[f.name] = below[()]
        elif below:
            changes[f.name] = _replaced(getattr(node, f.name), below)
    return replace(node, **changes) if changes else node


def default_of(option: Option, tool: str) -> Any:
    """The option's default as `Settings` has it; None without a key."""
    node: Any = defaults(tool)
    for name in option.key.split(".") if option.key else ():
        node = getattr(node, name)
    return node if option.key and not is_dataclass(node) else None


class Shown(Exception):
    """The command line asks for information (`what`: help, version, ...) and nothing else."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what


class _Reader:
    """Collects `key -> value`; appended values of the command line replace those of the environment."""

    def __init__(self, tool: str, warn: Warn):
        self.tool = tool
        self.warn = warn
        self.values: dict[str, Any] = {}
        self.from_environment: set[str] = set()
        self.seen: set[Option] = set()

    def environment(self, option: Option, environ: Mapping[str, str]) -> None:
        if option.negative_env and option.negative_env in environ:
            self.take(option, False, option.negative_env)
        elif option.env and option.env in environ:
            text = environ[option.env]
            if not option.is_flag:
                self.take(option, self.value(option, text, option.env), option.env)
            else:
                on = boolean(text, option.env)
                if on or option.negative:
                    self.take(option, option.const if on else False, option.env)

    def arguments(self, argv: list[str], environ: Mapping[str, str]) -> None:
        known = _by_name(self.tool)
        at = 0
        while at < len(argv):
            typed = argv[at]
            name = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
            at += 1
            if name not in known:
                raise ConfigError(unknown_argument(typed, name, self.tool))
            option, positive = known[name]
            if option.env and option.env in environ and option.status == "supported":
                self.warn(
                    f"{option.env} environment variable is set, but will be overwritten by command line argument "
                    f"{typed}"
                )
            if option in self.seen and not option.appends and option.status == "supported":
                self.warn(f"{typed} is given more than once; the last one counts")
            first = option not in self.seen
            self.seen.add(option)
            if first and option.appends and option.key in self.from_environment:
                del self.values[option.key]
            if option.is_flag:
                self.take(option, option.const if positive else False, typed)
                continue
            bare = at == len(argv) or argv[at].startswith("-")
            if option.key == "context.flash_attn" and bare and not _is_number(argv[at : at + 1]):
                self.take(option, "on", typed)  # older builds had it as a flag
                continue
            if at == len(argv):
                raise ConfigError(
                    f'error while handling argument "{typed}": expected value for argument ({option.metavar})'
                )
            self.take(option, self.value(option, argv[at], typed), typed)
            at += 1

    def value(self, option: Option, text: str, name: str) -> Any:
        if option.parse is None or option.status in ("no-op", "unsupported", "removed"):
            return text
        try:
            return option.parse(text)
        except (ValueError, OSError) as error:
            raise ConfigError(f'error while handling argument "{name}": {error}') from None

    def take(self, option: Option, value: Any, name: str) -> None:
        if option.status == "removed":
            raise ConfigError(f'error while handling argument "{name}": the argument has been removed. {option.note}')
        if option.status == "unsupported":
            raise ConfigError(f"{name} is not supported: {option.note}")
        for refused, reason in option.refused:
            if value == refused:
                raise ConfigError(f"{name if option.is_flag else f'{name} {value}'} is not supported: {reason}")
        if option.status == "no-op":
            self.warn(f"{name} has no effect here: {option.note}")
            return
        for idle, reason in option.warned:
            if value == idle:
                self.warn(f"{name if option.is_flag else f'{name} {value}'} has no effect here: {reason}")
        if not option.key:
            if option.const is not True:  # an informational flag
                raise Shown(option.const)
            return
        if option.appends:
            value = (*self.values.get(option.key, ()), *value)
        self.values[option.key] = value


def unknown_argument(typed: str, name: str, tool: str) -> str:
    """The error line of an argument nobody knows, with the nearest name of this tool, or the tool that has
    it.
    """
    if not typed.startswith("-"):
        return f"error: invalid argument: {typed} (options begin with '-'; a value stands after its option)"
    if "=" in name and name.split("=")[0] in _by_name(tool):
        return f"error: invalid argument: {typed} (write the value as the next argument, not after '=')"
    elsewhere = [other for other in sorted(ALL) if other != tool and name in _by_name(other)]
    if elsewhere:
        verb = "does" if len(elsewhere) == 1 else "do"
        return f"error: invalid argument: {typed} ({tool} does not take it; {', '.join(elsewhere)} {verb})"
    near = difflib.get_close_matches(name, _by_name(tool), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"see ggufspec {tool} --help"
    return f"error: invalid argument: {typed} ({hint})"


def boolean(text: str, name: str) -> bool:
    if text in ("on", "enabled", "true", "1"):
        return True
    if text in ("off", "disabled", "false", "0"):
        return False
    raise ConfigError(f'{name}: expected on, enabled, true, 1, off, disabled, false or 0, but got "{text}"')


def _is_number(next_argument: Sequence[str]) -> bool:
    return bool(next_argument) and next_argument[0].lstrip("-").replace(".", "", 1).isdecimal()
