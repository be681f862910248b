"""Run conversion tasks in order on worker processes, or on a GPU, with a bounded number in flight."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np

from ggufspec.quant import layouts
from ggufspec.quant.convert import Task, convert

POOL_WORTH_ELEMENTS = 1 << 22  # less work than this is done before a pool has started
N_GPU_THREADS = 3  # one reads, one computes, one copies back


def converted(tasks: Sequence[Task], n_workers: int, device: str = "cpu") -> Generator[np.ndarray, None, None]:
    """`convert` of every task, in the order of `tasks`. Closing the iterator stops the workers."""
    if device != "cpu":
        from ggufspec.quant.convert_cuda import convert_on, cuda_device

        return _in_order(
            ThreadPoolExecutor(N_GPU_THREADS), partial(convert_on, device=cuda_device(device)), tasks, N_GPU_THREADS + 1
        )
    n_workers = min(n_workers, 1 + sum(_n_elements(task) for task in tasks) // POOL_WORTH_ELEMENTS)
    if n_workers == 1:
        return (convert(task) for task in tasks)
    # Fresh processes: the caller may run threads, which a forked process would lose half way.
    pool = ProcessPoolExecutor(n_workers, get_context("spawn"), initializer=_ignore_interrupts)
    return _in_order(pool, convert, tasks, 2 * n_workers + 2)


def _n_elements(task: Task) -> int:
    """Elements that have to be encoded."""
    layout = layouts.BY_NAME[task.source]
    return 0 if task.source == task.target else task.n_bytes // layout.n_bytes * layout.n_elements


def _in_order(
    pool: Executor, work: Callable[[Task], np.ndarray], tasks: Sequence[Task], n_waiting: int
) -> Generator[np.ndarray, None, None]:
    """At most `n_waiting` tasks are under way or done and not taken. Copies are done by the caller: they would
    only make the bytes travel."""
    waiting: deque[Task | Future[np.ndarray]] = deque()
    source = iter(tasks)
    try:
        while True:
            while len(waiting) < n_waiting and (task := next(source, None)) is not None:
                waiting.append(task if task.source == task.target else pool.submit(work, task))
            if not waiting:
                return
            first = waiting.popleft()
            yield convert(first) if isinstance(first, Task) else first.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole group; the parent stops the workers in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
