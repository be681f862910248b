"""The parts of loading that architectures share: embedding, norm, head and a list of blocks into a Model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..cache import KVLayer, RecurrentLayer
from ..kernels.rope import RopeSpec
from ..placement import Placement
from ..weights import Weights
from .base import Layer, Model
from .config import Config
from .layers import Attention as Attention
from .layers import Block, FeedForward

MakeLayer = Callable[[int, torch.device], Layer]
CacheLayer = KVLayer | RecurrentLayer


def assemble(weights: Weights, config: Config, placement: Placement, make_layer: MakeLayer,
             cache_layers: Sequence[CacheLayer] | None = None) -> Model:
    """Read the tensors that every architecture has, and the layers through `make_layer(index, device)`."""
    D, V = config.embedding_length, config.n_vocab
    embedding = weights.matrix("token_embd.weight", (V, D), placement.embedding)
    layers = [make_layer(i, placement.layers[i]) for i in range(config.n_layers)]
    norm = weights.vector("output_norm.weight", (D,), placement.output)
    head_name = "output.weight" if weights.has("output.weight") else "token_embd.weight"
    head = weights.group(placement.output, (head_name, (V, D)))
    if cache_layers is None:
        cache_layers = [kv_layer(config, i, placement.layers[i]) for i in range(config.n_layers)]
    return Model(config, embedding, layers, norm, head, cache_layers,
                 head_bias=weights.optional_vector("output.bias", (V,), placement.output))


def kv_layer(config: Config, layer: int, device: torch.device) -> KVLayer:
    return KVLayer(config.head_count_kv[layer], config.key_length, config.value_length, device)


def block(weights: Weights, config: Config, i: int, device: torch.device, *, norms: bool, rope: RopeSpec,
          ffn_norm: str = "ffn_norm") -> Block:
    """A plain pre-norm block of architecture-independent names."""
    D, eps, name = config.embedding_length, config.layer_norm_rms_epsilon, f"blk.{i}"
    return Block(
        index=i,
        device=device,
        attn_norm=weights.vector(f"{name}.attn_norm.weight", (D,), device),
        attention=Attention.load(weights, name, config, i, device, norms=norms, rope=rope),
        ffn_norm=weights.vector(f"{name}.{ffn_norm}.weight", (D,), device),
        ffn=FeedForward.load(weights, name, D, config.feed_forward_length[i], device),
        eps=eps,
    )


def with_factors(rope: RopeSpec, weights: Weights, name: str, device: torch.device) -> RopeSpec:
    """`rope` with the divisors of tensor `name` (n_rot/2), when the file has it."""
    factors = weights.optional_vector(name, (rope.n_rot // 2,), device)
    return rope if factors is None else replace(rope, factors=factors)
