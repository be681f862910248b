"""What a rank needs to reach the others' memory: addresses, its own inbox, and counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ggufspec.kernels.matmul.joint import COLUMNS, ROWS, box_floats

WORD_BYTES = 8  # a number and its call's: written and read as one


def n_words(size: int) -> int:
    """Words of an inbox: two halves of a row a rank and channel."""
    return 2 * size * ROWS * COLUMNS


def memory_words(size: int) -> int:
    """Words of what a rank shares: its inbox, and behind it the box of the products' own sums."""
    return n_words(size) + box_floats(size) * 4 // WORD_BYTES


def box_of(memory: Tensor, size: int) -> Tensor:
    """int32 view of the box in a rank's shared memory."""
    return memory[n_words(size) :].view(torch.int32)


@dataclass
class Link:
    """`bases`, `boxes` [size] int64: the addresses of every rank's inbox and box as this process maps them."""

    rank: int
    size: int
    inbox: Tensor  # [n_words or memory_words] int64, this rank's own
    bases: Tensor
    calls: Tensor  # [ROWS] int32, calls made on each channel
    late: Tensor  # [1] int32, 1 once a wait has ended at its limit
    boxes: Tensor | None = None
    held: Any = None  # keeps the other ranks' inboxes mapped

    @classmethod
    def of(cls, rank: int, inboxes: list[Tensor]) -> Link:
        """inboxes: every rank's memory, in order, ready before any rank's first call; [rank] is the own one."""
        own = inboxes[rank]
        bases = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=own.device)
        return cls(
            rank, len(inboxes), own, bases,
            torch.zeros(ROWS, dtype=torch.int32, device=own.device),
            torch.zeros(1, dtype=torch.int32, device=own.device), bases + WORD_BYTES * n_words(len(inboxes)), inboxes,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor [.., K] is of a size that fits the channels."""
        return x.dtype == torch.float32 and x.shape[-1] <= COLUMNS and x.numel() <= ROWS * x.shape[-1]
