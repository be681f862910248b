"""Logits of which every rank of a tensor split has a part of the vocabulary, and what is chosen from them.

Joining them moves four bytes a token of the vocabulary and row; choosing needs the best few. So a head leaves its parts
unjoined, like `parallel.Unsummed`, and whoever reads them says what it needs: `argmax` and `top_k` exchange candidates
(see kernels.candidates) and give what they give for the joined logits, ids and order included; `whole` joins.

All of these are collective: every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kernels import candidates, select
from .parallel import Range, Shard, all_gather


@dataclass(frozen=True)
class Unjoined:
    """This rank's columns [.., n] of logits [.., V]."""

    part: Tensor
    shard: Shard
    bounds: Sequence[Range]  # of each rank's columns; they follow one another from 0 to V

    @property
    def shape(self) -> torch.Size:
        """Of all logits."""
        return torch.Size((*self.part.shape[:-1], self.bounds[-1][1]))

    @property
    def own(self) -> Range:
        """This rank's columns."""
        return self.bounds[self.shard.rank]

    def rows(self) -> Tensor:
        """The part as [T, n]."""
        return self.part.flatten(0, -2)

    def merged(self, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """ids [T, m]: the best m columns of this part, m the smaller of k and n. The k best of all parts [T, k]."""
        first, link = self.own[0], self.shard.link
        if link is not None and candidates.fits(ids.shape[0], k, link):
            return candidates.exchange(self.rows(), ids, first, k, link)
        own = candidates.keys(self.rows(), ids, first, k)
        every = own.new_empty(self.shard.size, *own.shape)
        all_gather(every.view(-1), own.view(-1), group=self.shard.group)
        return candidates.merge(every)


Joinable = Tensor | Unjoined  # logits [.., V]


def whole(logits: Joinable) -> Tensor:
    """All logits, on every rank."""
    if isinstance(logits, Tensor):
        return logits
    return logits.shard.join(logits.rows(), logits.bounds).view(logits.shape)


def joined_for(logits: Joinable, k: int) -> Joinable:
    """The logits, whole where k candidates of every rank, eight bytes each, would be more to move."""
    if isinstance(logits, Unjoined) and 2 * k * logits.shard.size > logits.shape[-1]:
        return whole(logits)
    return logits


def each(logits: Joinable, f: Callable[[Tensor], Tensor]) -> Joinable:
    """f of the logits; of their part alone, so that f may do nothing between columns."""
    return f(logits) if isinstance(logits, Tensor) else replace(logits, part=f(logits.part))


def biased(logits: Joinable, ids: Tensor, biases: Tensor) -> Joinable:
    """logits [T, V] with the biases of the tokens ids added, [T, m] each."""
    if isinstance(logits, Tensor):
        return logits.scatter_add(1, ids, biases)
    first, end = logits.own
    if first == end:
        return logits
    here = (ids - first).clamp(0, end - first - 1)
    biases = biases.masked_fill(here != ids - first, 0.0)  # 0 for a token of another rank, wherever it lands
    return replace(logits, part=logits.part.scatter_add(1, here, biases))


def argmax(logits: Joinable) -> Tensor:
    """[.., V] to int64 [..]: the first maximum."""
    if isinstance(logits, Tensor):
        return select.argmax(logits)
    rows = logits.rows()
    own = select.argmax(rows)[:, None] if rows.shape[1] else no_ids(rows)
    return logits.merged(own, 1)[1].view(logits.shape[:-1])


def top_k(logits: Joinable, k: int) -> tuple[Tensor, Tensor]:
    """[.., V] to (values, ids int64) [.., k], falling; the lower id first among equals. k <= V."""
    logits = joined_for(logits, k)
    if isinstance(logits, Tensor):
        return select.top_k(logits, k)
    rows = logits.rows()
    m = min(k, rows.shape[1])
    values, ids = logits.merged(select.top_k(rows, m)[1] if m else no_ids(rows), k)
    shape = (*logits.shape[:-1], k)
    return values.view(shape), ids.view(shape)


def no_ids(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
