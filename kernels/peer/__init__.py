"""Sums between the ranks of a tensor split through memory that every rank maps, in one launch.

    total = sum_parts(part, link)                                  # what an all-reduce gives, in rank order
    x, a = sum_add_rms_norm(x, part, weight, eps, link)            # and what follows it in a model

**The protocol.** Every rank owns a buffer, an *inbox*, that all others map: two halves, in each a place for every
(rank, row). Its words hold a number and, beside it, the call that the number is of: eight bytes, which reach the other
card as one. Row r of all ranks is a channel of its own, worked on by one program a rank. Calls are numbered per channel
from 1 by a counter in each rank's own memory, so that a captured graph counts on at every replay. In call e a program

1. writes its row, every number with e, into half e mod 2 of every other rank's inbox, in its own place there;
2. reads the places of its row in its own inbox again and again until every word there is of call e;
3. adds up the rows of all ranks in rank order, its own in its place, so that every rank rounds alike.

No word says anything about another one, so no order of writes or reads matters: there are no flags, no fences, and one
way over the link is all that a call waits for. It takes twice the bytes, which for a step's few rows is little.

**Why two halves suffice.** A place in half e mod 2 is written again in call e + 2. A rank gets there only after it has
every word of call e + 1 on this channel. The rank that reads the place wrote those in a launch that began after its
launch for call e had ended (launches of a stream follow one another, and one that overlaps the one before waits for its
end before it reads what kernels write), so it had read the place for the last time. What a half holds before call e's
words are there is of call e - 2 (or zero), never of e, also when the counter wraps: so equality is the test.

**Why it does not hang.** Every rank makes the same calls with the same number of rows in the same order, as with any
collective. Channels do not wait for one another. If not all programs fit a card at once, those with low rows run first
on every rank, and they need nothing from later ones. A host that waits for its own card (to load a kernel, to free
memory) waits for calls that the other ranks have made or will make without it.
"""

from __future__ import annotations

from torch import Tensor

from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.peer.link import COLUMNS, ROWS, Link

__all__ = ["COLUMNS", "ROWS", "Link", "sum_add_rms_norm", "sum_parts"]


def sum_parts(part: Tensor, link: Link) -> Tensor:
    """part [.., K] float32 of this rank, up to ROWS rows of up to COLUMNS: the ranks' sum, the same bits on each."""
    from ggufspec.kernels.peer import triton

    return triton.sum_parts(part, link)


def sum_add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float, link: Link) -> tuple[Tensor, Activation]:
    """x [.., K] and this rank's part of what is added to it: (x + sum, prepared rms_norm of it)."""
    from ggufspec.kernels.peer import triton

    return triton.sum_add_rms_norm(x, part, weight, eps, link)
