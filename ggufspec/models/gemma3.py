"""gemma3: scaled embeddings, norms before and after each sub-layer, sliding-window layers, GELU, optional softcap."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..errors import FileError
from ..parallel import Shard
from ..placement import Placement
from ..weights import Weights
from .assemble import assemble
from .base import Model, Norm
from .config import Config, Keys
from .layers import Attention, Block, FeedForward


def sliding_layers(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    """Which layers see only the window: an array of booleans, or a period p (layer i slides unless i mod p = p - 1)."""
    if keys.integer("attention.sliding_window", 0) == 0:
        return (False,) * n_layers
    name = "attention.sliding_window_pattern"
    if not keys.has(name) or keys.is_number(name):
        period = keys.integer(name, 6)
        if period < 1:
            raise FileError(f"{keys.file.path}: key gemma3.{name} is {period}; expected 1 or more")
        return tuple(i % period != period - 1 for i in range(n_layers))
    flags = tuple(keys.array(name, bool))
    if len(flags) < n_layers:
        raise FileError(f"{keys.file.path}: key gemma3.{name} has {len(flags)} entries; expected {n_layers}")
    return flags[:n_layers]


def load(weights: Weights, config: Config, placement: Placement, shard: Shard) -> Model:
    keys = Keys(weights.file)
    D, eps, n = config.embedding_length, config.layer_norm_rms_epsilon, config.n_layers
    window = keys.integer("attention.sliding_window", 0)
    slides = sliding_layers(keys, n)
    local_rope = replace(config.rope, base=keys.number("rope.freq_base_swa", 10000.0), freq_scale=1.0)
    # The 27B model (62 layers) is the one whose query scale is not that of its head size.
    scale = (D / config.head_count[0]) ** -0.5 if n == 62 else config.key_length**-0.5

    def make(i: int, device: torch.device) -> Block:
        name = f"blk.{i}"

        def norm(which: str) -> Norm:
            return Norm(weights.vector(f"{name}.{which}.weight", (D,), device), eps)

        return Block(
            index=i,
            device=device,
            attn_norm=norm("attn_norm"),
            attention=Attention.load(
                weights, name, config, i, device, shard, norms=True, scale=scale,
                rope=local_rope if slides[i] else config.rope, window=window if slides[i] else 0,
                post_norm=norm("post_attention_norm"),
            ),
            ffn_norm=norm("ffn_norm"),
            ffn=FeedForward.load(weights, name, D, config.feed_forward_length[i], device, shard, gelu=True,
                                 post_norm=norm("post_ffw_norm")),
        )

    model = assemble(weights, config, placement, make, shard=shard)
    model.embedding_scale = math.sqrt(D)
    model.logit_softcap = keys.number("final_logit_softcapping", 0.0)
    model.can_tap = False
    return model
