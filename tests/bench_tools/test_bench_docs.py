"""The commands that docs/benchmarks.md and docs/comparison.md show have options that exist."""

import re
import shlex
from pathlib import Path

import pytest

from ggufspec.tools import options
from ggufspec.tools.bench import COMMANDS, command
from ggufspec.tools.bench.mixed import MixedCommand
from ggufspec.tools.bench.tests_options import parse
from ggufspec.tools.compare import command as compare

DOCS = Path(__file__).parents[2] / "docs"


def commands(name):
    text = (DOCS / name).read_text().replace("\\\n", " ")
    shown = [line.split("#")[0] for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    shown += [" ".join(code.split()) for code in re.findall(r"`(ggufspec [^`]+)`", text)]
    return [line for line in shown if line.startswith(("ggufspec bench", "ggufspec compare")) and "-" in line]


@pytest.mark.parametrize("line", [*commands("benchmarks.md"), *commands("comparison.md")])
def test_shown_commands_parse(line):
    _, name, *args = shlex.split(line)
    found = compare if name == "compare" else command.get_command(None, args[0] if args[0] in COMMANDS else "tests")
    args = args[1:] if name == "bench" and args[0] in COMMANDS else args
    if isinstance(found, MixedCommand):
        own, rest = found.divide(args)
        found.make_parser(found.make_context("x", [], resilient_parsing=True)).parse_args(list(own))
        options.parse("bench", rest, {})
    elif found.name == "tests":
        parse(args, lambda line: None)
    else:
        found.make_context("x", args)


def test_all_subcommands_are_described():
    text = (DOCS / "benchmarks.md").read_text()
    for name in COMMANDS:
        assert name == "tests" or f"`ggufspec bench {name}`" in text
