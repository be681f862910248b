"""draft-simple: a small model of the same vocabulary continues the text greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..handover import hand_over, on_own_device
from ..kernels.rows import masked_block
from ..rows import Rows
from . import Draft, DraftOptions, check_cells, limit
from .scores import best
from .statistics import Statistics

if TYPE_CHECKING:
    from ..models import Model


class SmallModel:
    """Reads what the target reads, keeps a cache of its own, and accepts or drops the same rows.

    A draft model with recurrent layers cannot take tokens back, so it drafts by running the growing block
    `[last, d1, ...]` again for every token, without ever committing it.
    """

    name = "draft-simple"
    taps: tuple[int, ...] = ()
    capturable = True

    def __init__(
        self,
        model: Model,
        options: DraftOptions,
        *,
        n_slots: int,
        n_ctx: int,
        type_k: str = "f16",
        type_v: str = "f16",
        max_rows: int = 16,
    ) -> None:
        """n_ctx: the target's cells a slot; max_rows: the most rows that one verification step can have."""
        self.model, self.options, self.device = model, options, model.device
        self.n_max = options.n_max
        self.stats = Statistics(self.name, self.n_max)
        self.cache = model.new_cache(n_slots, n_ctx + max(self.n_max + 1, max_rows), type_k, type_v)
        self.unaccepted = False  # a tentative step was observed and its rows are not accepted yet

    @property
    def n_bytes(self) -> int:
        """Memory of the drafter's cache."""
        return self.cache.n_bytes

    def begin(self, slot: int, prompt: list[int]) -> None:
        """Nothing to do: `observe` has seen the prompt."""

    @on_own_device
    def observe(self, rows: Rows, output: Any) -> None:
        rows = rows.to(self.device)
        # Ids beyond the draft's vocabulary exist when the target's is a little larger: any row stands in for them.
        known = torch.where(rows.tokens < self.model.n_vocab, rows.tokens, 0)
        rows = Rows(known, rows.slots, rows.n_past, rows.n_rows, rows.tentative)
        self.model.forward(rows, self.cache, logits="none")
        self.unaccepted = rows.tentative

    @on_own_device
    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        home = slots.device
        slots, last, n_past = hand_over([slots, last, n_past], self.device)
        known = torch.where(last < self.model.n_vocab, last, 0)
        block, one = masked_block(known, 0, 1, n_past)
        scores = []
        for i in range(n):
            if self.cache.has_recurrent:
                rows = Rows(block, slots, n_past, one * (i + 1), tentative=True)
            else:
                rows = Rows(block[:, i:], slots, n_past + one * i, one, tentative=True)
            logits = self.model.forward(rows, self.cache, logits="last").logits
            assert logits is not None
            self.cache.accept(slots, torch.zeros_like(slots), one)
            tokens, share = best(logits, self.options.p_min)
            block = torch.cat([block, tokens], dim=1)
            scores.append(share[:, 0])
        draft = limit(
            block[:, 1:], torch.stack(scores, 1), n, min(self.options.n_min, n), self.options.p_min
        )
        return draft.to(home)

    @on_own_device
    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        """`last` and the accepted drafts stay. A second call for the same step corrects the first."""
        slots, n_accepted = hand_over([slots, n_accepted], self.device)
        if self.unaccepted:
            self.cache.accept(slots, n_accepted + 1, n_accepted + 1)
        else:
            for slot, n in zip(slots.tolist(), n_accepted.tolist()):
                self.cache.trim(slot, n + 1)
        self.unaccepted = False

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return self.cache.mutable()

    def reset(self, slot: int) -> None:
        self.cache.reset(slot)

    def save(self, slot: int, n_past: int) -> Any:
        return self.cache.save(slot, n_past)

    def check(self, state: Any) -> None:
        own = [k for k in self.cache.kv if k is not None]
        check_cells(own, [pair for pair in state.kv if pair is not None], self.name)

    def restore(self, slot: int, state: Any) -> None:
        self.cache.restore(slot, state)

    def checkpoint(self, slot: int, n_past: int) -> Any:
        return self.cache.save_recurrent(slot)

    def rewind(self, slot: int, state: Any) -> None:
        self.cache.restore_recurrent(slot, state)
