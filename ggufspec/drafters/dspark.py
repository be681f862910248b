"""DSpark: a Markov chain over the block's rows (a choice is biased by the one before it), a confidence head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.matmul import PackedWeight, WeightGroup, gather, matmul, prepare
from ..kernels.select import confidences, markov_chain, markov_tokens
from ..unjoined import whole
from ..weights import Weights
from . import DraftOptions
from .backbone import Backbone, Block
from .dflash import BlockDrafter


class DSpark(BlockDrafter):
    def __init__(self, weights: Weights, backbone: Backbone, options: DraftOptions, **sizes: Any) -> None:
        config, device, path = backbone.config, backbone.device, weights.file.path
        has_head = config.has_confidence_head and weights.has("conf_proj.weight")
        if options.p_min > 0 and not has_head:
            raise ConfigError(
                f"{path}: this DSpark draft has no confidence head (conf_proj.weight), which "
                f"--spec-draft-p-min {options.p_min:g} needs; use --spec-draft-p-min 0"
            )
        super().__init__("draft-dspark", backbone, options, **sizes)
        V, r = weights.file.tensor("markov_w1.weight").shape
        if V != config.common.n_vocab:
            raise ConfigError(
                f"{path}: markov_w1.weight has {V} rows, the vocabulary {config.common.n_vocab} tokens; "
                "expected a row for each"
            )
        D, n_draft = config.common.embedding_length, backbone.head.n_rows
        self.markov_in: PackedWeight = weights.matrix("markov_w1.weight", (V, r), device)
        self.markov_out: WeightGroup = weights.group(device, ("markov_w2.weight", (n_draft, r)))
        self.confidence: tuple[Tensor, Tensor] | None = None
        if options.p_min > 0:
            first = torch.zeros(1, dtype=torch.int64, device=device)
            weight = gather(weights.matrix("conf_proj.weight", (1, D + r), device), first)[0]
            self.confidence = weight, weights.vector("conf_proj.bias", (1,), device)

    def choose(self, block: Block, last: Tensor) -> tuple[Tensor, Tensor]:
        first = self.backbone.config.first_row
        hidden = None if self.confidence is None else self.backbone.hidden(block)[:, first:]
        logits = whole(self.backbone.logits(block, first))  # each choice adds to all logits of the next row
        if self.backbone.d2t is None:
            tokens, embedded = markov_tokens(logits, last, self.markov_in, self.markov_out)
            if hidden is None or self.confidence is None:
                return tokens, torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
            return tokens, confidences(hidden, embedded, *self.confidence)
        return markov_chain(
            logits,
            last,
            lambda ids: gather(self.markov_in, ids),
            lambda e: matmul(prepare(e), self.markov_out)[0],
            hidden,
            self.confidence,
            self.backbone.d2t,
        )
