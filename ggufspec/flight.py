"""A decode step between its launch and the moment at which the host reads its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .adaptive import Choice
from .choose import Choices
from .job import Job, TokenOut
from .laps import Laps
from .slot import Slot


@dataclass
class Flight:
    """The device has the step, the host has not seen what came of it."""

    slots: list[Slot]
    jobs: list[Job]  # who held the slots at the launch
    choice: Choice
    choices: Choices
    summary: Tensor  # [B, W + 2] on the host, complete once `done` is: tokens, n_accepted, n_rows
    laps: Laps
    done: Any  # a CUDA event; None: complete
    began: float  # when the host began to launch it

    def live(self) -> list[int]:
        """Entries whose job still holds its slot; results of the others are thrown away."""
        return [b for b, (slot, job) in enumerate(zip(self.slots, self.jobs)) if slot.job is job]

    def holds(self, slot: Slot) -> bool:
        """Whether it works for the slot's present job."""
        return slot.job is not None and any(slot.job is job for job in self.jobs)


@dataclass
class Decoded:
    """Host results of a step, one entry a slot whose job goes on. `emitted[b]` has the accepted drafts and the
    target's own token."""

    slots: list[Slot]
    emitted: list[list[int]]
    reported: list[list[TokenOut]]
    n_drafted: list[int]  # tokens verified
    proposed: bool  # whether the drafter was asked
    draft_ms: float
    verify_ms: float
    sample_ms: float
