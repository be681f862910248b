"""Benchmarks: `ggufspec bench` measures prompts and generation, its subcommands streams, drafters and kernels."""

from __future__ import annotations

import importlib

import click

# name: (module with `command`, what it does)
COMMANDS = {
    "tests": ("ggufspec.tools.bench.tests", "Prompts and generation, with llama-bench's options (the default)."),
    "batched": ("ggufspec.tools.bench.batched", "Streams together, with llama-batched-bench's options."),
    "spec": ("ggufspec.tools.bench.spec", "Drafters against plain decoding."),
    "kernels": ("ggufspec.tools.bench.kernels", "Quantized matmuls against the memory's copy rate."),
    "synth": ("ggufspec.tools.synth", "Write models with random weights in real shapes."),
}


class BenchTable(click.Group):
    """Subcommands by name; anything else is the command line of `tests`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in COMMANDS else ["tests", *args])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command


@click.group(cls=BenchTable, add_help_option=False)
def command() -> None:
    """Measure speed."""
