"""A captured step over several GPUs: graphs of one device each, and the copies between devices, in order: a tape.

The step runs once while it is recorded. Wherever its work goes on on another device (`handover.on`), one graph ends and
the next begins; wherever tensors go to another device (`handover.hand_over`), the graph at hand packs them into one
buffer, and ends: the copy to the other device stands between graphs. So the step itself is written as for one device,
and its layers, drafter, head and acceptance may lie anywhere.

A replay gives every device its graphs on its current stream. PyTorch's copies between two devices wait for both
streams, and both wait for them: everything that a copy's source or target is used for before and after keeps its order,
also when the next step is queued behind this one. The buffers are therefore common to all tapes.

Memory of tensors that live from one graph of a device to a later one of the same tape is that of the device's pool, as
within one graph: the tape's order is the order in which they were captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .capture import Graphs, Lane
from .drafters import Drafter, device_of
from .handover import recorder

if TYPE_CHECKING:
    from .models import Model
    from .stage_graphs import StageGraphs

ALIGNMENT = 128  # bytes: a tensor in a buffer begins as well as one of its own


class Item(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class Copy:
    """From a buffer of one device to one of another; without peer access the driver goes through host memory."""

    source: Tensor
    target: Tensor

    def replay(self) -> None:
        self.target.copy_(self.source, non_blocking=True)


@dataclass
class Tape:
    """What a step does on all devices."""

    items: list[Item] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)  # graphs without work: nothing to replay, but they hold the pools

    def replay(self) -> None:
        for item in self.items:
            item.replay()


class Recording:
    """A tape being recorded; a `handover.Recorder`."""

    def __init__(self, lanes: Sequence[Lane]):
        """lanes: one a device; the first is where the step begins and ends."""
        self.lanes = {lane.device: lane for lane in lanes}
        self.tape = Tape()
        self.device = lanes[0].device  # whose graph is being captured
        self._graph: Any = None
        self._n_carried = 0

    @contextmanager
    def running(self) -> Iterator[Tape]:
        """Inside, work is recorded."""
        token = recorder.set(self)
        try:
            with self._streams():
                self._begin()
                try:
                    yield self.tape
                finally:
                    self._end()
        finally:
            recorder.reset(token)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Inside, the device's graph is captured."""
        outer = self.device
        if device == outer:
            yield
            return
        self._go(device)
        try:
            with self._current(device):
                yield
        finally:
            self._go(outer)

    def carry(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors, all on one device, on another one: every replay brings them there."""
        outer, source = self.device, tensors[0].device
        if source != outer:
            self._go(source)
        with self._current(source):
            packed = self._packed(tensors, source)
        self._end()
        there = self._buffer("in", device, packed)
        self._copy(packed, there)
        self._n_carried += 1
        self.device = outer
        self._begin()
        return unpacked(there, tensors)

    def _packed(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """All tensors' bytes in the buffer of what leaves the device, written by its graph."""
        unit = unit_of(tensors)
        pieces: list[Tensor] = []
        for t, (start, stop) in zip(tensors, places(tensors)):
            flat = t.contiguous().as_strided((t.numel(),), (1,))  # one number may have any stride
            pieces.append(flat.view(unit))
            pieces.append(pieces[-1].new_empty((stop - start - n_bytes(t)) // unit.itemsize))
        total = sum(piece.numel() for piece in pieces)
        out = self._buffer("out", device, torch.empty(total, dtype=unit, device="meta"))
        torch.cat(pieces, out=out)
        return out

    def _buffer(self, way: str, device: torch.device, like: Tensor) -> Tensor:
        """The device's buffer for this crossing, as large as `like`. Steps use it one after the other."""
        buffers, key = self._lane(device).buffers, (way, self._n_carried)
        wanted = like.numel() * like.element_size()
        held = buffers.get(key)
        if held is None or held.numel() < wanted:
            held = buffers[key] = torch.empty(wanted, dtype=torch.uint8, device=device)
        return held[:wanted].view(like.dtype)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self.lanes:
            raise RuntimeError(f"a step is captured on {', '.join(map(str, self.lanes))}; it went on to {device}")
        return self.lanes[device]

    def _go(self, device: torch.device) -> None:
        self._end()
        self.device = device
        self._begin()

    # -- what only a GPU can do --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a graph of the device."""
        pool = self._lane(self.device).pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self) -> None:
        """End it; onto the tape with it if it holds anything."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        with torch.cuda.device(self.device), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            graph.capture_end()
        is_empty = any("graph is empty" in str(warning.message).lower() for warning in told)
        (self.tape.empty if is_empty else self.tape.items).append(graph)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        self.tape.items.append(Copy(source, target))

    def _current(self, device: torch.device) -> Any:
        return torch.cuda.device(device)

    @contextmanager
    def _streams(self) -> Iterator[None]:
        with ExitStack() as stack:
            for lane in list(self.lanes.values())[::-1]:  # the first one's device is current inside
                stack.enter_context(torch.cuda.stream(lane.stream))
            yield


class RelayGraphs(Graphs):
    """`Graphs` of steps over several devices: every graph of it is a tape."""

    def __init__(self, lanes: Sequence[Lane], mutable: Callable[[], list[Tensor]]):
        """lanes: of all devices that a step works on; the first is that of its arguments and results."""
        super().__init__(lanes[0].device, mutable)
        self.lanes = list(lanes)

    def _recorded(self, stage: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, Any]:
        with Recording(self.lanes).running() as tape:
            outputs = stage(*inputs)
        return tape, outputs


def devices_of_step(target: Model, drafter: Drafter | None) -> list[torch.device]:
    """All that a captured step works on, the one where it begins and ends first. A drafter on the host has no part."""
    devices = [target.device, target.embedding.device, target.head.device, *(s.device for s in target.stages)]
    if drafter is not None and drafter.capturable:
        devices.append(device_of(drafter, target.device))
    return list(dict.fromkeys(devices))


def graphs_for(target: Model, drafter: Drafter | None, stages: StageGraphs | None, mutable: Callable[[], list[Tensor]]
               ) -> Graphs | None:
    """What captures an engine's steps: graphs on one GPU, tapes over several; None where the CPU has a part in them.

    stages: what captures prompts on the same devices; memory is shared with them.
    """
    devices = devices_of_step(target, drafter)
    if any(device.type != "cuda" for device in devices):
        return None
    if len(devices) == 1:
        return Graphs(target.device, mutable)
    shared = {} if stages is None else {device: graphs.lanes[0] for device, graphs in stages.graphs.items()}
    return RelayGraphs([shared.get(device) or Lane(device) for device in devices], mutable)


def n_bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def unit_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """What the tensors are packed as: eight bytes at once, where all of them consist of such and begin with one."""
    fits = all(n_bytes(t) % 8 == 0 and t.storage_offset() * t.element_size() % 8 == 0 for t in tensors)
    return torch.int64 if fits else torch.uint8


def places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each tensor begins in the buffer and where the next one would, in bytes."""
    found, at = [], 0
    for t in tensors:
        stop = at + -(-n_bytes(t) // ALIGNMENT) * ALIGNMENT
        found.append((at, stop))
        at = stop
    return found


def unpacked(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer that has the bytes of tensors like these."""
    as_bytes = buffer.view(torch.uint8)
    return [
        as_bytes[start : start + prod(t.shape) * t.element_size()].view(t.dtype).view(t.shape)
        for t, (start, _) in zip(tensors, places(tensors))
    ]
