"""Run conversion tasks in order on worker processes, or on a GPU, with a bounded number in flight."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from ggufspec.quant.convert import Task, convert

POOL_WORTH_ELEMENTS = 1 << 23  # less work than this is done before a pool has started


def converted(tasks: Sequence[Task], n_workers: int, device: str = "cpu") -> Iterator[np.ndarray]:
    """`convert` of every task, in the order of `tasks`. Closing the iterator stops the workers."""
    if device != "cpu":
        from ggufspec.quant.convert_cuda import converted_on

        return converted_on(tasks, device)
    n_elements = sum(t.n_bytes for t in tasks if t.source != t.target)
    if n_workers == 1 or n_elements < POOL_WORTH_ELEMENTS:
        return (convert(task) for task in tasks)
    return _on_processes(tasks, n_workers)


def _on_processes(tasks: Sequence[Task], n_workers: int) -> Iterator[np.ndarray]:
    """Workers are fresh processes: the caller may run threads, which a forked process would lose half way.

    Copies are done here: they would only make the bytes travel. At most `2 n_workers + 2` results wait.
    """
    pool = ProcessPoolExecutor(n_workers, get_context("spawn"), initializer=_ignore_interrupts)
    waiting: deque[Task | Future[np.ndarray]] = deque()
    source = iter(tasks)
    try:
        while True:
            while len(waiting) < 2 * n_workers + 2 and (task := next(source, None)) is not None:
                waiting.append(task if task.source == task.target else pool.submit(convert, task))
            if not waiting:
                return
            first = waiting.popleft()
            yield convert(first) if isinstance(first, Task) else first.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole group; the parent stops the workers in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
