"""Per-slot values that a step leaves for the next one, so that it can be queued before the host knows them.

values [4, slots] int64, one column a slot: the last token, n_past, the room for drafted tokens, and how many random
numbers of synthetic acceptance the last step used.
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.follow import plain

__all__ = ["advance", "take"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.follow import triton

        return triton
    return plain


def take(table: Tensor, values: Tensor) -> Tensor:
    """table [7, B] int64 (slots, draft lengths, whether the entry is fresh, and a fresh entry's own values) to [5, B].

    Rows 0..3 are the entries' values, those of `values` where an entry is not fresh; row 4 is how many drafted tokens
    an entry may verify: its length, as far as there is room.
    """
    return room(values).take(table, values)


def advance(values: Tensor, taken: Tensor, slots: Tensor, tokens: Tensor, n_accepted: Tensor, n_rows: Tensor) -> Tensor:
    """After a step that began with `taken` [5, B]: updates `values` in place and returns the host's table [B, W + 2].

    tokens [B, W] int64: the accepted drafts, then the target's own; n_accepted, n_rows [B]. The table's columns are the
    tokens, n_accepted and n_rows. Entries without rows leave their slot's values alone.
    """
    return room(values).advance(values, taken, slots, tokens, n_accepted, n_rows)
