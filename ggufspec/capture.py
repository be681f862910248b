"""CUDA graphs of a step's stages: one graph per (stage, shapes), captured when first needed, replayed afterwards.

A stage is a function of tensors that never waits for the host. Its graph reads fixed input buffers and writes fixed
outputs; `run` copies the arguments in and hands the same outputs back every time. Arguments that already are the
outputs of another graph of the pool are read where they lie. A stage whose next run may be queued before this one's
events are read is captured twice, and the two graphs take turns.

Steps of any number of streams go through the graphs of a few sizes: `n_entries` says how many entries a step has.
A graph can also be captured ahead of its first run (`capture`), with arguments for which the stage changes nothing.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .kernels.matmul.cuda import NARROW_TOKENS

log = logging.getLogger(__name__)

WARM_UP_RUNS = 2  # first calls compile kernels and fill caches, which cannot be captured
SPARE_BYTES = 1 << 30  # free memory of a device that graphs which can be done without leave alone


def n_entries(n_streams: int, n_rows: int, n_slots: int) -> int:
    """Entries of a captured step of n_streams streams with n_rows rows each, padding included.

    The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..: at most n_slots, as padding names other slots. Rows that the narrow
    products can take do not become more than they can take.
    """
    power = 1 << (n_streams - 1).bit_length()
    size = min(power if 3 * power < 4 * n_streams else 3 * power // 4, n_slots)
    return min(size, NARROW_TOKENS // n_rows) if n_streams * n_rows <= NARROW_TOKENS else size


def entry_counts(n_rows: int, n_slots: int) -> list[int]:
    """All sizes that captured steps of n_rows rows a stream have."""
    return sorted({n_entries(n, n_rows, n_slots) for n in range(1, n_slots + 1)})


class Lane:
    """What all graphs of a device have in common."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffers: dict[Hashable, Tensor] = {}  # of what comes from other devices and goes there, see relay

    @cached_property
    def pool(self) -> Any:
        """Their memory."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> Any:
        """One for all captures: the library keeps memory of its own for every stream that it has worked on."""
        return torch.cuda.Stream(self.device)


@dataclass
class Captured:
    inputs: tuple[Tensor, ...]
    graphs: list[tuple[Any, Any]]  # torch.cuda.CUDAGraph (or relay.Tape) and its outputs; they take turns
    turn: int = 0
    versions: list[Hashable] = field(default_factory=list)  # of what the inputs hold


class Graphs:
    """All graphs of one engine that begin and end on one device; their memory is one pool a device."""

    def __init__(self, device: torch.device, mutable: Callable[[], list[Tensor]]):
        """`mutable`: the tensors that running a stage twice would change twice; warm-up runs restore them."""
        self.device = device
        self.mutable = mutable
        self.captured: dict[Hashable, Captured] = {}
        self.lanes = [Lane(device)]
        self._fixed: set[int] = set()  # addresses of all graphs' outputs
        self._names: set[Hashable] = set()

    @property
    def is_capturing(self) -> bool:
        """Whether the stage that asks is being captured, not run."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def has(self, name: Hashable) -> bool:
        """Whether a stage of this name was captured, for any shapes."""
        return name in self._names

    def run(self, name: Hashable, stage: Callable[..., Any], arguments: tuple[Tensor, ...], *,
            versions: Sequence[Hashable] = (), in_turns: bool = False, n_warm_up: int = WARM_UP_RUNS) -> Any:
        """stage(*arguments) through its graph for these shapes; the result's tensors are overwritten next time.

        versions[i]: an argument whose version is that of the graph's last run is not copied again; None or missing: it
        always is. in_turns: capture two graphs, each run with every other call. n_warm_up: runs before a capture, which
        change nothing. Arguments on the host have to be page-locked and stay as they are until the device has run.
        """
        entry = self._entry(name, stage, arguments, 2 if in_turns else 1, n_warm_up)
        known = [*versions, *[None] * (len(arguments) - len(versions))]
        for i, (buffer, argument) in enumerate(zip(entry.inputs, arguments)):
            is_there = known[i] is not None and known[i] == entry.versions[i]
            if not is_there and buffer.data_ptr() != argument.data_ptr():
                buffer.copy_(argument, non_blocking=True)
        entry.versions = known
        graph, outputs = entry.graphs[entry.turn]
        entry.turn = (entry.turn + 1) % len(entry.graphs)
        graph.replay()
        return outputs

    def capture(self, name: Hashable, stage: Callable[..., Any], arguments: tuple[Tensor, ...], *,
                in_turns: bool = False) -> None:
        """Capture what `run` will find. With these arguments the stage must change nothing but its results; its kernels
        have been launched before, for other shapes at least."""
        self._entry(name, stage, arguments, 2 if in_turns else 1, 1, is_harmless=True)

    def names(self) -> Iterator[Hashable]:
        return iter(self._names)

    def has_room(self) -> bool:
        """Whether every device has memory for a graph that can be done without."""
        return self.device.type != "cuda" or all(
            torch.cuda.mem_get_info(lane.device)[0] >= SPARE_BYTES for lane in self.lanes
        )

    def _entry(self, name: Hashable, stage: Callable[..., Any], arguments: tuple[Tensor, ...], n_graphs: int,
               n_warm_up: int, is_harmless: bool = False) -> Captured:
        places = tuple(a.data_ptr() if a.data_ptr() in self._fixed else 0 for a in arguments)
        key = (name, places, tuple((a.shape, a.dtype) for a in arguments))
        entry = self.captured.get(key)
        if entry is None:
            began = time.perf_counter()
            entry = self._capture(stage, arguments, n_graphs, n_warm_up, is_harmless)
            self.captured[key] = entry
            self._names.add(name)
            self._fixed.update(t.data_ptr() for _, outputs in entry.graphs for t in tensors_of(outputs))
            log.debug("captured %s in %.0f ms", name, 1000 * (time.perf_counter() - began))
        return entry

    def _capture(self, stage: Callable[..., Any], arguments: tuple[Tensor, ...], n_graphs: int, n_warm_up: int,
                 is_harmless: bool) -> Captured:
        inputs = tuple(
            a if a.data_ptr() in self._fixed else torch.empty_like(a, device=self.device).copy_(a) for a in arguments
        )
        kept = [] if is_harmless else [(t, t.clone()) for t in self.mutable()]
        with self._aside():
            for _ in range(n_warm_up):
                stage(*inputs)
                # After every run: one that follows another as if it were the next step would write over the half of a
                # recurrent layer's window that the step to come still reads.
                for tensor, copy in kept:
                    tensor.copy_(copy)
        for lane in self.lanes:
            torch.cuda.synchronize(lane.device)
        torch.cuda.empty_cache()  # of what the runs needed: the pool cannot take it, and nothing else will need it
        with without_collection():
            graphs = [self._recorded(stage, inputs) for _ in range(n_graphs)]
        return Captured(inputs, graphs, versions=[None] * len(inputs))

    def _recorded(self, stage: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """(the stage's graph, its outputs)"""
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, self.lanes[0].pool, self.lanes[0].stream):
            outputs = stage(*inputs)
        return graph, outputs

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, work goes to the streams of captures, between what was given to the current ones before and after."""
        currents = [torch.cuda.current_stream(lane.device) for lane in self.lanes]
        for lane, current in zip(self.lanes, currents):
            lane.stream.wait_stream(current)
        with ExitStack() as stack:
            for lane in self.lanes[::-1]:  # the first one's device is current inside
                stack.enter_context(torch.cuda.stream(lane.stream))
            yield
        for lane, current in zip(self.lanes, currents):
            current.wait_stream(lane.stream)


@contextmanager
def recorded(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """What is launched inside becomes the graph's.

    `torch.cuda.graph` without what it does before: it returns all memory that the allocators of host and device keep,
    which the next steps have to ask for again, and its own stream is on whichever device was current the first time.
    """
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


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
