"""Sockets, TLS, time-outs of connections, signals: uvicorn set up as llama-server behaves."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggufspec.errors import ConfigError
from ggufspec.tools.settings import ServerSettings

from .state import DRAIN_S

BACKLOG = 512
HEADER_TIMEOUT_S = 60.0  # to send the first request's headers
KEEP_ALIVE_S = 5


def open_sockets(config: ServerSettings) -> list[socket.socket]:
    """One listening socket a host; a name that ends in `.sock` is a UNIX socket. ConfigError when one cannot be had."""
    sockets = []
    for host in config.hosts:
        try:
            sockets.append(_unix(host) if host.endswith(".sock") else _tcp(host, config))
        except OSError as e:
            for other in sockets:
                other.close()
            where = host if host.endswith(".sock") else f"{host}:{config.port}"
            raise ConfigError(f"cannot listen on {where}: {e.strerror or e}; choose another --host or --port") from None
    return sockets


def _tcp(host: str, config: ServerSettings) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and not _answers(path):
            os.unlink(path)  # left by a server that has ended
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
            return True
        except OSError:
            return False


def addresses(sockets: list[socket.socket], tls: bool) -> list[str]:
    scheme = "https" if tls else "http"
    out = []
    for sock in sockets:
        name = sock.getsockname()
        if isinstance(name, tuple):
            host = f"[{name[0]}]" if ":" in name[0] else name[0]
            out.append(f"{scheme}://{host}:{name[1]}")
        else:
            out.append(f"unix:{name}")
    return out


class PatientProtocol(H11Protocol):
    """Closes a connection whose first headers do not arrive in time (uvicorn waits for ever)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_overdue)

    def _headers_overdue(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.cancel()
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """First SIGTERM or SIGINT: `on_stop` drains. Second: the process ends at once with status 1."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]):
        super().__init__(config)
        self.on_stop = on_stop
        self._stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(1)
        self._stopping = True
        self.should_exit = True
        self.on_stop()


def make_server(app: Any, config: ServerSettings, on_stop: Callable[[], None]) -> HttpServer:
    """The server for an ASGI app. ConfigError when the TLS files are not usable."""
    tls: dict[str, Any] = {}
    if config.ssl_key_file is not None or config.ssl_cert_file is not None:
        if config.ssl_key_file is None or config.ssl_cert_file is None:
            raise ConfigError("--ssl-key-file and --ssl-cert-file go together: one of them is missing")
        tls = {"ssl_keyfile": config.ssl_key_file, "ssl_certfile": config.ssl_cert_file}
    settings = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(DRAIN_S) + 1,
        backlog=BACKLOG,
        **tls,
    )
    try:
        settings.load()
    except OSError as e:
        raise ConfigError(f"--ssl-key-file {config.ssl_key_file}: {e.strerror or e}; expected a PEM pair") from None
    return HttpServer(settings, on_stop)
