"""Prompt chunks on their way through the devices of a layer split, several at once.

The host gives chunk k + 1 to the first device while the later ones still work on chunk k. Nothing in between may make
the host or an earlier device wait for a later one: token ids come from page-locked memory, residual and taps are handed
over on streams of their own (see handover), and a drafter on an earlier device reads its features on one, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .handover import on
from .rows import Rows, prompt_rows

if TYPE_CHECKING:
    from .drafters import Drafter
    from .models import Model, Output


class Prefill:
    """The chunks that the devices have been given. On the CPU everything is done at once."""

    def __init__(self, target: Model, drafter: Drafter | None):
        self.device = target.device
        self.drafter = drafter
        self.n_most = len(target.stages) + 1  # one a stage, and one that waits
        self._chunks: deque[list[Any]] = deque()  # events after which a chunk is done
        self._is_pinned = any(stage.device.type == "cuda" for stage in target.stages)
        self._side = [torch.cuda.Stream(device) for device in self._elsewhere()]
        self._is_apart = False  # whether the side streams have work that the devices' own have not waited for

    def _elsewhere(self) -> set[torch.device]:
        """GPUs other than the target's last one that drafters read prompts on."""
        members = getattr(self.drafter, "members", [self.drafter])
        devices = {getattr(member, "device", self.device) for member in members}
        return {device for device in devices if device.type == "cuda" and device != self.device}

    def rows(self, tokens: Sequence[int], slot: int, n_past: int) -> Rows:
        """A chunk, once no more than `n_most` are under way."""
        while len(self._chunks) >= self.n_most:
            for event in self._chunks.popleft():
                event.synchronize()
        rows = prompt_rows(torch.tensor(tokens, dtype=torch.int64), slot, n_past)
        return rows.pinned() if self._is_pinned else rows

    def observe(self, rows: Rows, output: Output) -> None:
        """Let the drafter read a chunk, and count the chunk as under way."""
        streams = [torch.cuda.current_stream(self.device)] if self.device.type == "cuda" else []
        for side in self._side:
            side.wait_stream(torch.cuda.current_stream(side.device))
        if self.drafter is not None:
            with _current(self._side):
                self.drafter.observe(rows, output)
        self._is_apart = bool(self._side)
        if streams:
            self._chunks.append([_event_of(stream) for stream in [*streams, *self._side]])

    def join(self) -> None:
        """Before anything else reads or writes what the drafter has made of the chunks."""
        if self._is_apart:
            for side in self._side:
                torch.cuda.current_stream(side.device).wait_stream(side)
            self._is_apart = False


class _current:
    """Makes several devices' streams current; the current device stays."""

    def __init__(self, streams: Sequence[Any]):
        self.streams = streams

    def __enter__(self) -> None:
        self.before = [torch.cuda.current_stream(s.device) for s in self.streams]
        for stream in self.streams:
            _set(stream)

    def __exit__(self, *error: object) -> None:
        for stream in self.before:
            _set(stream)


def _set(stream: Any) -> None:
    with on(stream.device):
        torch.cuda.set_stream(stream)


def _event_of(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
