"""Prompt chunks on their way through the devices of a layer split, several at once.

The host gives chunk k + 1 to the first device while the later ones still work on chunk k. Nothing in between may make
the host or an earlier device wait for a later one: token ids come from page-locked memory, residual and taps are handed
over on streams of their own (see handover), and a drafter on an earlier device reads a chunk as many chunks later as it
takes to get through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .handover import send, wait_for
from .rows import Rows, prompt_rows

if TYPE_CHECKING:
    from .drafters import Drafter
    from .models import Model, Output


@dataclass(frozen=True)
class Sent:
    """What drafters read of a chunk (`models.Output`), on its way to their device."""

    rows: Rows
    hidden: Tensor
    taps: Tensor | None
    arrived: Any  # for `wait_for`


class Prefill:
    """The chunks that the devices have been given. On the CPU everything is done at once."""

    def __init__(self, target: Model, drafter: Drafter | None):
        self.device = target.device
        self.drafter = drafter
        self.drafter_device = device_of(drafter, self.device)
        stages = [stage.device for stage in target.stages]
        self.n_most = len(stages) + 1  # chunks under way: one a stage, and one that waits
        self.n_late = len(stages) - 1 - stages.index(self.drafter_device) if self.drafter_device in stages else 0
        self._is_pinned = any(device.type == "cuda" for device in stages)
        self._chunks: deque[Any] = deque()  # events after which a chunk is through the target
        self._sent: deque[Sent] = deque()  # what the drafter has still to read, oldest first

    def rows(self, tokens: Sequence[int], slot: int, n_past: int) -> Rows:
        """A chunk, once no more than `n_most` are under way."""
        while len(self._chunks) >= self.n_most:
            self._chunks.popleft().synchronize()
        rows = prompt_rows(torch.tensor(tokens, dtype=torch.int64), slot, n_past)
        return rows.pinned() if self._is_pinned else rows

    def observe(self, rows: Rows, output: Output) -> None:
        """The target has been given a chunk: let the drafter read it, or an earlier one."""
        if self.drafter is not None:
            parts = [output.hidden] if output.taps is None else [output.hidden, output.taps]
            moved, arrived = send(parts, self.drafter_device)
            self._sent.append(Sent(rows, moved[0], moved[1] if len(moved) > 1 else None, arrived))
            self._read(self.n_late)
        if self.device.type == "cuda":
            self._chunks.append(torch.cuda.current_stream(self.device).record_event())

    def join(self) -> None:
        """Let the drafter read all it was sent; before anything else is done with what it keeps."""
        self._read(0)

    def _read(self, n_left: int) -> None:
        while self.drafter is not None and len(self._sent) > n_left:
            sent = self._sent.popleft()
            wait_for(sent.arrived, self.drafter_device)
            self.drafter.observe(sent.rows, sent)


def device_of(drafter: Drafter | None, default: torch.device) -> torch.device:
    """Where the drafters with a model lie; they all lie on one device."""
    members = getattr(drafter, "members", [drafter])
    return next((member.device for member in members if hasattr(member, "device")), default)
