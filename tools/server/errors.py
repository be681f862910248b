"""llama-server's error forms: an HTTP status, a type and a message in `{"error": {...}}`.

Clients compare these texts, so the messages of the JSON library it uses are reproduced where they can be.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ggufspec.errors import GgufspecError, RequestError

INVALID = "invalid_request_error"
TYPES = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: INVALID,
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """What a handler raises to answer with an error; `extra` keys stand beside `message` in the body."""

    def __init__(self, message: str, status: int = 400, kind: str | None = None, **extra: Any):
        super().__init__(message)
        self.status = status
        self.kind = kind or TYPES.get(status, "server_error")
        self.extra = extra

    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.status, "message": str(self), "type": self.kind, **self.extra}}


def as_api_error(error: BaseException) -> ApiError:
    """The answer for any exception: the input's fault is a 400, everything else a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        extra = {key: value for key, value in vars(error).items() if key not in ("status", "kind")}
        return ApiError(str(error), error.status, error.kind, **extra)
    if isinstance(error, GgufspecError):
        return ApiError(str(error), 400)
    if isinstance(error, ClientDisconnect):  # nobody reads this answer, but it is no failure of the server
        return ApiError("the connection was closed before the whole body had arrived", 400)
    return ApiError(f"{type(error).__name__}: {error}", 500)


def type_name(value: Any) -> str:
    """The JSON library's word for a value's type."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def type_error(expected: str, value: Any) -> str:
    return f"[json.exception.type_error.302] type must be {expected}, but is {type_name(value)}"


def missing_key(key: str) -> ApiError:
    return ApiError(f"[json.exception.out_of_range.403] key '{key}' not found")


def parse_json(body: bytes) -> Any:
    """The body's JSON value. Strict: no NaN, no infinity, no lone surrogates, UTF-8 only, no runaway nesting or digits.

    A byte order mark in front is skipped, as llama-server does.
    """
    prefix = "[json.exception.parse_error.101] parse error at "
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise ApiError(
            f"{prefix}line 1, column 1: attempting to parse an empty input; "
            "check that your input string or stream contains the expected JSON"
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        line = body.count(b"\n", 0, e.start) + 1
        column = e.start - body.rfind(b"\n", 0, e.start)
        raise ApiError(
            f"{prefix}line {line}, column {column}: syntax error while parsing value - invalid string: "
            "ill-formed UTF-8 byte"
        ) from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as e:
        raise ApiError(
            f"{prefix}line {e.lineno}, column {e.colno}: syntax error while parsing value - {e.msg}"
        ) from None
    except UnicodeEncodeError:
        raise ApiError(f"{prefix}line 1: half of a surrogate pair stands alone") from None
    except RecursionError:
        raise ApiError(f"{prefix}line 1: the value is nested too deeply") from None
    except ValueError as e:
        raise ApiError(f"{prefix}line 1: {e}") from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ApiError(f"[json.exception.out_of_range.406] number overflow parsing '{text[:40]}'")
    return number


LARGE_BODY = 1 << 16  # bytes; reading more would hold up the event loop


async def read_object(http: Request) -> dict[str, Any]:
    """The request's body as an object; a large one is parsed beside the event loop."""
    body = await http.body()
    return await asyncio.to_thread(parse_object, body) if len(body) > LARGE_BODY else parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as an object; null members count as absent."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise ApiError(f"[json.exception.type_error.304] cannot use at() with {type_name(value)}")
    return {key: member for key, member in value.items() if member is not None}
