"""One decode step of several slots: draft, verify, accept; with or without a drafter the same path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cache import Cache
from .choose import Chooser
from .drafters import Drafter
from .job import TokenOut
from .slot import Slot
from .speculate import accepted_prefix, lay_out

if TYPE_CHECKING:
    from .models import Model


@dataclass
class Decoded:
    """Host results of a step, one entry a slot. `emitted[b]` has the accepted drafts and the target's own token."""

    emitted: list[list[int]]
    reported: list[list[TokenOut]]
    n_drafted: list[int]  # tokens verified
    draft_ms: float
    verify_ms: float
    sample_ms: float


class Laps:
    """Wall times of a step's phases. On a GPU they are taken with events, so that the host need not wait."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Milliseconds between marks; on a GPU call it after the device has finished."""
        pairs = zip(self.marks, self.marks[1:])
        if self.cuda:
            return [a.elapsed_time(b) for a, b in pairs]
        return [1000 * (b - a) for a, b in pairs]


class Decoder:
    """Owns nothing but references: the target, its cache, the drafter, the chooser."""

    def __init__(self, target: Model, cache: Cache, drafter: Drafter | None, chooser: Chooser):
        self.target = target
        self.cache = cache
        self.drafter = drafter
        self.chooser = chooser
        self.device = target.device
        self._accepted_rows: dict[int, int] = {}

    def step(self, slots: Sequence[Slot], limits: Sequence[int]) -> Decoded:
        """Decode once for `slots`, each with at most limits[b] drafted tokens."""
        device = self.device
        laps = Laps(device)
        index = torch.tensor([s.id for s in slots], device=device)
        last = torch.tensor([s.last for s in slots], device=device)
        n_past = torch.tensor([s.n_past for s in slots], device=device)
        draft, n_draft = self._draft(index, last, n_past, limits)
        laps.mark()
        rows = lay_out(last, draft, n_draft, index, n_past, self.target.n_vocab)
        taps = self.drafter.taps if self.drafter is not None else ()
        output = self.target.forward(rows, self.cache, taps=taps, logits="all")
        assert output.logits is not None
        laps.mark()
        choices = self.chooser.rows(output.logits, rows, slots)
        n_accepted = accepted_prefix(rows, choices.tokens, self.chooser.is_eog)
        self.cache.accept(index, n_accepted + 1)
        laps.mark()
        if self.drafter is not None:
            self.drafter.observe(rows, output)
            self.drafter.accept(index, n_accepted)
        laps.mark()
        host = torch.cat([choices.tokens, n_accepted[:, None], rows.n_rows[:, None]], dim=1).tolist()
        emitted = [row[: row[-2] + 1] for row in host]
        for slot, tokens in zip(slots, emitted):
            self._accepted_rows[slot.id] = len(tokens)
        chosen = self.chooser.report(slots, choices, emitted)
        draft_ms, verify_ms, sample_ms, observe_ms = laps.ms()
        return Decoded(
            emitted, [c.reported for c in chosen], [row[-1] - 1 for row in host],
            draft_ms + observe_ms, verify_ms, sample_ms,
        )

    def _draft(self, index: Tensor, last: Tensor, n_past: Tensor, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(tokens [B, n], how many count [B])"""
        n = max(limits)
        if self.drafter is None or n == 0:
            empty = torch.zeros(len(limits), 0, dtype=torch.int64, device=self.device)
            return empty, torch.zeros_like(last)
        draft = self.drafter.propose(index, last, n_past, n)
        room = torch.tensor(list(limits), device=self.device)
        return draft.tokens.to(self.device), torch.minimum(draft.n_tokens.to(self.device), room)

    def n_accepted_rows(self, slot_id: int) -> int:
        """Rows of the slot's last step that were committed: the last token and the accepted drafts."""
        return self._accepted_rows[slot_id]

    def record(self, slot_id: int, n_drafted: int, n_accepted: int) -> None:
        """Count a verified draft for the drafter's own statistics."""
        assert self.drafter is not None
        self.drafter.stats.record(n_drafted, n_accepted)
