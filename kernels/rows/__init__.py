"""The bookkeeping of a step's rows on its device: positions, the rows of a verification, how many drafts were right.

An entry with n_past -1 is padding: it has no rows, n_draft and n_accepted -1, and changes nothing of its slot.
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.rows import plain

__all__ = ["accepted_prefix", "lay_out", "masked_block", "positions"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.rows import triton

        return triton
    return plain


def positions(n_past: Tensor, n_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """n_past, n_rows [B] int64 to the positions [B, width] of all rows, and the same with -1 from row n_rows on."""
    return room(n_past).positions(n_past, n_rows, width)


def masked_block(last: Tensor, mask: int, width: int, n_past: Tensor) -> tuple[Tensor, Tensor]:
    """last, n_past [B] int64 to tokens [B, width], `last` and then `mask`, and how many of them count [B]: all."""
    return room(last).masked_block(last, mask, width, n_past)


def lay_out(last: Tensor, draft: Tensor, n_draft: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    """last [B], draft [B, n], n_draft [B], int64, to tokens [B, n + 1] and how many of them count [B].

    An id outside 0..n_vocab ends its draft there; tokens are never outside.
    """
    return room(last).lay_out(last, draft, n_draft, n_vocab)


def accepted_prefix(tokens: Tensor, sampled: Tensor, n_rows: Tensor, is_eog: Tensor) -> Tensor:
    """tokens, sampled [B, W], n_rows [B] int64, is_eog [V] bool to how many drafted tokens are right, [B] int64.

    Row i's draft is the token of row i + 1, if that is below n_rows; it is right when all before it are, it is what was
    sampled at row i, and does not end the stream. -1 without any row.
    """
    return room(tokens).accepted_prefix(tokens, sampled, n_rows, is_eog)
