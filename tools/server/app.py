"""The application: the table of routes, and the life of a server from its first socket to its last request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ggufspec.errors import GgufspecError
from ggufspec.tools.settings import Settings

from . import anthropic, embeddings, infill, model_info, native, openai, responses, slots
from .errors import ApiError, as_api_error
from .listen import addresses, make_server, open_sockets
from .metrics import Metrics
from .request_log import RequestLog
from .respond import JsonResponse, error_response
from .state import DRAIN_S, Loaded, ServerState
from .transport import Transport
from .worker import EngineWorker

log = logging.getLogger("ggufspec.server")

Handler = Callable[[HttpRequest, ServerState], Awaitable[Response]]
PAGE = Path(__file__).parent / "page" / "index.html"
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def rerank(http: HttpRequest, state: ServerState) -> Response:
    raise ApiError("This server does not support reranking. Start it with `--reranking`", 501)


async def transcriptions(http: HttpRequest, state: ServerState) -> Response:
    raise ApiError("The current model does not support audio input.", 501)


async def systemone(http: HttpRequest, state: ServerState) -> Response:
    raise ApiError("This model is not a decision model", 501)


async def disabled(http: HttpRequest, state: ServerState) -> Response:
    body = {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
    return JsonResponse(body, status_code=403)


# method, paths, handler
ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("GET", ("/health", "/v1/health"), model_info.health),
    ("GET", ("/props",), model_info.props),
    ("POST", ("/props",), model_info.set_props),
    ("GET", ("/models", "/v1/models"), model_info.models),
    ("POST", ("/completion", "/completions"), native.completion),
    ("POST", ("/v1/completions",), openai.completions),
    ("POST", ("/v1/chat/completions", "/chat/completions"), openai.chat_completions),
    (
        "POST",
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        openai.chat_input_tokens,
    ),
    ("POST", ("/v1/chat/completions/control",), openai.control),
    ("POST", ("/v1/responses", "/responses"), responses.responses),
    ("POST", ("/v1/responses/input_tokens", "/responses/input_tokens"), responses.input_tokens),
    ("POST", ("/v1/messages",), anthropic.messages),
    ("POST", ("/v1/messages/count_tokens",), anthropic.count_tokens),
    ("POST", ("/infill",), infill.infill),
    ("POST", ("/embedding", "/embeddings"), embeddings.embeddings),
    ("POST", ("/v1/embeddings",), embeddings.embeddings_openai),
    ("POST", ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), rerank),
    ("POST", ("/v1/audio/transcriptions",), transcriptions),
    ("POST", ("/v1/systemone",), systemone),
    ("POST", ("/tokenize",), native.tokenize),
    ("POST", ("/detokenize",), native.detokenize),
    ("POST", ("/apply-template",), openai.apply_template),
    ("GET", ("/slots",), slots.list_slots),
    ("POST", ("/slots/{id_slot}",), slots.act),
    ("GET", ("/lora-adapters",), model_info.lora_adapters),
    ("POST", ("/lora-adapters",), model_info.lora_adapters),
    ("GET", ("/tools",), disabled),
    ("POST", ("/tools",), disabled),
    ("GET", ("/cors-proxy",), disabled),
    ("POST", ("/cors-proxy",), disabled),
)


def build_app(state: ServerState, metrics: Metrics) -> ASGIApp:
    config = state.config

    def endpoint(handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def run(http: HttpRequest) -> Response:
            try:
                return await handler(http, state)
            except asyncio.CancelledError:
                raise
            except Exception as e:
                answer = as_api_error(e)
                if answer.status >= 500 and not isinstance(e, ApiError | GgufspecError):
                    log.exception("%s %s failed", http.method, http.url.path)
                return error_response(answer)

        return run

    async def scrape(http: HttpRequest) -> Response:
        if not config.metrics:
            return error_response(
                ApiError("This server does not support metrics endpoint. Start it with `--metrics`", 501)
            )
        headers = {"process-start-time-unix": str(metrics.start_time), "content-type": "text/plain; version=0.0.4"}
        return Response(metrics.text(), headers=headers)

    async def speculation(http: HttpRequest) -> Response:
        return JsonResponse(metrics.speculation())

    async def page(http: HttpRequest) -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"}
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=headers)

    async def not_found(http: HttpRequest, error: Exception) -> Response:
        return error_response(ApiError("File Not Found", 404))

    routes: list[BaseRoute] = [
        Route(path, endpoint(handler), methods=[method]) for method, paths, handler in ROUTES for path in paths
    ]
    routes += [Route("/metrics", scrape, methods=["GET"]), Route("/speculation", speculation, methods=["GET"])]
    if config.static_path is not None:
        routes.append(Mount("/", StaticFiles(directory=config.static_path, html=True)))
    elif config.ui:
        routes += [Route(path, page, methods=["GET"]) for path in ("/", "/index.html")]
    if config.api_prefix:
        routes = [Mount(config.api_prefix, routes=routes)]
    router = Starlette(routes=routes, exception_handlers={HTTPException: not_found})
    router.router.redirect_slashes = False

    def is_page(path: str) -> bool:
        if config.static_path is not None:
            known = {p for _, paths, _ in ROUTES for p in paths} | {"/metrics", "/speculation"}
            return path not in known and not path.startswith("/slots/")
        return config.ui and path in ("/", "/index.html")

    return Transport(router, config, lambda: state.loaded is None, is_page)


class Server:
    """One process's server. `load` runs on the engine's thread while the sockets already answer 503."""

    def __init__(
        self, settings: Settings, load: Callable[[], Loaded], on_listen: Callable[[list[str]], None] = print
    ):
        self.config = settings.server
        self.load = load
        self.on_listen = on_listen
        self.state = ServerState(settings)
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self.http: Any = None

    def run(self) -> int:
        """Serve until a signal or a failure. The exit status: 0 after a clean stop, 1 otherwise."""
        sockets = open_sockets(self.config)
        app = build_app(self.state, self.metrics)
        self.http = make_server(app, self.config, self._on_stop)
        self.on_listen(addresses(sockets, self.config.ssl_key_file is not None))
        asyncio.run(self._serve(sockets))
        if self.failure is not None:
            raise self.failure
        return 0

    async def _serve(self, sockets: list[Any]) -> None:
        self.loop = asyncio.get_running_loop()
        loaded: list[Loaded] = []
        requests = RequestLog()

        def load() -> Any:
            loaded.append(self.load())
            return loaded[0].engine

        def after_step(engine: Any, events: list[Any]) -> None:
            self.metrics.after_step(engine, events)
            requests.after_step(engine, events)

        self.state.worker = EngineWorker(
            load, self.loop, lambda engine: self.state.ready(loaded[0]), self._on_death, after_step
        )
        self.state.worker.start()
        try:
            await self.http.serve(sockets=sockets)
        finally:
            await asyncio.to_thread(self.state.worker.stop)

    def _on_stop(self) -> None:
        """The first signal: no new requests; what runs may finish for a while, then ends with a 503."""
        worker = self.state.worker
        if worker is None:
            return
        worker.refuse_new()
        self.loop.call_soon_threadsafe(self.loop.call_later, DRAIN_S, worker.cancel_all)

    def _on_death(self, error: BaseException) -> None:
        """The engine is gone: its streams have been told; let their answers leave, then end."""
        self.failure = error
        self.http.should_exit = True
