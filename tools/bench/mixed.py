"""A command with options of its own among llama.cpp's."""

from __future__ import annotations

import click

from ggufspec.tools import options
from ggufspec.tools.command import show


class MixedCommand(click.Command):
    """Own options are read by click; all others by the table of llama.cpp's options, into `settings`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = self.divide(args)
        left = super().parse_args(ctx, own)
        try:
            ctx.params["settings"] = options.parse("bench", rest)
        except options.Shown as shown:
            show("bench", shown.what, self.help or "")
            ctx.exit(0)
        return left

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
                own.append(name + args[at][len(name):])
                if takes_value[name] and not sign:
                    at += 1
                    own += args[at : at + 1]
            else:
                rest.append(args[at])
            at += 1
        return own, rest
