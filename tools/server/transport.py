"""What every HTTP answer shares: headers, CORS, API keys, the loading state, limits on size and time of a body.

Plain ASGI around the router, in llama-server's order: headers, OPTIONS, loading, key, route.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggufspec.tools.settings import ServerSettings

from .errors import ApiError
from .respond import error_response
from .state import MAX_BODY_BYTES

SERVER_NAME = "llama.cpp"  # clients recognize the API by it
PUBLIC = ("/health", "/v1/health")
_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")


def cors_origin(config: ServerSettings, origin: str) -> str | None:
    """The value of Access-Control-Allow-Origin; None leaves the header out."""
    if config.cors_origins == "localhost":
        return origin if _LOCAL_ORIGIN.fullmatch(origin) else None
    if config.cors_origins == "*" and config.cors_credentials:
        return origin  # "*" is not allowed together with credentials
    return config.cors_origins


def key_given(headers: Headers) -> str:
    """The key of a request: `Authorization: Bearer KEY` (or the bare key), else `X-Api-Key`."""
    value = headers.get("authorization", "")
    return value.removeprefix("Bearer ") if value else headers.get("x-api-key", "")


def key_is_good(keys: tuple[str, ...], given: str) -> bool:
    """Compares with every key in constant time."""
    return any([hmac.compare_digest(key.encode(), given.encode()) for key in keys])


class Transport:
    """`is_loading` and `is_page` (paths of the user interface) decide what is open before the model is there."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerSettings,
        is_loading: Callable[[], bool],
        is_page: Callable[[str], bool],
    ):
        self.app = app
        self.config = config
        self.is_loading = is_loading
        self.is_page = is_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = cors_origin(self.config, headers.get("origin", ""))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(raw=message["headers"])
                out["server"] = SERVER_NAME
                if origin is not None:
                    out["access-control-allow-origin"] = origin
                message["headers"] = out.raw
            await send(message)

        answer = self._answer(scope, headers)
        if answer is not None:
            await answer(scope, receive, send_with_headers)
            return
        limited = LimitedBody(receive, MAX_BODY_BYTES, self.config.timeout_s)
        await self.app(scope, limited, send_with_headers)

    def _answer(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer that needs no route, if there is one."""
        path = scope["path"].removeprefix(self.config.api_prefix)
        if scope["method"] == "OPTIONS":
            return Response(
                media_type="text/html",
                headers={
                    "access-control-allow-credentials": str(self.config.cors_credentials).lower(),
                    "access-control-allow-methods": self.config.cors_methods,
                    "access-control-allow-headers": self.config.cors_headers,
                },
            )
        if self.is_loading() and not self.is_page(path):
            return error_response(ApiError("Loading model", 503))
        keys = self.config.api_keys
        if keys and path not in PUBLIC and not self.is_page(path):
            if not key_is_good(keys, key_given(headers)):
                return error_response(ApiError("Invalid API Key", 401))
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return error_response(too_large(MAX_BODY_BYTES))
        return None


def too_large(limit: int) -> ApiError:
    return ApiError(f"request body is larger than the limit of {limit} bytes", 413)


class LimitedBody:
    """`receive` that stops a body that is too long or too slow; once the body is complete it only waits."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float):
        self.receive = receive
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.n_bytes = 0
        self.complete = False

    async def __call__(self) -> Message:
        if self.complete:
            return await self.receive()
        try:
            message = await asyncio.wait_for(self.receive(), self.timeout_s)
        except TimeoutError:
            raise ApiError(f"the request body did not arrive within {self.timeout_s:g} s", 408) from None
        if message["type"] == "http.request":
            self.n_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            if self.n_bytes > self.max_bytes:
                raise too_large(self.max_bytes)
        return message
