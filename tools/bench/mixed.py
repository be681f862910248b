"""A command with options of its own among llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ggufspec.tools import options
from ggufspec.tools.command import show
from ggufspec.tools.settings import Settings


class MixedCommand(click.Command):
    """Own options are read by click; all others by the table of llama.cpp's options, into `settings`.

    `reads`: the groups of settings that the command uses. An option of another group is taken with a warning, as
    options without effect are elsewhere.
    """

    def __init__(self, *args: Any, reads: Sequence[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reads = reads

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = self.divide(args)
        left = super().parse_args(ctx, own)
        try:
            settings = options.parse("bench", rest)
        except options.Shown as shown:
            show("bench", shown.what, self.help or "")
            ctx.exit(0)
        for name in self.unread(settings):
            click.echo(f"warn: {name} has no effect on {self.name}", err=True)
        ctx.params["settings"] = settings
        return left

    def unread(self, settings: Settings) -> list[str]:
        """Names of the options given that this command does not use, one a place in the settings."""
        keys = {key for key in settings.given if key.split(".")[0] not in self.reads}
        names = {option.key: option.name for option in reversed(options.for_tool("bench"))}
        return [name for key, name in names.items() if key in keys]

    def divide(self, args: list[str]) -> tuple[list[str], list[str]]:
        """(own options with their values, the rest in order)"""
        takes_value = {"--help": False, "-h": False}
        for param in self.params:
            if isinstance(param, click.Option):
                for name in (*param.opts, *param.secondary_opts):
                    takes_value[name] = not param.is_flag
        own: list[str] = []
        rest: list[str] = []
        at = 0
        while at < len(args):
            name, sign, _ = args[at].partition("=")
            name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            if name in takes_value:
                own.append(name + args[at][len(name) :])
                if takes_value[name] and not sign:
                    at += 1
                    own += args[at : at + 1]
            else:
                rest.append(args[at])
            at += 1
        return own, rest
