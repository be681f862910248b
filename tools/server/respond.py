"""From jobs to an HTTP answer: runs the jobs of a request, writes what an API's Form makes of their updates.

A Form knows one API's shapes and nothing of HTTP; this module knows nothing of shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ggufspec.job import Request

from .answer import Answer, Step
from .errors import ApiError, as_api_error
from .worker import EngineWorker, Sink, Stream, Update

Chunk = dict[str, Any] | tuple[str, dict[str, Any]]  # data, or (event name, data)


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


class JsonResponse(Response):
    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return dump(content)


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), status_code=error.status)


class Form(Protocol):
    """One API's shapes. Called in this order: `prompt`*, `delta`*, `last` once per answer, `end` once."""

    stream: bool
    done_mark: bool  # close the stream with `data: [DONE]`

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]: ...
    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]: ...
    def last(self, answer: Answer) -> Iterable[Chunk]: ...
    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]: ...
    def whole(self, answers: Sequence[Answer]) -> Any: ...
    def failed(self, error: ApiError) -> Chunk: ...


class Run:
    """The jobs of one HTTP request, their updates merged in one queue."""

    def __init__(self, worker: EngineWorker, answers: Sequence[Answer]):
        self.worker = worker
        self.answers = answers
        self.updates: Sink = asyncio.Queue()
        self.streams: list[Stream] = []

    async def start(self, requests: Sequence[Request | None]) -> None:
        """Submit all jobs, or none: a refusal of one cancels the others. None stands for an empty prompt."""
        try:
            for answer, request in zip(self.answers, requests):
                if request is None:
                    answer.empty()
                    self.updates.put_nowait((answer.index, Update("empty")))
                    continue
                stream = await self.worker.submit(request, self.updates, answer.index, answer.task)
                answer.job = stream.job
                self.streams.append(stream)
        except BaseException:
            self.cancel()
            raise

    async def next(self, timeout_s: float | None = None) -> tuple[int, Update] | None:
        """The next update of any job; None when none came in time."""
        if timeout_s is None or timeout_s <= 0:
            return await self.updates.get()
        try:
            return await asyncio.wait_for(self.updates.get(), timeout_s)
        except TimeoutError:
            return None

    def finish(self, index: int) -> None:
        for stream in self.streams:
            if stream.index == index:
                stream.cancel()

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()


class Gone(Exception):
    """The client closed its connection."""


async def respond(
    http: HttpRequest,
    worker: EngineWorker,
    answers: Sequence[Answer],
    requests: Sequence[Request | None],
    form: Form,
    write_timeout_s: float,
) -> Response:
    run = Run(worker, answers)
    watcher = asyncio.create_task(_watch(http, run))
    try:
        await run.start(requests)
        if form.stream:
            ping_s = answers[0].task.sse_ping_interval
            first = await run.next(ping_s if ping_s > 0 else None)
            if first is not None:
                _raise_if_failed(first[1])
            return EventStream(_chunks(run, form, first, ping_s), form, run, watcher, write_timeout_s)
        await _collect(run)
        watcher.cancel()
        return JsonResponse(form.whole(answers))
    except Gone:
        run.cancel()
        return Response(status_code=499)  # nobody reads it
    except BaseException:
        run.cancel()
        watcher.cancel()
        raise


async def _watch(http: HttpRequest, run: Run) -> None:
    """The body is read: the next thing the connection can say is that it was closed."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    run.cancel()
    run.updates.put_nowait((-1, Update("gone")))


def _raise_if_failed(update: Update) -> None:
    if update.kind == "gone":
        raise Gone
    if update.kind == "error":
        raise update.error or ApiError("the request failed", 500)


async def _collect(run: Run) -> None:
    n_open = len(run.answers)
    while n_open:
        got = await run.next()
        assert got is not None
        index, update = got
        _raise_if_failed(update)
        answer = run.answers[index]
        if update.kind != "empty":
            if answer.done:
                continue
            answer.take(update)
        if answer.done:
            run.finish(index)
            n_open -= 1


async def _chunks(
    run: Run, form: Form, first: tuple[int, Update] | None, ping_s: float
) -> AsyncIterator[Chunk | None]:
    """Chunks of the whole stream; None asks for a ping."""
    n_open = len(run.answers)
    got = first
    while n_open:
        if got is None:
            got = await run.next(ping_s)
        if got is None:
            yield None
            continue
        (index, update), got = got, None
        _raise_if_failed(update)
        answer = run.answers[index]
        if update.kind == "prompt":
            answer.take(update)
            for chunk in form.prompt(answer, update):
                yield chunk
            continue
        if update.kind != "empty":
            if answer.done:
                continue
            step = answer.take(update)
            if answer.end_of_prompt():
                done = Update("prompt", n_prompt_done=len(answer.prompt), prompt_ms=update.prompt_ms)
                for chunk in form.prompt(answer, done):
                    yield chunk
            if step.text or step.tokens:
                for chunk in form.delta(answer, step):
                    yield chunk
        if answer.done:
            run.finish(index)
            n_open -= 1
            for chunk in form.last(answer):
                yield chunk
    for chunk in form.end(run.answers):
        yield chunk


class EventStream(Response):
    """Server-sent events. A write that does not finish in time, or a closed connection, cancels the jobs."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Chunk | None],
        form: Form,
        run: Run,
        watcher: asyncio.Task[None],
        write_timeout_s: float,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self.chunks = chunks
        self.form = form
        self.run = run
        self.watcher = watcher
        self.write_timeout_s = write_timeout_s
        self.raw_headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": data, "more_body": more}
            await asyncio.wait_for(send(message), self.write_timeout_s)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.chunks:
                    await write(b":\n\n" if chunk is None else encode(chunk))
                await write(b"data: [DONE]\n\n" if self.form.done_mark else b"", more=False)
            except (Gone, TimeoutError, OSError):
                raise
            except Exception as e:
                await write(encode(self.form.failed(as_api_error(e))), more=False)
        except (Gone, TimeoutError, OSError):
            pass  # nobody reads any more; uvicorn closes what is left of the connection
        finally:
            self.run.cancel()
            self.watcher.cancel()
            with contextlib.suppress(Exception):
                await self.chunks.aclose()  # type: ignore[attr-defined]


def encode(chunk: Chunk) -> bytes:
    if isinstance(chunk, tuple):
        name, data = chunk
        return b"event: " + name.encode() + b"\ndata: " + dump(data) + b"\n\n"
    return b"data: " + dump(chunk) + b"\n\n"
