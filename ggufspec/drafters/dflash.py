"""DFlash: one non-causal pass over `[last, MASK, MASK, ...]` on keys and values made of the target's features.

`BlockDrafter` also carries DSpark and DFlash2, which differ in what they make of the block's rows; see dspark and
dflash2.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..handover import hand_over, on_own_device
from ..kernels import kv
from ..kernels.rows import masked_block
from ..rows import Rows
from ..weights import Weights
from . import Draft, DraftOptions, check_cells, limit
from .backbone import Backbone, Block, load_backbone
from .dflash_config import DFlashConfig, read_dflash_config
from .scores import best
from .statistics import Statistics

if TYPE_CHECKING:
    from ..models import Model

log = logging.getLogger(__name__)


class BlockDrafter:
    """The protocol for the three block drafters: they differ in `choose`."""

    capturable = True

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        options: DraftOptions,
        *,
        n_slots: int,
        n_ctx: int,
        type_k: str = "f16",
        type_v: str = "f16",
        max_rows: int = 16,
    ) -> None:
        """n_ctx: the target's cells a slot; max_rows: the most rows that one verification step can have."""
        config = backbone.config
        self.name, self.backbone, self.options, self.device = name, backbone, options, backbone.device
        self.taps = config.target_layers
        self.n_max = clamp(options, config.n_limit, config.block_size)
        self.n_min = min(options.n_min, config.n_limit)
        self.stats = Statistics(name, self.n_max)
        common = config.common
        # Rejected rows and the block must fit beside a window without overwriting it.
        self.n_beside = beside = max(self.n_max + config.first_row, max_rows)
        self.kvs = [
            kv.allocate(
                type_k,
                type_v,
                n_slots,
                config.sliding_window + beside if is_ring(config, i, n_ctx) else n_ctx + beside,
                common.head_count_kv[i],
                common.key_length,
                common.value_length,
                self.device,
                ring=is_ring(config, i, n_ctx),
            )
            for i in range(common.block_count)
        ]

    @property
    def n_bytes(self) -> int:
        """Memory of the drafter's cache."""
        return sum(own.n_bytes for own in self.kvs)

    def choose(self, block: Block, last: Tensor) -> tuple[Tensor, Tensor]:
        """A block of n + first_row rows, last [B] to target ids and what p_min is compared with, both [B, n]."""
        raise NotImplementedError

    def begin(self, slot: int, prompt: list[int]) -> None:
        """Nothing to do: `observe` has seen the prompt."""

    @on_own_device
    def observe(self, rows: Rows, output: Any) -> None:
        (features,) = hand_over([output.taps], self.device)
        self.backbone.inject(features, rows.to(self.device), self.kvs)

    @on_own_device
    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        home = slots.device
        slots, last, n_past = hand_over([slots, last, n_past], self.device)
        config = self.backbone.config
        width = max(n, self.n_min) + config.first_row  # the block follows what is asked for, not the trained size
        tokens, n_rows = masked_block(last, config.mask_token_id, width, n_past)
        rows = Rows(tokens, slots, n_past, n_rows, tentative=True)
        chosen, scores = self.choose(self.backbone.block(rows, self.kvs), last)
        draft = limit(chosen, scores, n, self.n_min, self.options.p_min)
        return draft.to(home)

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        """Nothing to do: rejected positions are not below n_past and are overwritten."""

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return []  # storing the same keys and values again changes nothing

    def reset(self, slot: int) -> None:
        """Nothing to do: what is not below n_past is not visible."""

    def save(self, slot: int, n_past: int) -> list[tuple[Tensor, Tensor]]:
        return [kv.save(own, slot, n_past, self.n_beside) for own in self.kvs]

    def check(self, state: list[tuple[Tensor, Tensor]]) -> None:
        check_cells(self.kvs, state, self.name)

    def restore(self, slot: int, state: list[tuple[Tensor, Tensor]]) -> None:
        for own, saved in zip(self.kvs, state):
            kv.restore(own, slot, saved)

    def checkpoint(self, slot: int, n_past: int) -> list[tuple[Tensor, Tensor] | None]:
        """Only the rings: cells of full layers stay where they are when the slot goes back to n_past."""
        return [kv.copy(own, slot, n_past, self.n_beside) if own.ring else None for own in self.kvs]

    def rewind(self, slot: int, state: list[tuple[Tensor, Tensor] | None]) -> None:
        for own, saved in zip(self.kvs, state):
            if saved is not None:
                kv.restore(own, slot, saved)


def is_ring(config: DFlashConfig, layer: int, n_ctx: int) -> bool:
    """A sliding layer keeps its window only, unless the context is no longer than that."""
    return config.is_sliding[layer] and config.sliding_window < n_ctx


def clamp(options: DraftOptions, n_limit: int, block_size: int) -> int:
    """n_max lowered to what the block was trained for, with llama.cpp's warning."""
    if max(options.n_max, options.n_min) > n_limit:
        log.warning(
            "requested draft size (n_max=%d, n_min=%d) exceeds the trained block size %d -- clamping to %d",
            options.n_max, options.n_min, block_size, n_limit,
        )  # fmt: skip
    return min(options.n_max, n_limit)


class DFlash(BlockDrafter):
    """DFlash v1: each row's most likely token."""

    def choose(self, block: Block, last: Tensor) -> tuple[Tensor, Tensor]:
        return best(self.backbone.logits(block, 1), self.options.p_min)


def load_dflash(
    weights: Weights, target: Model, options: DraftOptions, device: torch.device, **sizes: Any
) -> BlockDrafter:
    """The block drafter of a `dflash` file, one of the three; `recognize` has checked the pair."""
    from .dflash2 import DFlash2
    from .dspark import DSpark

    config = read_dflash_config(weights.file)
    backbone = load_backbone(weights, config, target, device)
    if config.kind == "dspark":
        return DSpark(weights, backbone, options, **sizes)
    if config.kind == "dflash2":
        return DFlash2(weights, backbone, options, **sizes)
    return DFlash("draft-dflash", backbone, options, **sizes)
