"""The parts of loading that architectures share: embedding, norm, head and a list of blocks into a Model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..cache import KVLayer, RecurrentLayer
from ..kernels.rope import RopeSpec
from ..parallel import WHOLE, Shard
from ..placement import Placement
from ..weights import Part, Weights
from .base import Head, Layer, Model, Norm
from .config import Config
from .layers import Attention, Block, FeedForward, heads_cut

MakeLayer = Callable[[int, torch.device], Layer]
CacheLayer = KVLayer | RecurrentLayer

HEAD_GRANULARITY = 64  # vocabulary rows of the head are cut in multiples of this


def assemble(weights: Weights, config: Config, placement: Placement, make_layer: MakeLayer,
             cache_layers: Sequence[CacheLayer] | None = None, shard: Shard = WHOLE) -> Model:
    """Read the tensors that every architecture has, and the layers through `make_layer(index, device)`."""
    D, V = config.embedding_length, config.n_vocab
    embedding = weights.matrix("token_embd.weight", (V, D), placement.embedding)
    layers = [make_layer(i, placement.layers[i]) for i in range(config.n_layers)]
    norm = weights.vector("output_norm.weight", (D,), placement.output)
    head_name = "output.weight" if weights.has("output.weight") else "token_embd.weight"
    bounds = shard.bounds(V, HEAD_GRANULARITY) if shard.size > 1 else None
    rows = None if bounds is None else [bounds[shard.rank]]  # whole: a tied head is packed once
    head = Head(weights.group(placement.output, Part.of(head_name, (V, D), rows)), shard, bounds)
    if cache_layers is None:
        cache_layers = [kv_layer(weights, config, i, placement.layers[i], shard) for i in range(config.n_layers)]
    return Model(config, embedding, layers, norm, head, cache_layers,
                 head_bias=weights.optional_vector("output.bias", (V,), placement.output))


def kv_layer(weights: Weights, config: Config, layer: int, device: torch.device, shard: Shard) -> KVLayer:
    cut = heads_cut(weights, f"blk.{layer}", config, layer, shard)
    return KVLayer(cut.n, config.key_length, config.value_length, device)


def block(weights: Weights, config: Config, i: int, device: torch.device, shard: Shard, *, norms: bool,
          rope: RopeSpec) -> Block:
    """A plain pre-norm block of architecture-independent names."""
    D, eps, name = config.embedding_length, config.layer_norm_rms_epsilon, f"blk.{i}"
    return Block(
        index=i,
        device=device,
        attn_norm=Norm(weights.vector(f"{name}.attn_norm.weight", (D,), device), eps),
        attention=Attention.load(weights, name, config, i, device, shard, norms=norms, rope=rope),
        ffn_norm=Norm(weights.vector(f"{name}.ffn_norm.weight", (D,), device), eps),
        ffn=FeedForward.load(weights, name, D, config.feed_forward_length[i], device, shard),
    )


def with_factors(rope: RopeSpec, weights: Weights, name: str, device: torch.device) -> RopeSpec:
    """`rope` with the divisors of tensor `name` (n_rot/2), when the file has it."""
    factors = weights.optional_vector(name, (rope.n_rot // 2,), device)
    return rope if factors is None else replace(rope, factors=factors)
