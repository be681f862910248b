"""MTP: the target's own next-token block, fed with the target's hidden rows and, while drafting, with its own.

The block's cache entry at position p is made from the pair (token at p, hidden row of p - 1). `pending` holds, per
slot, the hidden row that pairs with the next token. A new sequence starts with zeros; llama.cpp keeps the row of
the slot's last request there, so that its counts depend on what ran before. Ours never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..handover import hand_over, on_own_device
from ..kernels import carry, kv
from ..kernels.rows import masked_block
from ..models.base import Step
from ..models.qwen35 import MtpBlock
from ..rows import Rows
from ..unjoined import each
from . import Draft, DraftOptions, check_cells, limit
from .borrowed import look_up
from .scores import best
from .statistics import Statistics


@dataclass
class MtpState:
    """A slot on the host."""

    kv: tuple[Tensor, Tensor]
    pending: Tensor  # [D]


class Mtp:
    name = "draft-mtp"
    taps: tuple[int, ...] = ()
    capturable = True

    def __init__(
        self,
        block: MtpBlock,
        options: DraftOptions,
        *,
        n_slots: int,
        n_ctx: int,
        type_k: str = "f16",
        type_v: str = "f16",
        max_rows: int = 16,
    ) -> None:
        """n_ctx: the target's cells a slot; max_rows: the most rows that one verification step can have."""
        self.block, self.options, self.device = block, options, block.device
        self.n_max = options.n_max
        self.stats = Statistics(self.name, self.n_max)
        layer = block.cache_layer
        n_cells = n_ctx + max(self.n_max, max_rows)
        self.kv = kv.allocate(
            type_k, type_v, n_slots, n_cells, layer.n_kv, layer.key_length, layer.value_length, self.device
        )
        D = block.enorm.shape[0]
        self.pending = torch.zeros((n_slots, D), dtype=torch.float32, device=self.device)
        # Of each slot's last tentative step: its hidden rows and how many there were.
        self.verified = torch.zeros((n_slots, max_rows, D), dtype=torch.float32, device=self.device)
        self.verified_rows = torch.ones(n_slots, dtype=torch.int64, device=self.device)

    @property
    def n_bytes(self) -> int:
        """Memory of the drafter's cache."""
        return self.kv.n_bytes

    def begin(self, slot: int, prompt: list[int]) -> None:
        """Nothing to do: `observe` has seen the prompt."""

    @on_own_device
    def observe(self, rows: Rows, output: Any) -> None:
        rows, (hidden,) = rows.to(self.device), hand_over([output.hidden], self.device)
        before = carry.before(self.pending, rows.slots, rows.n_past, hidden)
        self.block.remember(self._embed(rows.tokens), before, Step.of(rows), self.kv)
        carry.keep(
            self.pending, self.verified, self.verified_rows, hidden, rows.slots, rows.n_rows, rows.tentative
        )

    @on_own_device
    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        home = slots.device
        slots, last, position = hand_over([slots, last, n_past], self.device)
        block, one = masked_block(last, 0, 1, position)
        tokens = block[:, 0]
        hidden = carry.before(self.pending, slots, position)
        chosen, scores = [], []
        for i in range(n):
            rows = Rows(tokens[:, None], slots, position, one, tentative=True)
            x, logits = self.block.forward(self._embed(rows.tokens), hidden, Step.of(rows), self.kv)
            tokens, share = best(each(logits, lambda part: part[:, 0]), self.options.p_min)
            chosen.append(tokens)
            scores.append(share)
            if i + 1 < n:
                hidden, position = self.block.hidden(x), position + one
        draft = limit(
            torch.stack(chosen, 1), torch.stack(scores, 1), n, min(self.options.n_min, n), self.options.p_min
        )
        return draft.to(home)

    @on_own_device
    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        """The row that pairs with the next token is that of the last accepted one."""
        slots, n_accepted = hand_over([slots, n_accepted], self.device)
        carry.take(self.pending, self.verified, self.verified_rows, slots, n_accepted)

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return [self.pending]

    def reset(self, slot: int) -> None:
        self.pending[slot] = 0.0

    def save(self, slot: int, n_past: int) -> MtpState:
        return MtpState(kv.save(self.kv, slot, n_past), self.pending[slot].clone().cpu())

    def check(self, state: MtpState) -> None:
        check_cells([self.kv], [state.kv], self.name)
        if state.pending.shape != self.pending.shape[1:]:
            raise ConfigError(
                f"the saved slot's hidden row has {state.pending.numel()} numbers, "
                f"this MTP block {self.pending.shape[1]}"
            )

    def restore(self, slot: int, state: MtpState) -> None:
        kv.restore(self.kv, slot, state.kv)
        self.pending[slot] = state.pending.to(self.device)

    def checkpoint(self, slot: int, n_past: int) -> Tensor:
        """The pending row; the cells below n_past stay where they are."""
        return self.pending[slot].clone()

    def rewind(self, slot: int, state: Tensor) -> None:
        self.pending[slot] = state

    def _embed(self, tokens: Tensor) -> Tensor:
        return look_up(self.block.embedding, tokens, self.device)
