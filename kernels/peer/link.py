"""What a rank needs to reach the others' memory: addresses, its own inbox, and counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 64  # channels: a step's rows; more go through the library
COLUMNS = 16384  # the widest row


WORD_BYTES = 8  # a number and its call's: written and read as one


def n_words(size: int) -> int:
    """Words of an inbox: two halves of a row a rank and channel."""
    return 2 * size * ROWS * COLUMNS


@dataclass
class Link:
    """`bases` [size] int64: the address of every rank's inbox as this process maps it."""

    rank: int
    size: int
    inbox: Tensor  # [n_words] int64, this rank's own
    bases: Tensor
    calls: Tensor  # [ROWS] int32, calls made on each channel
    late: Tensor  # [1] int32, 1 once a wait has ended at its limit
    held: Any = None  # keeps the other ranks' inboxes mapped

    @classmethod
    def of(cls, rank: int, inboxes: list[Tensor]) -> Link:
        """inboxes: every rank's, in order, zeroed before any rank's first call; [rank] is the own one."""
        own = inboxes[rank]
        bases = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=own.device)
        return cls(
            rank, len(inboxes), own, bases,
            torch.zeros(ROWS, dtype=torch.int32, device=own.device),
            torch.zeros(1, dtype=torch.int32, device=own.device), inboxes,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor [.., K] is of a size that fits the channels."""
        return x.dtype == torch.float32 and x.shape[-1] <= COLUMNS and x.numel() <= ROWS * x.shape[-1]
