"""What the ranks of a tensor split tell each other of their logits: the best few of each row, and how they are merged.

Every rank has the logits of a part of the vocabulary, the parts in the order of the ranks. Of k tokens to be found each
rank selects the k best of its own, which hold all of the k best that lie there. A candidate travels as one integer, its
*key*: the order of its logit in the upper half, its id in the lower one, so that of two keys the larger one is that of
the larger logit, then of the lower id (0 and -0 are equal). That is the order of `select.top_k` and `select.argmax`,
and no two candidates have the same key: the k largest keys of all ranks are what selecting from all logits gives.

    values, ids = merge(all_gathered(keys(x, ids, first, k)))    # between ranks as the caller does it
    values, ids = exchange(x, ids, first, k, link)               # through memory that all ranks map, in one launch
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.candidates import plain
from ggufspec.kernels.peer.link import COLUMNS, ROWS, Link

__all__ = ["exchange", "fits", "keys", "merge"]

LARGEST = 2048  # keys of a row, of all ranks, that a program of the kernels holds


def room(x: Tensor, n_keys: int) -> ModuleType:
    if x.is_cuda and n_keys <= LARGEST:
        from ggufspec.kernels.candidates import triton

        return triton
    return plain


def keys(x: Tensor, ids: Tensor, first: int, k: int) -> Tensor:
    """Keys [T, k] int64 of the columns ids [T, m] of x [T, n] float32, m <= k; column i is token first + i.

    The k - m others are those of no token, below all.
    """
    return room(x, k).keys(x, ids, first, k)


def merge(keys: Tensor) -> tuple[Tensor, Tensor]:
    """keys [N, T, k] of N ranks to the k largest of every row: their (values float32, ids int64) [T, k], falling."""
    return room(keys, keys.shape[0] * keys.shape[2]).merge(keys)


def exchange(x: Tensor, ids: Tensor, first: int, k: int, link: Link) -> tuple[Tensor, Tensor]:
    """`merge` of all ranks' `keys`, through peer memory; all ranks call it with the same T and k, which `fits`."""
    from ggufspec.kernels.candidates import triton

    return triton.exchange(x, ids, first, k, link)


def rows_a_channel(T: int) -> int:
    """T rows are spread over the channels of `kernels.peer`, as many neighbours a channel."""
    return -(-T // ROWS)


def fits(T: int, k: int, link: Link) -> bool:
    """Whether `exchange` takes T rows of k candidates: a channel has two words for each, a program all ranks' keys."""
    return 2 * k * rows_a_channel(T) <= COLUMNS and link.size * k <= LARGEST
