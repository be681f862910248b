"""Rows: what one forward works on. Prompt chunks, decode steps, verifications and draft blocks are all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .handover import hand_over, on
from .kernels import rows as kernels


@dataclass(frozen=True)
class Rows:
    """`B` slots times `W` consecutive positions. Row i of entry b has position `n_past[b] + i`.

    Captured steps have more entries than streams: those without rows, `n_past` -1, name other slots and change nothing.

    All tensors live on the model's device, so that a step can be captured in a CUDA graph and acceptance needs
    no host. Rows at or past `n_rows[b]` are padding: computed, ignored, and never visible to other rows.
    """

    tokens: Tensor  # [B, W] int64
    slots: Tensor  # [B] int64, the slot of each entry; no slot twice
    n_past: Tensor  # [B] int64, committed tokens of the slot
    n_rows: Tensor  # [B] int64, 1..W; 0: the whole entry is padding
    tentative: bool  # True: recurrent layers only record the rows; Cache.accept commits a prefix of them

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def n_batch(self) -> int:
        return self.tokens.shape[0]

    def first(self, n: int) -> "Rows":
        """The first n entries."""
        return Rows(self.tokens[:n], self.slots[:n], self.n_past[:n], self.n_rows[:n], self.tentative)

    def to(self, device: torch.device) -> "Rows":
        if self.tokens.device == device:
            return self
        tokens, slots, n_past, n_rows = hand_over([self.tokens, self.slots, self.n_past, self.n_rows], device)
        return Rows(tokens, slots, n_past, n_rows, self.tentative)

    def pinned(self) -> "Rows":
        """Rows on the host in page-locked memory: no device waits for another one's copy of them."""
        return Rows(
            self.tokens.pin_memory(), self.slots.pin_memory(), self.n_past.pin_memory(), self.n_rows.pin_memory(),
            self.tentative,
        )

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        with on(self.n_past.device):
            return kernels.positions(self.n_past, self.n_rows, self.width)

    def positions(self) -> Tensor:
        """[B, W] int64 positions of all rows, padding included."""
        return self._positions[0]

    def store_positions(self) -> Tensor:
        """[B, W] int64 positions to store at; -1 for padding rows."""
        return self._positions[1]


def prompt_rows(tokens: Tensor, slot: int, n_past: int) -> Rows:
    """A prompt chunk of one slot; tokens [W] int64."""
    device = tokens.device

    def one(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=device)

    return Rows(tokens[None], one(slot), one(n_past), one(tokens.shape[0]), tentative=False)


def prompt_table(tokens: Sequence[int], slot: int, n_past: int, width: int) -> Tensor:
    """A prompt chunk of `width` rows, of which the tokens fill the first, as one int64 tensor on the host.

    What is read by itself begins at a whole multiple of 16 bytes, as kernels expect: rows, an even number of them, then
    slot, n_past and n_rows, each with a 0 after it.
    """
    padding = [0] * (width + width % 2 - len(tokens))
    return torch.tensor([*tokens, *padding, slot, 0, n_past, 0, len(tokens), 0], dtype=torch.int64)


def rows_of_table(table: Tensor, width: int) -> Rows:
    """The rows that a table of `prompt_table` holds, as views of it."""
    slot, n_past, n_rows = (table[-k : table.shape[0] - k + 1] for k in (6, 4, 2))
    return Rows(table[None, :width], slot, n_past, n_rows, tentative=False)
