"""A drafter with a model that lies on one rank of a tensor split: its owner drafts, all ranks receive the drafts.

Every rank has the residual streams and hidden rows that a drafter reads, so nothing but the drafts travels. A drafter
that borrows the target's head cannot use the cut one, from whose parts all ranks choose together: the owner holds a
whole one besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import Draft, Drafter
from .statistics import Statistics

if TYPE_CHECKING:
    from ..rows import Rows


@dataclass(frozen=True)
class Ownership:
    """Which rank has the drafters, seen from one of them."""

    owner: int
    rank: int
    devices: Any  # group for the drafts
    host: Any  # group for what is said once

    @property
    def is_here(self) -> bool:
        return self.rank == self.owner

    def share(self, make: Callable[[], Drafter]) -> Owned:
        """The drafter that the owner makes, on every rank."""
        inner = make() if self.is_here else None
        facts: list[Any] = [None if inner is None else Facts.of(inner)]
        dist.broadcast_object_list(facts, self.owner, group=self.host)
        return Owned(self, facts[0], inner)


@dataclass(frozen=True)
class Facts:
    """What an engine has to know of a drafter."""

    name: str
    n_max: int
    taps: tuple[int, ...]
    capturable: bool

    @classmethod
    def of(cls, drafter: Drafter) -> Facts:
        return cls(drafter.name, drafter.n_max, tuple(drafter.taps), drafter.capturable)


class Owned:
    """The `Drafter` protocol on every rank; `inner` is None where the drafter is not."""

    def __init__(self, at: Ownership, facts: Facts, inner: Drafter | None):
        self.at, self.inner = at, inner
        self.name, self.n_max, self.taps, self.capturable = facts.name, facts.n_max, facts.taps, facts.capturable
        self._stats = Statistics(facts.name, facts.n_max)  # where the drafter is not

    @property
    def stats(self) -> Statistics:
        return self._stats if self.inner is None else self.inner.stats

    @stats.setter
    def stats(self, stats: Statistics) -> None:
        if self.inner is None:
            self._stats = stats
        else:
            self.inner.stats = stats

    @property
    def n_bytes(self) -> int:
        return getattr(self.inner, "n_bytes", 0)

    def begin(self, slot: int, prompt: list[int]) -> None:
        if self.inner is not None:
            self.inner.begin(slot, prompt)

    def observe(self, rows: Rows, output: Any) -> None:
        if self.inner is not None:
            self.inner.observe(rows, output)

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        """The owner's draft, as one message: tokens, how many count, and the scores' bits."""
        B = slots.shape[0]
        if self.inner is not None:
            draft = self.inner.propose(slots, last, n_past, n)
            message = torch.cat(
                [draft.tokens, draft.n_tokens[:, None], draft.scores.double().view(torch.int64)], dim=1
            ).contiguous()
        else:
            message = torch.empty((B, 2 * n + 1), dtype=torch.int64, device=slots.device)
        dist.broadcast(message, self.at.owner, group=self.at.devices)
        scores = message[:, n + 1 :].contiguous().view(torch.float64).float()
        return Draft(message[:, :n], message[:, n], scores)

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        if self.inner is not None:
            self.inner.accept(slots, n_accepted)

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        if self.inner is not None:
            self.inner.record(slot, n_drafted, n_accepted)
        else:
            self._stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return [] if self.inner is None else self.inner.mutable()

    def reset(self, slot: int) -> None:
        if self.inner is not None:
            self.inner.reset(slot)

    def save(self, slot: int, n_past: int) -> Any:
        return None if self.inner is None else self.inner.save(slot, n_past)

    def check(self, state: Any) -> None:
        if self.inner is not None:
            self.inner.check(state)

    def restore(self, slot: int, state: Any) -> None:
        if self.inner is not None:
            self.inner.restore(slot, state)

    def checkpoint(self, slot: int, n_past: int) -> Any:
        return None if self.inner is None else self.inner.checkpoint(slot, n_past)

    def rewind(self, slot: int, state: Any) -> None:
        if self.inner is not None:
            self.inner.rewind(slot, state)
