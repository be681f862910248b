"""Hidden rows carried from step to step: each slot's row that pairs with its next token (MTP).

pending [slots, D]: the row before the slot's next position. verified [slots, most rows, D] and verified_rows [slots]:
the rows of the slot's last tentative step and how many there were. All are changed in place, but not by entries
without rows (padding: n_past and n_accepted are -1).
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.carry import plain

__all__ = ["before", "keep", "take"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.carry import triton

        return triton
    return plain


def before(pending: Tensor, slots: Tensor, n_past: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Each row's hidden row one position earlier: [B, W, D] for hidden [B, W, D], [B, 1, D] without.

    A step's first row has the pending one before it, zeros at position 0 and for padding. slots, n_past [B] int64.
    """
    return room(pending).before(pending, slots, n_past, hidden)


def keep(
    pending: Tensor, verified: Tensor, verified_rows: Tensor, hidden: Tensor, slots: Tensor, n_rows: Tensor,
    tentative: bool,
) -> None:  # fmt: skip
    """A step's hidden rows [B, W, D], n_rows [B] of them valid: the last is pending, a tentative step's are kept."""
    room(pending).keep(pending, verified, verified_rows, hidden, slots, n_rows, tentative)


def take(pending: Tensor, verified: Tensor, verified_rows: Tensor, slots: Tensor, n_accepted: Tensor) -> None:
    """n_accepted [B] drafts of the slots' last step were right: row n_accepted is pending, or the last one."""
    room(pending).take(pending, verified, verified_rows, slots, n_accepted)
