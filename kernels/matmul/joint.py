"""Where ranks of a tensor split meet inside a product: each multiplies some of the columns, all need the sum.

The program that finishes a tile writes its numbers into every other rank's box, waits for theirs in its own, adds them
in rank order, empties the places it has read, and goes on as if the sum were its product. As in `exchange`, a number
says itself whether it is there: an empty place holds a NaN that no arithmetic gives. So one way over the link is all
that a sum costs.

A box has two halves, and one sum after another takes the other half. That is enough. A rank writes a place again two
sums later, in a launch that began after its launch for the sum between had ended: so every other rank had sent its
numbers of that one, from a launch that began after its launch for the first sum had ended, with the place read and
empty. Launches of a stream follow one another; one that overlaps the one before waits for its end before it writes.

All ranks make the same sums in the same order. Programs wait for the same tile of other ranks, which there waits for
nothing but the start of its program: tokens' tiles come one after another, and the first fits a card at once.
"""

from dataclasses import dataclass

from torch import Tensor

from ggufspec.kernels.matmul.cuda import Config

ROWS = 64  # tokens of a sum, at most
COLUMNS = 16384  # weight rows, at most


@dataclass(frozen=True)
class Joint:
    """One of the sums. config: how every rank cuts the product into tiles, for partial results must be alike.

    boxes [size] int64: where this process has every rank's box, float32 [2, size, ROWS, COLUMNS], empty between sums.
    """

    rank: int
    size: int
    boxes: Tensor
    half: int
    config: Config


def box_floats(size: int) -> int:
    """Numbers of a rank's box."""
    return 2 * size * ROWS * COLUMNS
