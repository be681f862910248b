"""DFlash: one non-causal pass over `[last, MASK, MASK, ...]` on keys and values made of the target's features.

The backbone (injection and block pass) also carries DSpark and DFlash2, which differ in what they make of the
block's hidden rows; see dspark and dflash2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import kv
from ..kernels.attention import AttentionSpec, attend
from ..kernels.conv import dynamic_conv
from ..kernels.kv import KV
from ..kernels.matmul import PackedWeight, WeightGroup, fuse, gather, matmul, prepare
from ..kernels.norm import add_rms_norm, geglu, rms_norm, swiglu
from ..kernels.rope import rotate
from ..kernels.select import argmax
from ..models.base import Head, Step
from ..rows import Rows
from ..weights import Weights
from . import Draft, DraftOptions, check_cells, limit
from .dflash_config import DFlashConfig, read_dflash_config
from .scores import first_share
from .statistics import Statistics

if TYPE_CHECKING:
    from ..models import Model

log = logging.getLogger(__name__)


@dataclass
class Conv:
    """DFlash2: a sub-layer's convolution along the block, on its input (side 0) and its output (side 1)."""

    base: Tensor  # [2, K, D]
    projection: WeightGroup  # [2 * K * G, D]: the part that depends on the normed input, G groups of channels

    def kernels(self, a: Tensor) -> Tensor:
        """a [B, T, D], the sub-layer's normed input, to [B, T, 2, K, G]: used for both sides."""
        (dyn,) = matmul(prepare(a.reshape(-1, a.shape[-1])), self.projection)
        return dyn.view(*a.shape[:2], 2, self.base.shape[1], -1)

    def __call__(self, h: Tensor, dyn: Tensor, side: int) -> Tensor:
        return dynamic_conv(h, dyn, self.base, side)


@dataclass
class Layer:
    """One block of the backbone. Optional parts are None where the file has none."""

    attn_norm: Tensor
    qkv: WeightGroup  # q, k and, where the file has it, v
    q_norm: Tensor
    k_norm: Tensor
    output: WeightGroup
    post_attention_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: WeightGroup
    down: WeightGroup
    post_ffw_norm: Tensor | None
    output_scale: Tensor | None
    attn_conv: Conv | None
    ffn_conv: Conv | None
    attention: AttentionSpec


@dataclass
class Backbone:
    """Weights of a `dflash` file on one device, with the embedding and head borrowed where it has none."""

    config: DFlashConfig
    device: torch.device
    fc: WeightGroup  # [D, m * D]
    hidden_norm: Tensor  # after fc
    injection: WeightGroup  # k and v of every layer: they share the fused features as input
    layers: Sequence[Layer]
    output_norm: Tensor
    embedding: PackedWeight  # [V, D]
    head: Head  # of Vd rows
    d2t: Tensor | None  # [Vd] int64: target ids of a reduced draft vocabulary

    def keys_values(self, parts: Sequence[Tensor], layer: Layer, step: Step) -> tuple[Tensor, Tensor]:
        """Raw projections [B*W, KV*hd] of one layer to rotated K and V [B, W, KV, hd]; no V: normed raw K."""
        common = self.config.common
        eps, shape = common.layer_norm_rms_epsilon, (*step.positions.shape, -1)
        raw = parts[0].view(*shape, common.key_length)
        cos, sin = step.rope(self.config.rope)
        k = rotate(rms_norm(raw, layer.k_norm, eps), cos, sin, self.config.rope)
        if len(parts) > 1:
            return k, parts[1].view(*shape, common.value_length)
        return k, rms_norm(raw, torch.ones_like(layer.k_norm), eps)

    def inject(self, features: Tensor, rows: Rows, kvs: Sequence[KV]) -> None:
        """features [B, W, m*D] of all rows into every layer's cache."""
        eps = self.config.common.layer_norm_rms_epsilon
        step = Step.of(rows)
        (fused,) = matmul(prepare(features.reshape(-1, features.shape[-1])), self.fc)
        parts = matmul(prepare(rms_norm(fused, self.hidden_norm, eps)), self.injection)
        per_layer = len(parts) // len(self.layers)
        for i, (layer, own) in enumerate(zip(self.layers, kvs)):
            k, v = self.keys_values(parts[i * per_layer : (i + 1) * per_layer], layer, step)
            kv.store(own, k, v, rows.slots, storable(own, rows, step.store_positions))

    def block(self, rows: Rows, kvs: Sequence[KV]) -> Tensor:
        """The noise block's tokens through all layers: [B, T, D] after the final norm."""
        config, eps = self.config, self.config.common.layer_norm_rms_epsilon
        B, T = rows.tokens.shape
        step = Step.of(rows)
        x = gather(self.embedding, rows.tokens.reshape(-1).to(self.embedding.device)).to(self.device)
        x = (x * config.embedding_scale).view(B, T, -1)
        for layer, own in zip(self.layers, kvs):
            x = self._layer(x, layer, own, step)
        return rms_norm(x, self.output_norm, eps)

    def _layer(self, x: Tensor, layer: Layer, own: KV, step: Step) -> Tensor:
        config, common, rows = self.config, self.config.common, step.rows
        eps, batch = common.layer_norm_rms_epsilon, (x.shape[0], x.shape[1])
        a = rms_norm(x, layer.attn_norm, eps)
        if layer.attn_conv is not None:
            dyn = layer.attn_conv.kernels(a)
            a = layer.attn_conv(a, dyn, 0)
        q, *rest = matmul(prepare(a.reshape(-1, a.shape[-1])), layer.qkv)
        cos, sin = step.rope(config.rope)
        q = rms_norm(q.view(*batch, -1, common.key_length), layer.q_norm, eps)
        k, v = self.keys_values(rest, layer, step)
        kv.store(own, k, v, rows.slots, step.store_positions)
        q = rotate(q, cos, sin, config.rope)
        o = attend(q, own, rows.slots, rows.n_past, rows.n_rows, layer.attention)
        (o,) = matmul(prepare(o.reshape(batch[0] * batch[1], -1)), layer.output)
        o = o.view(x.shape) * config.value_scale
        if layer.attn_conv is not None:
            o = layer.attn_conv(o, dyn, 1)
        if layer.post_attention_norm is not None:
            o = rms_norm(o, layer.post_attention_norm, eps)
        x1, b = add_rms_norm(x, o, layer.ffn_norm, eps)
        if layer.ffn_conv is not None:
            dyn = layer.ffn_conv.kernels(b)
            b = layer.ffn_conv(b, dyn, 0)
        gate, up = matmul(prepare(b.reshape(-1, b.shape[-1])), layer.gate_up)
        activation = swiglu if config.activation == "silu" else geglu
        (y,) = matmul(prepare(activation(gate, up)), layer.down)
        y = y.view(x.shape)
        if layer.ffn_conv is not None:
            y = layer.ffn_conv(y, dyn, 1)
        if layer.post_ffw_norm is not None:
            y = rms_norm(y, layer.post_ffw_norm, eps)
        x = x1 + y
        return x if layer.output_scale is None else x * layer.output_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] through the head: [B, T, V], -inf where a reduced vocabulary has no token."""
        out = self.head(hidden).to(self.device)
        if self.d2t is None:
            return out
        wide = out.new_full((*out.shape[:-1], self.config.common.n_vocab), -torch.inf)
        wide[..., self.d2t] = out
        return wide


def storable(own: KV, rows: Rows, positions: Tensor) -> Tensor:
    """Positions to store at; of a chunk longer than a ring only the newest that fit: no cell is hit twice."""
    if not own.ring or positions.shape[1] <= own.n_cells:
        return positions
    return torch.where(positions >= (rows.n_past + rows.n_rows)[:, None] - own.n_cells, positions, -1)


def load_backbone(weights: Weights, config: DFlashConfig, target: Model, device: torch.device) -> Backbone:
    """Read every tensor of the file; an embedding or head that it lacks is the target's, where that lies."""
    common = config.common
    D, H, KVH = common.embedding_length, common.head_count, common.head_count_kv
    hd, hd_v, m, V = common.key_length, common.value_length, len(config.target_layers), common.n_vocab

    def optional(name: str, *shape: int) -> Tensor | None:
        return weights.optional_vector(name, shape, device)

    def vector(name: str, *shape: int) -> Tensor:
        return weights.vector(name, shape, device)

    def conv(name: str) -> Conv | None:
        if config.kind != "dflash2":
            return None
        K, G = config.conv_kernel_size, D // config.conv_group_size
        projection = weights.group(device, (f"{name}_conv_proj.weight", (2 * K * G, D)))
        return Conv(vector(f"{name}_conv_base", 2, K, D), projection)

    layers, injection = [], []
    for i in range(common.block_count):
        b, F = f"blk.{i}", common.feed_forward_length[i]
        projections = [(f"{b}.attn_q.weight", (H[i] * hd, D)), (f"{b}.attn_k.weight", (KVH[i] * hd, D))]
        if weights.has(f"{b}.attn_v.weight"):
            projections.append((f"{b}.attn_v.weight", (KVH[i] * hd_v, D)))
        injection += [weights.matrix(name, shape, device) for name, shape in projections[1:]]
        spec = AttentionSpec(
            scale=config.attention_scale,
            causal=config.causal,
            window=config.sliding_window if config.is_sliding[i] else 0,
            sinks=optional(f"{b}.attn_sinks.weight", H[i]),
        )
        layers.append(
            Layer(
                attn_norm=vector(f"{b}.attn_norm.weight", D),
                qkv=weights.group(device, *projections),
                q_norm=vector(f"{b}.attn_q_norm.weight", hd),
                k_norm=vector(f"{b}.attn_k_norm.weight", hd),
                output=weights.group(device, (f"{b}.attn_output.weight", (D, H[i] * hd_v))),
                post_attention_norm=optional(f"{b}.post_attention_norm.weight", D),
                ffn_norm=vector(f"{b}.ffn_norm.weight", D),
                gate_up=weights.group(
                    device, (f"{b}.ffn_gate.weight", (F, D)), (f"{b}.ffn_up.weight", (F, D))
                ),
                down=weights.group(device, (f"{b}.ffn_down.weight", (D, F))),
                post_ffw_norm=optional(f"{b}.post_ffw_norm.weight", D),
                output_scale=optional(f"{b}.layer_output_scale.weight", 1),
                attn_conv=conv(f"{b}.attn"),
                ffn_conv=conv(f"{b}.ffn"),
                attention=spec,
            )
        )
    embedding = target.embedding
    if weights.has("token_embd.weight"):
        embedding = weights.matrix("token_embd.weight", (V, D), device)
    d2t, n_draft = None, V
    if weights.has("d2t"):
        n_draft = weights.file.tensors["d2t"].shape[0]
        d2t = vector("d2t", n_draft).to(torch.int64)
    if weights.has("output.weight"):
        head = Head(weights.group(device, ("output.weight", (n_draft, D))))
    else:  # the target's even beside an embedding of its own: llama.cpp does so
        head = target.head
    return Backbone(
        config=config,
        device=device,
        fc=weights.group(device, ("fc.weight", (D, m * D))),
        hidden_norm=vector("enc.output_norm.weight", D),
        injection=fuse(injection),
        layers=layers,
        output_norm=vector("output_norm.weight", D),
        embedding=embedding,
        head=head,
        d2t=d2t,
    )


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
        self.width = self.n_max + config.first_row  # rows of the block; follows n_max, not the trained size
        self.stats = Statistics(name, self.n_max)
        common = config.common
        # Rejected rows and the block must fit beside a window without overwriting it.
        beside = max(self.width, max_rows)
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

    def choose(self, hidden: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [B, width, D], last [B] to target ids and what p_min is compared with, both [B, n_max]."""
        raise NotImplementedError

    def begin(self, slot: int, prompt: list[int]) -> None:
        """Nothing to do: `observe` has seen the prompt."""

    def observe(self, rows: Rows, output: Any) -> None:
        self.backbone.inject(output.taps.to(self.device), rows.to(self.device), self.kvs)

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        home = slots.device
        slots, last, n_past = (t.to(self.device) for t in (slots, last, n_past))
        tokens = torch.full(
            (len(slots), self.width),
            self.backbone.config.mask_token_id,
            dtype=torch.int64,
            device=self.device,
        )
        tokens[:, 0] = last
        rows = Rows(tokens, slots, n_past, torch.full_like(slots, self.width), tentative=True)
        chosen, scores = self.choose(self.backbone.block(rows, self.kvs), last)
        draft = limit(chosen, scores, n, self.n_min, self.options.p_min)
        return Draft(draft.tokens.to(home), draft.n_tokens.to(home), draft.scores.to(home))

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        """Nothing to do: rejected positions are not below n_past and are overwritten."""

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return []  # storing the same keys and values again changes nothing

    def reset(self, slot: int) -> None:
        """Nothing to do: what is not below n_past is not visible."""

    def save(self, slot: int, n_past: int) -> list[tuple[Tensor, Tensor]]:
        return [kv.save(own, slot, n_past) for own in self.kvs]

    def check(self, state: list[tuple[Tensor, Tensor]]) -> None:
        check_cells(self.kvs, state, self.name)

    def restore(self, slot: int, state: list[tuple[Tensor, Tensor]]) -> None:
        for own, saved in zip(self.kvs, state):
            kv.restore(own, slot, saved)

    def checkpoint(self, slot: int, n_past: int) -> list[tuple[Tensor, Tensor] | None]:
        """Only the rings: cells of full layers stay where they are when the slot goes back to n_past."""
        return [kv.save(own, slot, n_past) if own.ring else None for own in self.kvs]

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

    def choose(self, hidden: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.backbone.logits(hidden[:, 1:])
        return argmax(logits), first_share(logits, self.options.p_min)


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
