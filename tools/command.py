"""A click command whose options are llama.cpp's table; its callback gets `settings`."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import click

from ggufspec import __version__
from ggufspec.errors import ConfigError
from ggufspec.tools import log, options
from ggufspec.tools.options import Option
from ggufspec.tools.settings import Settings

_GROUPS = {
    "common": "common params",
    "sampling": "sampling params",
    "speculative": "speculative params",
    "chat": "chat params",
}
_STATUS = {"no-op": "accepted, no effect", "unsupported": "not supported", "removed": "removed"}


class OptionCommand(click.Command):
    """`OptionCommand("server", callback)`: parses by `options.parse`, prints help grouped as llama.cpp groups it."""

    def __init__(self, name: str, callback: Callable[[Settings], Any], help: str = ""):
        super().__init__(name, callback=callback, help=help, add_help_option=False)
        self.tool = name

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            ctx.params["settings"] = options.parse(self.tool, args)
        except options.Shown as shown:
            show(self.tool, shown.what, self.help or "")
            ctx.exit(0)
        return []

    def invoke(self, ctx: click.Context) -> Any:
        settings: Settings = ctx.params["settings"]
        try:
            log.setup(settings.common)
        except OSError as error:
            raise ConfigError(f"--log-file {settings.common.log_file}: {error.strerror}") from None
        return super().invoke(ctx)

    def get_help(self, ctx: click.Context) -> str:
        return help_text(self.tool, self.help or "")


def show(tool: str, what: str, summary: str) -> None:
    """Print what an informational option asks for."""
    if what == "help":
        click.echo(help_text(tool, summary))
    elif what == "version":
        import torch

        click.echo(f"version: ggufspec {__version__}", err=True)
        built = f"Python {platform.python_version()} and PyTorch {torch.__version__}"
        click.echo(f"running on {built} for {sys.platform} {platform.machine()}", err=True)
    elif what == "list-devices":
        click.echo(device_lines())
    else:
        click.echo(completion_script(tool))


def help_text(tool: str, summary: str = "") -> str:
    """All options of a tool, grouped; what is not supported stands last, by name only."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [f"usage: ggufspec {tool} [options]", ""]
    if summary:
        lines += [*textwrap.wrap(summary, width), ""]
    groups: dict[str, list[Option]] = {}
    for option in options.for_tool(tool):
        groups.setdefault(option.group if option.status == "supported" else option.status, []).append(option)
    last = [status for status in _STATUS if status in groups]
    for group in [g for g in groups if g not in _STATUS] + last:
        title = _STATUS.get(group) or _GROUPS.get(group, f"{tool}-specific params")
        lines += [f"----- {title} -----", ""]
        for option in groups[group]:
            lines += _entry(option, tool, width)
        lines.append("")
    return "\n".join(lines).rstrip()


def _entry(option: Option, tool: str, width: int) -> list[str]:
    names = ", ".join((*option.names, *option.negative)) + (f" {option.metavar}" if option.metavar else "")
    text = option.help if option.status == "supported" else option.note
    default = shown_default(option, tool)
    if default:
        text += f" (default: {default})"
    if option.env:
        text += f" (env: {option.env})"
    indent = 40
    body = textwrap.wrap(text, max(width - indent, 30)) or [""]
    if len(names) < indent - 1:
        return [f"{names:<{indent}}{body[0]}", *(" " * indent + line for line in body[1:])]
    return [names, *(" " * indent + line for line in body)]


def shown_default(option: Option, tool: str) -> str:
    """The default as --help and the documentation write it; "" where there is nothing to say."""
    if option.status != "supported" or (option.is_flag and option.const is not True):
        return ""
    value = options.default_of(option, tool)
    if option.is_flag:
        return ("on" if value else "off") if option.negative and value is not None else ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "" or value == () or value == {}:
        return ""
    if isinstance(value, tuple):
        sign = ";" if option.key == "sampling.samplers" else ","
        return sign.join(str(item).replace("\n", "\\n") for item in value)
    return str(value)


def device_lines() -> str:
    import torch

    lines = ["Available devices:"]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        lines.append(f"  CUDA{i}: {name} ({total >> 20} MiB, {free >> 20} MiB free)")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  (none)"])


def completion_script(tool: str) -> str:
    """Bash completion of `ggufspec TOOL`: option names, and files after options that take one."""
    names = [name for o in options.for_tool(tool) for name in (*o.names, *o.negative) if o.status == "supported"]
    files = [name for o in options.for_tool(tool) for name in o.names if o.metavar in ("FNAME", "DIR")]
    return textwrap.dedent(f"""\
        _ggufspec_{tool}() {{
            local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
            case "$previous" in
                {"|".join(files)}) COMPREPLY=($(compgen -f -- "$current")); return ;;
            esac
            [ "${{COMP_WORDS[1]}}" = {tool} ] && COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current"))
        }}
        complete -o default -F _ggufspec_{tool} ggufspec""")
