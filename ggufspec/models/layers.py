"""Sub-layers that architectures share: feed-forward, attention projections and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from ..cache import Cache
from ..errors import FileError, UnsupportedError
from ..kernels.attention import AttentionSpec, attend_prepared
from ..kernels.fused import GatedPair, Joint, added, gated, joins, split
from ..kernels.kv import norm_rope_store
from ..kernels.matmul import Activation, WeightGroup, matmul
from ..kernels.norm import rms_norm
from ..kernels.prepared import geglu, swiglu
from ..kernels.rope import RopeSpec
from ..parallel import WHOLE, Cut, Shard, add_rms_norm, summed, unit_granularity
from ..weights import Part, Weights
from .base import Norm, Opened, Opening, Step
from .config import Config

FFN_GRANULARITY = 128  # inner rows of a feed-forward layer are cut in multiples of this


@dataclass
class Addition:
    """A sub-layer's last matrix: its product, normed where the model has a post-norm, is added to the stream."""

    weight: WeightGroup  # [D, K]
    shard: Shard = WHOLE  # whose parts are summed; WHOLE where the layer is mirrored
    bias: Tensor | None = None
    post_norm: Norm | None = None
    joint: Joint | None = None  # where the product itself sums over the ranks, see `joints`

    @property
    def is_plain(self) -> bool:
        """Whether the sum, over ranks or not, goes into the stream as it is."""
        return self.bias is None and self.post_norm is None

    def __call__(self, x: Tensor, a: Activation, before: Activation, after: Norm | None
                 ) -> tuple[Tensor, Activation | None]:
        """x [B, W, D] and B*W prepared rows [.., K] to the stream after the sub-layer and, prepared, `after` of it.

        before: what the sub-layer's first product was given.
        """
        flat = x.view(-1, x.shape[-1])
        joint = self.joint if self.joint is not None and joins(flat, self.weight, before) else None
        if after is not None and self.is_plain and (self.shard.size == 1 or joint is not None):
            total, n = added(flat, a, self.weight, after.weight, after.eps, before, joint)
            return total.view(x.shape), n
        (y,) = matmul(a, self.weight)
        # summed over the ranks by the next norm, if nothing else comes before it
        addend = (self.shard.later(y) if self.bias is None else self.shard.sum(y) + self.bias).view(x.shape)
        if self.post_norm is not None:
            addend = rms_norm(summed(addend), self.post_norm.weight, self.post_norm.eps)
        if after is None:
            return x + summed(addend), None
        return add_rms_norm(x, addend, after.weight, after.eps)


@dataclass
class FeedForward:
    """(act(x Wg) * (x Wu)) Wd, biases optional. A rank of a tensor split has some of the F inner rows."""

    gate_up: GatedPair  # gate [F, D], up [F, D]
    down: Addition  # [D, F]
    gelu: bool
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, block: str, D: int, F: int, device: torch.device, shard: Shard,
             gelu: bool = False, post_norm: Norm | None = None) -> FeedForward:
        cut = Cut.of(shard, F, lcm(weights.block_size(f"{block}.ffn_down.weight"), FFN_GRANULARITY))
        rows = [cut.scaled(1)]
        return cls(
            weights.pair(device, Part.of(f"{block}.ffn_gate.weight", (F, D), rows),
                         Part.of(f"{block}.ffn_up.weight", (F, D), rows)),
            Addition(
                weights.group(device, Part.of(f"{block}.ffn_down.weight", (D, F), columns=rows)),
                WHOLE if cut.mirrored else shard,
                weights.optional_vector(f"{block}.ffn_down.bias", (D,), device),
                post_norm,
            ),
            gelu,
            weights.optional_vector(f"{block}.ffn_gate.bias", (F,), device, rows),
            weights.optional_vector(f"{block}.ffn_up.bias", (F,), device, rows),
        )

    def __call__(self, x: Tensor, n: Activation, after: Norm | None) -> tuple[Tensor, Activation | None]:
        """The stream x [B, W, D] and its norm, prepared, to the stream after the sub-layer and `after` of it."""
        if self.gate_bias is None and self.up_bias is None:
            return self.down(x, gated(n, self.gate_up, self.gelu), n, after)
        gate, up = split(n, self.gate_up)
        gate, up = add_bias(gate, self.gate_bias), add_bias(up, self.up_bias)
        return self.down(x, geglu(gate, up) if self.gelu else swiglu(gate, up), n, after)


def close(x: Tensor, a: Activation, output: Addition, norm: Norm, ffn: FeedForward, before: Activation,
          after: Opening | None) -> tuple[Tensor, Opened | None]:
    """A block from its mixer's result on: what `output` multiplies, then the feed-forward layer behind `norm`.

    before: the block's own first norm. Returns the stream [B, W, D] and the opening of the layer that follows.
    """
    x, inner = output(x, a, before, norm)
    assert inner is not None
    x, following = ffn(x, inner, None if after is None else after.norm)
    if after is None or following is None:
        return x, None
    return x, Opened(following, matmul(following, after.weights))


@dataclass
class Projections:
    """Q, K, V from one input, with optional biases and per-head norms; the fused `attn_qkv` form included."""

    qkv: WeightGroup
    fused: bool
    sizes: tuple[int, int, int]  # rows of q, k, v held here
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    q_norm: Tensor | None  # [hd]
    k_norm: Tensor | None

    @classmethod
    def load(cls, weights: Weights, block: str, config: Config, layer: int, device: torch.device, cut: Cut, *,
             norms: bool) -> Projections:
        """`cut` counts key heads; the query heads that read them go along."""
        D, hd, hd_v = config.embedding_length, config.key_length, config.value_length
        H, KV = config.head_count[layer], config.head_count_kv[layer]
        whole = (H * hd, KV * hd, KV * hd_v)
        units = (H // KV * hd, hd, hd_v)  # rows of a key head
        sizes = (cut.n * units[0], cut.n * units[1], cut.n * units[2])
        starts = (0, whole[0], whole[0] + whole[1])
        fused = weights.has(f"{block}.attn_qkv.weight")
        joined = [cut.scaled(unit, start) for unit, start in zip(units, starts)]
        if fused:
            group = weights.group(device, Part.of(f"{block}.attn_qkv.weight", (sum(whole), D), joined))
        else:
            group = weights.group(device, *(
                Part.of(f"{block}.attn_{name}.weight", (size, D), [cut.scaled(unit)])
                for name, size, unit in zip("qkv", whole, units)
            ))
        biases: Sequence[Tensor | None]
        if weights.has(f"{block}.attn_qkv.bias"):
            biases = weights.vector(f"{block}.attn_qkv.bias", (sum(whole),), device, joined).split(sizes)
        else:
            biases = [
                weights.optional_vector(f"{block}.attn_{name}.bias", (size,), device, [cut.scaled(unit)])
                for name, size, unit in zip("qkv", whole, units)
            ]
        return cls(
            group, fused, sizes, (biases[0], biases[1], biases[2]),
            weights.vector(f"{block}.attn_q_norm.weight", (hd,), device) if norms else None,
            weights.vector(f"{block}.attn_k_norm.weight", (hd,), device) if norms else None,
        )

    def heads(self, outs: Sequence[Tensor], shape: tuple[int, int], hd: int, hd_v: int
              ) -> tuple[Tensor, Tensor, Tensor]:
        """Products of B*W rows, shape (B, W), to q [B, W, H, hd], k [B, W, KV, hd], v [B, W, KV, hd_v].

        Neither normed nor rotated yet.
        """
        q, k, v = outs[0].split(self.sizes, dim=-1) if self.fused else outs
        q, k, v = (add_bias(t, b) for t, b in zip((q, k, v), self.biases))
        return q.reshape(*shape, -1, hd), k.reshape(*shape, -1, hd), v.reshape(*shape, -1, hd_v)


def heads_cut(weights: Weights, block: str, config: Config, layer: int, shard: Shard) -> Cut:
    """How an attention layer's key heads are cut: whole heads whose outputs fill whole blocks of Wo's columns."""
    H, KV = config.head_count[layer], config.head_count_kv[layer]
    if H < 1 or KV < 1 or H % KV:
        raise FileError(
            f"{weights.file.path}: block {layer} has {H} query heads ({config.architecture}.attention.head_count) and "
            f"{KV} key heads (head_count_kv); expected a multiple of them"
        )
    columns = H // KV * config.value_length
    return Cut.of(shard, KV, unit_granularity(columns, weights.block_size(f"{block}.attn_output.weight")))


@dataclass
class Attention:
    """Causal self-attention over the layer's KV cache."""

    projections: Projections
    output: Addition  # [D, H * hd_v]
    rope: RopeSpec
    spec: AttentionSpec
    key_length: int
    value_length: int
    eps: float

    @classmethod
    def load(cls, weights: Weights, block: str, config: Config, layer: int, device: torch.device, shard: Shard, *,
             norms: bool, rope: RopeSpec, scale: float | None = None, window: int = 0,
             post_norm: Norm | None = None) -> Attention:
        D, H, hd, hd_v = config.embedding_length, config.head_count[layer], config.key_length, config.value_length
        if not config.causal:
            raise UnsupportedError(f"{weights.file.path}: {config.architecture}.attention.causal is false; "
                                   "text generation needs a causal model")
        cut = heads_cut(weights, block, config, layer, shard)
        columns = [cut.scaled(H // config.head_count_kv[layer] * hd_v)]
        return cls(
            Projections.load(weights, block, config, layer, device, cut, norms=norms),
            Addition(
                weights.group(device, Part.of(f"{block}.attn_output.weight", (D, H * hd_v), columns=columns)),
                WHOLE if cut.mirrored else shard,
                weights.optional_vector(f"{block}.attn_output.bias", (D,), device),
                post_norm,
            ),
            rope,
            AttentionSpec(scale=hd**-0.5 if scale is None else scale, causal=True, window=window),
            hd, hd_v, config.layer_norm_rms_epsilon,
        )

    def __call__(self, products: Sequence[Tensor], step: Step, cache: Cache, layer: int) -> Activation:
        """The projections' products of B*W rows to what `output` multiplies."""
        rows, kv = step.rows, cache.kv[layer]
        assert kv is not None
        p = self.projections
        q, k, v = p.heads(products, (rows.n_batch, rows.width), self.key_length, self.value_length)
        norms = None if p.q_norm is None or p.k_norm is None else (p.q_norm, p.k_norm, self.eps)
        rope = (*step.rope(self.rope), self.rope)
        q = norm_rope_store(kv, q, k, v, rows.slots, step.store_positions, norms, rope)
        return attend_prepared(q, kv, rows.slots, rows.n_past, rows.n_rows, self.spec, q_rotated=True)


@dataclass
class Block:
    """The common block: attention, then feed-forward, each behind a norm."""

    index: int
    device: torch.device
    attn_norm: Norm
    attention: Attention
    ffn_norm: Norm
    ffn: FeedForward

    @property
    def opening(self) -> Opening:
        return Opening(self.attn_norm, self.attention.projections.qkv)

    @property
    def additions(self) -> tuple[Addition, Addition]:
        return self.attention.output, self.ffn.down

    def __call__(self, x: Tensor, opened: Opened | None, step: Step, cache: Cache, after: Opening | None
                 ) -> tuple[Tensor, Opened | None]:
        opened = opened or Opened.of(x, self.opening)
        a = self.attention(opened.products, step, cache, self.index)
        return close(x, a, self.attention.output, self.ffn_norm, self.ffn, opened.n, after)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
