"""`ggufspec server`: a drop-in for llama-server on this engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ggufspec.errors import ConfigError, GgufspecError
from ggufspec.tools.command import OptionCommand
from ggufspec.tools.option_values import reason
from ggufspec.tools.settings import ServerSettings, Settings

log = logging.getLogger("ggufspec.server")


def run(settings: Settings) -> int:
    """Serve until a signal; the exit status."""
    if settings.model.path is None:
        raise ConfigError("--model is required: give a GGUF file with -m (router mode is not supported)")
    # Starlette, uvicorn and the engine are imported only now: `--help` needs none of them.
    try:
        from .app import Server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ggufspec"):
            raise
        raise ConfigError(f"the server needs the package {error.name}: pip install 'ggufspec[server]'") from None
    from ggufspec.tools import rank

    from .load import load

    if rank.is_follower():
        rank.follow_torchrun(settings)
    settings = replace(settings, server=replace(settings.server, api_keys=all_keys(settings.server)))
    server = Server(settings, lambda: load(settings), _announce)
    try:
        return server.run()
    except GgufspecError:
        raise
    except Exception as error:
        raise ConfigError(f"the engine has stopped: {type(error).__name__}: {_first_line(error)}") from error


def all_keys(server: ServerSettings) -> tuple[str, ...]:
    """Keys of `--api-key` and of the lines of `--api-key-file`; `#` begins a comment."""
    keys = list(server.api_keys)
    if server.api_key_file is not None:
        try:
            lines = Path(server.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file {server.api_key_file}: cannot be read ({reason(error)}); expected a text file with "
                "one key a line"
            ) from None
        found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {server.api_key_file}: holds no key; expected one a line")
        keys += found
    return tuple(keys)


def _announce(addresses: list[str]) -> None:
    for address in addresses:
        log.info("listening on %s", address)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


command = OptionCommand(
    "server", run, "Serve a model over HTTP, as llama-server does: OpenAI's, Anthropic's and llama.cpp's interfaces."
)
