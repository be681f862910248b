"""The engine's thread, and the bridge between it and asyncio.

The engine is single-threaded: one thread loads it, steps it, and runs every call that touches it (submit,
cancel, save a slot) between two steps. Handlers live on the event loop; they get `Update`s per job. An update
is a snapshot, so nothing the handlers read changes under them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ggufspec.job import Event, Job, Request, TokenOut

from .errors import ApiError, as_api_error

T = TypeVar("T")
log = logging.getLogger("ggufspec.server")

QUIET_SECONDS = 0.02  # without a request, before the engine captures a step that it will need

SHUTTING_DOWN = "the server is shutting down"


def stopped(error: BaseException) -> ApiError:
    return ApiError(f"the engine has stopped: {type(error).__name__}: {error}", 500)


@dataclass
class Update:
    """What one step did for one job, frozen at that moment."""

    kind: str  # "prompt", "text", "done", "error"; "gone" when the client has left
    text: str = ""
    rest: str = ""  # U+FFFD when the job ended inside a character
    tokens: list[TokenOut] = field(default_factory=list)
    n_prompt_done: int = 0
    timings: dict[str, Any] = field(default_factory=dict)
    prompt_ms: float = 0.0
    error: ApiError | None = None


Sink = asyncio.Queue[tuple[int, Update]]


class Stream:
    """One job on the event loop's side: its updates arrive in `sink` as (index, update)."""

    def __init__(self, worker: EngineWorker, request: Request, sink: Sink, index: int, task: Any):
        self.worker = worker
        self.request = request
        self.task = task  # the settings the client asked for, shown by /slots
        self.sink = sink
        self.index = index
        self.job: Job | None = None
        self.done = False  # nothing more will come, or nobody wants it

    def cancel(self) -> None:
        """The client is gone: free the slot at the next step."""
        if not self.done:
            self.done = True
            self.worker.cancel(self)


class EngineWorker:
    """Owns the engine. `load` runs on its thread; `on_ready` and `on_death` run on the event loop."""

    def __init__(
        self,
        load: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[Any], None],
        on_death: Callable[[BaseException], None],
        after_step: Callable[[Any, list[Event]], None] | None = None,
    ):
        self._load = load
        self._loop = loop
        self._on_ready = on_ready
        self._on_death = on_death
        self._after_step = after_step
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}  # by job id; touched by the worker's thread only
        self._latest: dict[int, Stream] = {}  # by slot: the stream that used it last; the worker's thread only
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._refuse: ApiError | None = None
        self.engine: Any = None
        self.dead: BaseException | None = None
        self.last_activity = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    # -- called on the event loop ----------------------------------------------------------------------------

    async def submit(self, request: Request, sink: Sink, index: int = 0, task: Any = None) -> Stream:
        """Queue a request. RequestError when the engine refuses it, ApiError 503 when it is stopping."""
        stream = Stream(self, request, sink, index, task)

        def do(engine: Any) -> None:
            if self._refuse is not None:
                raise self._refuse
            stream.job = engine.submit(request)
            self._streams[stream.job.id] = stream

        await self.call(do)
        return stream

    async def call(self, function: Callable[[Any], T]) -> T:
        """Run `function(engine)` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.dead is not None:
                    raise stopped(self.dead)
                future.set_result(function(self.engine))
            except BaseException as e:
                future.set_exception(e)

        self._calls.put(run)
        if self.dead is not None:  # the thread may have emptied the queue just before
            future.cancel()
            raise stopped(self.dead)
        return await asyncio.wrap_future(future)

    def cancel(self, stream: Stream) -> None:
        def run() -> None:
            if stream.job is not None and self._streams.pop(stream.job.id, None) is not None:
                self.engine.cancel(stream.job)

        self._calls.put(run)

    def refuse_new(self) -> None:
        """Requests from now on get 503; those that run go on."""
        self._refuse = ApiError(SHUTTING_DOWN, 503)

    def cancel_all(self) -> None:
        """End every open request with a 503."""

        def run() -> None:
            for job_id, stream in list(self._streams.items()):
                if stream.job is not None:
                    self.engine.cancel(stream.job)
                self._post([(stream, Update("error", error=ApiError(SHUTTING_DOWN, 503)))])
                del self._streams[job_id]

        self._calls.put(run)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step in progress."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def task_of(self, slot: Any) -> tuple[int, Any] | None:
        """(job id, task) of what runs in a slot or ran there last."""
        stream = self._streams.get(slot.job.id) if slot.job is not None else self._latest.get(slot.id)
        return None if stream is None or stream.job is None else (stream.job.id, stream.task)

    def _run(self) -> None:
        try:
            self.engine = self._load()
            self._loop.call_soon_threadsafe(self._on_ready, self.engine)
            while self._run_calls():
                if not self.engine.idle:
                    events = self.engine.step()
                    self._dispatch(events)
                    if self._after_step is not None:
                        self._after_step(self.engine, events)
        except BaseException as e:  # the device, the model file, a bug: nothing can go on after it
            self._die(e)

    def _run_calls(self) -> bool:
        """Run what is queued; wait for something when the engine has nothing to do. False: stop."""
        wait = self.engine.idle
        while True:
            try:
                call = self._awaited() if wait else self._calls.get_nowait()
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _awaited(self) -> Callable[[], None] | None:
        """What is queued next. Until then the engine captures what it lacks, one step at a time."""
        while True:
            try:
                return self._calls.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                if not self.engine.capture_one():
                    return self._calls.get()

    def _dispatch(self, events: list[Event]) -> None:
        batch = []
        for event in events:
            job = event.job
            stream = self._streams.get(job.id)
            if stream is None:
                continue
            self._latest[job.slot] = stream
            update = Update(event.kind, event.text, event.rest, event.tokens, job.n_prompt_done)
            if event.kind in ("done", "error"):
                del self._streams[job.id]
            if event.kind == "error":
                update.error = as_api_error(event.error or RuntimeError("the engine gave no reason"))
            update.prompt_ms = job.stats.prompt_ms
            if event.kind in ("done", "prompt") or job.request.timings_per_token:
                update.timings = job.stats.timings()
            batch.append((stream, update))
        self.last_activity = time.monotonic()
        if batch:
            self._post(batch)

    def _post(self, batch: list[tuple[Stream, Update]]) -> None:
        def deliver() -> None:
            for stream, update in batch:
                stream.done = stream.done or update.kind in ("done", "error")
                stream.sink.put_nowait((stream.index, update))

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed: nobody is left to read
            pass

    def _die(self, error: BaseException) -> None:
        self.dead = error
        log.debug("the engine's thread ended", exc_info=error)
        self._post([(stream, Update("error", error=stopped(error))) for stream in self._streams.values()])
        self._streams.clear()
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call()
        try:
            self._loop.call_soon_threadsafe(self._on_death, error)
        except RuntimeError:
            pass
