"""Several drafters in llama.cpp's order: for each slot the first that has something to say is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import Draft, Drafter
from .ngram import NgramDrafter
from .statistics import Statistics

if TYPE_CHECKING:
    from ..rows import Rows

ORDER = (
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
    "draft-simple", "draft-mtp", "draft-dflash", "draft-dspark",
)  # fmt: skip


@dataclass
class Features:
    """A member's view of the target's output: its own taps."""

    hidden: Tensor
    taps: Tensor | None


class Chain:
    """Drafters of different kinds as one. All observe everything; all learn how many rows were right."""

    capturable = False

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.members = sorted(drafters, key=lambda drafter: ORDER.index(drafter.name))
        self.name = ",".join(drafter.name for drafter in self.members)
        self.n_max = max(drafter.n_max for drafter in self.members)
        self.taps = tuple(tap for drafter in self.members for tap in drafter.taps)
        self.stats = Statistics(self.name, self.n_max)
        self.allowed: Sequence[Sequence[int]] | None = None  # members that each entry of a batch may use; None: all
        self._source: tuple[Tensor, Tensor] | None = None  # slots and the member whose draft each one got
        self._owner: dict[int, int] = {}  # the same on the host, made when first asked for

    @property
    def n_bytes(self) -> int:
        return sum(getattr(drafter, "n_bytes", 0) for drafter in self.members)

    def begin(self, slot: int, prompt: list[int]) -> None:
        for drafter in self.members:
            with drafter.stats.timed("begin"):
                drafter.begin(slot, prompt)

    def observe(self, rows: Rows, output: Any) -> None:
        at = 0
        for drafter in self.members:
            taps = None
            if drafter.taps:
                width = output.taps.shape[-1] // len(self.taps) * len(drafter.taps)
                taps, at = output.taps[..., at : at + width], at + width
            drafter.observe(rows, Features(output.hidden, taps))

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        draft = _empty(slots, n)
        source = torch.zeros_like(slots)
        self._source, self._owner = (slots, source), {}
        for i, drafter in enumerate(self.members):
            width = min(n, drafter.n_max)
            may = self._may(i, slots)
            if not may.any():
                continue
            if isinstance(drafter, NgramDrafter):
                # A host drafter is asked for the slots that have no draft yet and remembers those as its own.
                open_slots = ((draft.n_tokens == 0) & may).nonzero()[:, 0]
                if len(open_slots) == 0:
                    continue
                with drafter.stats.timed("propose"):
                    part = drafter.propose(slots[open_slots], last[open_slots], n_past[open_slots], width)
                found = _spread(part, open_slots, len(slots), n)
            else:
                with drafter.stats.timed("propose"):
                    part = drafter.propose(slots, last, n_past, width)
                found = _spread(part, None, len(slots), n)
            found = Draft(found.tokens, torch.where(may, found.n_tokens, 0), found.scores)
            source.masked_fill_((draft.n_tokens == 0) & (found.n_tokens > 0), i)
            draft = _first(draft, found)
        return draft

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        for drafter in self.members:
            with drafter.stats.timed("accept"):
                drafter.accept(slots, n_accepted)

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)
        source = self.source(slot)
        if source >= 0:
            self.members[source].record(slot, n_drafted, n_accepted)

    def source(self, slot: int) -> int:
        """The member whose draft the slot had last, -1 before any."""
        if not self._owner and self._source is not None:
            slots, source = self._source
            self._owner = dict(zip(slots.tolist(), source.tolist()))
        return self._owner.get(slot, -1)

    def _may(self, member: int, slots: Tensor) -> Tensor:
        """[B] bool: which entries may use a member."""
        if self.allowed is None:
            return torch.ones_like(slots, dtype=torch.bool)
        return torch.tensor([member in members for members in self.allowed], device=slots.device)

    def mutable(self) -> list[Tensor]:
        return [tensor for drafter in self.members for tensor in drafter.mutable()]

    def reset(self, slot: int) -> None:
        for drafter in self.members:
            drafter.reset(slot)

    def save(self, slot: int, n_past: int) -> list[Any]:
        return [drafter.save(slot, n_past) for drafter in self.members]

    def check(self, state: list[Any]) -> None:
        for drafter, own in zip(self.members, state):
            drafter.check(own)

    def restore(self, slot: int, state: list[Any]) -> None:
        for drafter, own in zip(self.members, state):
            drafter.restore(slot, own)

    def checkpoint(self, slot: int, n_past: int) -> list[Any]:
        return [drafter.checkpoint(slot, n_past) for drafter in self.members]

    def rewind(self, slot: int, state: list[Any]) -> None:
        for drafter, own in zip(self.members, state):
            drafter.rewind(slot, own)


def _empty(slots: Tensor, n: int) -> Draft:
    B, device = len(slots), slots.device
    return Draft(
        torch.zeros((B, n), dtype=torch.int64, device=device),
        torch.zeros(B, dtype=torch.int64, device=device),
        torch.ones((B, n), dtype=torch.float32, device=device),
    )


def _spread(draft: Draft, entries: Tensor | None, n_batch: int, n: int) -> Draft:
    """A draft of some entries and a smaller width as one of all entries and width n."""
    pad = n - draft.tokens.shape[1]
    tokens = torch.nn.functional.pad(draft.tokens, (0, pad))
    scores = torch.nn.functional.pad(draft.scores, (0, pad), value=1.0)
    if entries is None:
        return Draft(tokens, draft.n_tokens, scores)

    def wide(part: Tensor) -> Tensor:
        return part.new_zeros((n_batch, *part.shape[1:])).index_copy(0, entries, part)

    return Draft(wide(tokens), wide(draft.n_tokens), wide(scores))


def _first(a: Draft, b: Draft) -> Draft:
    """Per entry a's draft, or b's where a has none."""
    empty = a.n_tokens == 0
    return Draft(
        torch.where(empty[:, None], b.tokens, a.tokens),
        torch.where(empty, b.n_tokens, a.n_tokens),
        torch.where(empty[:, None], b.scores, a.scores),
    )
