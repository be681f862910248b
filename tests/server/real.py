"""The real engine behind the real server, on the bundled model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
from serving import serve, wait_ready

from ggufspec.bundled import target_path
from ggufspec.tools import options
from ggufspec.tools.server.load import load


@contextlib.contextmanager
def serve_model(*argv: str, model: str | Path | None = None):
    """`ggufspec server` with these options; yields an HTTP client."""
    arguments = ["-m", str(model or target_path()), "--port", "0", *argv]
    settings = options.parse("server", arguments, environ={}, warn=lambda line: None)
    with serve(lambda: load(settings), settings=settings) as (address, server):
        with httpx.Client(base_url=address, timeout=120) as client:
            wait_ready(client)
            client.server = server
            yield client
