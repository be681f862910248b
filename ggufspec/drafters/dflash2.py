"""DFlash2: convolutions along the block (in the backbone) and a selector that walks the rows' candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.matmul import PackedWeight, WeightGroup, matmul
from ..kernels.select import selector_walk
from ..unjoined import each, top_k
from ..weights import Weights
from . import DraftOptions
from .backbone import Backbone, Block
from .dflash import BlockDrafter


class DFlash2(BlockDrafter):
    def __init__(self, weights: Weights, backbone: Backbone, options: DraftOptions, **sizes: Any) -> None:
        super().__init__("draft-dflash", backbone, options, **sizes)
        config, device = backbone.config, backbone.device
        V, D, R = config.common.n_vocab, config.common.embedding_length, config.selector_rank
        self.predecessor: PackedWeight = weights.matrix("selector_predecessor.weight", (V, R), device)
        self.successor: PackedWeight = weights.matrix("selector_successor.weight", (V, R), device)
        self.gate: WeightGroup = weights.group(device, ("selector_hidden.weight", (R, D)))

    def choose(self, block: Block, last: Tensor) -> tuple[Tensor, Tensor]:
        config = self.backbone.config
        logits = self.backbone.logits(block, 1)  # the anchor's row predicts nothing
        if config.logit_scale != 1.0:
            logits = each(logits, lambda part: part * config.logit_scale)
        if config.logit_softcap > 0:
            logits = each(logits, lambda part: config.logit_softcap * torch.tanh(part / config.logit_softcap))
        values, ids = top_k(logits, config.selector_top_k)
        assert block.n is not None
        (gate,) = matmul(block.n, self.gate)
        gate = gate.view(*block.x.shape[:2], -1)[:, 1:]
        return selector_walk(ids, values, gate, last, self.predecessor, self.successor)
