"""Kernels compiled before they are needed, several at once, instead of one by one where each is first launched.

    with compiled_ahead() as kernels:
        model.forward(...)          # launches compile and do nothing else; all of them are done after the block

Inside, what kernels would have written is zero: whatever indexes with it stays in range. Compiling begins when the
block ends, in threads: the compiler's passes let go of Python's lock and the assembler is a process of its own. Kernels
that an earlier run left in Triton's cache on disk are read from there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from triton.runtime import driver

log = logging.getLogger(__name__)

MOST_THREADS = 16  # Python's part of a compilation, a sixth of it, runs in one thread at a time
QUIET_SECONDS = 0.5  # no bar for kernels that only have to be read


@dataclass
class Ahead:
    """What a block launched, and how many kernels that came to."""

    launched: dict[tuple[Any, ...], str] = field(default_factory=dict)  # names by what launches have in common
    n_kernels: int = 0  # compiled at its end, or read from disk


@contextmanager
def compiled_ahead(show_progress: bool = True) -> Iterator[Ahead]:
    """Inside, launches of this thread only collect kernels; at the end these are compiled, under one progress bar.

    A kernel that cannot be compiled is left to its first launch, which says what is wrong.
    """
    ahead, waiting = Ahead(), Waiting()
    with triton.AsyncCompileMode(waiting, ignore_errors=True):
        try:
            with launches_replaced(ahead), ZeroFilled():
                yield ahead
            ahead.n_kernels = len(waiting.work)
            with tqdm(
                total=ahead.n_kernels,
                desc="compiling kernels",
                unit="kernel",
                leave=False,
                delay=QUIET_SECONDS,
                disable=None if show_progress else True,
            ) as bar:
                waiting.run(min(len(os.sched_getaffinity(0)), MOST_THREADS), bar.update)
        finally:
            waiting.cancel()  # Triton waits for all of them


class Waiting(Executor):
    """Work put off until `run`: at once, it would take Python's lock from the thread that collects."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, partial(work, *args, **kwargs)))
        return future

    def run(self, n_threads: int, on_done: Callable[[], Any]) -> None:
        with ThreadPoolExecutor(n_threads, thread_name_prefix="compile") as pool:
            try:
                done = [pool.submit(fulfil, future, work) for future, work in self.work]
                for _ in as_completed(done):
                    on_done()
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        """Whatever has not begun never does."""
        given, self.work = self.work, []
        for future, _ in given:
            if future.cancel():
                future.set_running_or_notify_cancel()


def fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.cancelled():
        return
    future.set_running_or_notify_cancel()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def launches_replaced(ahead: Ahead) -> Iterator[None]:
    """Launches of this thread ask for the kernel alone, once for all launches alike."""
    run, thread = triton.JITFunction.run, threading.get_ident()

    def collect(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        key = (
            id(self),
            driver.active.get_current_device(),
            *map(kind_of, args),
            *((name, kind_of(value)) for name, value in options.items()),
        )
        if key in ahead.launched:
            return None
        ahead.launched[key] = self.__name__
        return run(self, *args, grid=grid, warmup=True, **options)

    triton.JITFunction.run = collect
    try:
        yield
    finally:
        triton.JITFunction.run = run


def kind_of(value: Any) -> Any:
    """What Triton may compile a kernel of its own for: a tensor's type and alignment, other values themselves."""
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else value


class ZeroFilled(TorchFunctionMode):
    """New memory is zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _LEAVES_MEMORY else out


_LEAVES_MEMORY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty}


def tell_of_compilations() -> None:
    """From now on the log (debug) has a line for every kernel that is compiled rather than read from disk."""
    before = triton.knobs.compilation.listener

    def listen(**found: Any) -> None:
        if not found["cache_hit"]:
            times = found["times"]
            seconds = (times.ir_initialization + times.total_lowering + times.store_results) / 1e6
            log.debug("compiled %s in %.1f s", found["src"].name, seconds)
        if before is not None:
            before(**found)

    if getattr(before, "__qualname__", "") != listen.__qualname__:
        triton.knobs.compilation.listener = listen
