"""What a step needs to know of its slots, kept on the device, so that the next step can follow without the host.

The host sends a table before every step. An entry of it is *fresh* when the host has read everything that the device
did for the slot; otherwise the step goes on from what the step before it left here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import follow


@dataclass(frozen=True)
class Entry:
    """The host's row of the table for one slot."""

    slot: int
    length: int  # the longest draft to verify, as far as there is room
    is_fresh: bool
    last: int = 0  # sampled, not yet evaluated; this and the following count for fresh entries alone
    n_past: int = 0
    room: int = 0  # drafted tokens that the context and the tokens still wanted leave room for

    @classmethod
    def padding(cls, slot: int) -> Entry:
        """An entry without rows, which leaves its slot as it is."""
        return cls(slot, -1, True, n_past=-1)


@dataclass(frozen=True)
class StepInputs:
    """What a step begins with; on the device, [B] int64 each."""

    slots: Tensor
    last: Tensor
    n_past: Tensor
    used: Tensor  # random numbers of synthetic acceptance that the step before it has used of those sent
    limit: Tensor  # drafted tokens to verify at most
    taken: Tensor  # all of them but the slots, [5, B] with the room

    @classmethod
    def of(cls, slots: Tensor, taken: Tensor) -> StepInputs:
        last, n_past, _, used, limit = taken.unbind(0)
        return cls(slots, last, n_past, used, limit, taken)

    def first(self, n: int) -> StepInputs:
        """The first n entries."""
        return self if n == self.slots.shape[0] else StepInputs.of(self.slots[:n], self.taken[:, :n])


class SlotValues:
    """One column a slot: its last token, its n_past, its room, and the random numbers that its last step used."""

    def __init__(self, n_slots: int, device: torch.device):
        self.values = torch.zeros(4, n_slots, dtype=torch.int64, device=device)

    @staticmethod
    def table(entries: Sequence[Entry]) -> list[list[int]]:
        """[7, B]: slots, lengths, freshness, and fresh entries' values."""
        rows = [(e.slot, e.length, int(e.is_fresh), e.last, e.n_past, e.room, 0) for e in entries]
        return [list(column) for column in zip(*rows)]

    def inputs(self, table: Tensor) -> StepInputs:
        """table [7, B] int64 on the device."""
        return StepInputs.of(table[0], follow.take(table, self.values))

    def advance(self, inputs: StepInputs, tokens: Tensor, n_accepted: Tensor, n_rows: Tensor) -> Tensor:
        """What the next step of these slots begins with; [B, W + 2] for the host: tokens, n_accepted, n_rows.

        tokens [B, W]: the accepted drafts and the target's own.
        """
        return follow.advance(self.values, inputs.taken, inputs.slots, tokens, n_accepted, n_rows)
