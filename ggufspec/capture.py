"""CUDA graphs of a step's stages: one graph per (stage, shapes), captured when first needed, replayed afterwards.

A stage is a function of tensors that never waits for the host. Its graph reads fixed input buffers and writes fixed
outputs; `run` copies the arguments in and hands the same outputs back every time. Arguments that already are the
outputs of another graph of the pool are read where they lie.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP_RUNS = 2  # first calls compile kernels and fill caches, which cannot be captured


@dataclass
class Captured:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any


class Graphs:
    """All graphs of one engine, in one memory pool."""

    def __init__(self, device: torch.device, mutable: Callable[[], list[Tensor]],
                 on_capture: Callable[[str], None] | None = None):
        """`mutable`: the tensors that running a stage twice would change twice; warm-up runs restore them."""
        self.device = device
        self.mutable = mutable
        self.on_capture = on_capture
        self.captured: dict[Hashable, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.n_bytes = 0
        self._fixed: set[int] = set()  # addresses of all graphs' outputs

    def run(self, name: Hashable, stage: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Any:
        """stage(*arguments) through its graph for these shapes; the result's tensors are overwritten next time."""
        places = tuple(a.data_ptr() if a.data_ptr() in self._fixed else 0 for a in arguments)
        key = (name, places, tuple((a.shape, a.dtype) for a in arguments))
        entry = self.captured.get(key)
        if entry is None:
            entry = self._capture(str(name), stage, arguments)
            self.captured[key] = entry
            self._fixed.update(t.data_ptr() for t in tensors_of(entry.outputs))
        for buffer, argument in zip(entry.inputs, arguments):
            if buffer.data_ptr() != argument.data_ptr():
                buffer.copy_(argument, non_blocking=True)
        entry.graph.replay()
        return entry.outputs

    def _capture(self, name: str, stage: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Captured:
        if self.on_capture is not None:
            self.on_capture(name)
        inputs = tuple(
            a if a.data_ptr() in self._fixed else torch.empty_like(a, device=self.device).copy_(a) for a in arguments
        )
        kept = [(t, t.clone()) for t in self.mutable()]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                stage(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor, copy in kept:
            tensor.copy_(copy)
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = stage(*inputs)
        self.n_bytes += torch.cuda.memory_reserved(self.device) - before
        return Captured(graph, inputs, outputs)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside: destroying another engine's graph would invalidate the one being captured."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors inside tuples, lists, and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for item in value for t in tensors_of(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in tensors_of(getattr(value, name))]
    return []
