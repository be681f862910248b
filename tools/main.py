"""The command `ggufspec`: a table of subcommands, each loaded when it is named."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Sequence

import click

from ggufspec import __version__
from ggufspec.errors import ConfigError, GgufspecError

# name: what it does; the module ggufspec.tools.<name> has it as `command`
COMMANDS = {
    "cli": "Generate text in the terminal, or chat.",
    "server": "Serve a model over HTTP: OpenAI's, Anthropic's and llama.cpp's interfaces.",
    "quantize": "Quantize a GGUF file, or requantize it.",
    "inspect": "Show a GGUF file's metadata and tensors.",
    "tokenize": "Turn text into token ids.",
    "perplexity": "Score a text: perplexity, and KL divergence between two files.",
    "bench": "Measure speed: prompts, generation, drafters.",
    "compare": "Run the same prompts here and in llama.cpp, side by side.",
    "plan": "Say what fits where before anything is loaded.",
}
READER_GONE = 128 + 13  # what a shell says of a tool that SIGPIPE ended; the work may not be done, so it is not 0


class UnknownCommand(click.UsageError):
    """Exits with 2; everything else that is wrong with a command line with 1, as in llama.cpp's tools."""


class CommandTable(click.Group):
    """Imports a subcommand's module only when that subcommand runs: `ggufspec --help` needs no torch."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:  # click's releases differ here: some call the whole help an error
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"ggufspec.tools.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            module = importlib.import_module(f"ggufspec.tools.{cmd_name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("ggufspec"):
                raise
            raise ConfigError(f"ggufspec {cmd_name} needs the package {error.name}: install it with pip") from None
        command: click.Command = module.command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]):  # type: ignore[no-untyped-def]
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else f"; commands are {', '.join(known)}"
            raise UnknownCommand(f"there is no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ggufspec")
def commands() -> None:
    """Run quantized GGUF models with speculative drafters. `ggufspec COMMAND --help` lists a command's options."""


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: never a traceback for an error that is the input's fault."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # Read when torch is loaded. OpenMP threads that spin for one another are many times slower as soon as another
    # program wants a core: 100 to 1000 ms a token instead of 30.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    status = run(argv)
    if "ggufspec.ranks" in sys.modules:
        sys.modules["ggufspec.ranks"].leave(status)
    sys.exit(status)


def run(argv: Sequence[str] | None = None) -> int:
    """Exit status of one command: 0, 1 for an error (one line on stderr), 2 for a wrong command, 130 for Ctrl-C,
    141 where the reader of standard output has gone (`ggufspec ... | head`)."""
    try:
        # Not commands.main(): that ends by itself, with 1 and no word, where the reader has gone.
        with commands.make_context("ggufspec", list(sys.argv[1:] if argv is None else argv)) as context:
            result = commands.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except GgufspecError as error:
        _print_error(str(error))
        return 1
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "ggufspec"
        _print_error(f"{error.format_message().rstrip('.')} (see {path} --help)")
        return 2 if isinstance(error, UnknownCommand) else 1
    except click.ClickException as error:
        _print_error(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return READER_GONE
    except OSError as error:
        # What commands open themselves they report themselves; the rest is mostly a standard output that is full.
        _drop_stdout()
        where = "standard output" if error.filename is None else error.filename
        _print_error(f"{where}: {error.strerror or error}")
        return 1


def _print_error(message: str) -> None:
    """One line; some messages already begin as llama.cpp's do."""
    print(message if message.startswith("error") else f"error: {message}", file=sys.stderr)


def _drop_stdout() -> None:
    """What is still buffered can't be written: without this Python would try again at exit, and complain."""
    sys.stdout = open("/dev/null", "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
