"""The network that DFlash, DSpark and DFlash2 share: injection of the target's features, and one pass over a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.attention import AttentionSpec, attend_prepared
from ..kernels.conv import add_conv_norm, dynamic_conv, prepared_conv
from ..kernels.fused import enter, gated
from ..kernels.kv import KV, norm_rope_store, store_raw
from ..kernels.matmul import Activation, PackedWeight, WeightGroup, fuse, matmul, prepare
from ..kernels.norm import rms_norm
from ..kernels.prepared import add_rms_norm_kept
from ..models.base import Head, Norm, Opening, Step
from ..models.layers import Addition, FeedForward, close
from ..rows import Rows
from ..unjoined import Joinable, each, whole
from ..weights import Part, Weights
from .borrowed import look_up
from .dflash_config import DFlashConfig
from .scores import head_opening

if TYPE_CHECKING:
    from ..models import Model


@dataclass
class Conv:
    """DFlash2: a sub-layer's convolution along the block, on its input (side 0) and its output (side 1)."""

    base: Tensor  # [2, K, D]
    projection: WeightGroup  # [2 * K * G, D]: the part that depends on the normed input, G groups of channels

    def kernels(self, n: Activation, shape: tuple[int, int]) -> Tensor:
        """The sub-layer's normed input, B*T prepared rows, to [B, T, 2, K, G]: used for both sides."""
        (dyn,) = matmul(n, self.projection)
        return dyn.view(*shape, 2, self.base.shape[1], -1)


@dataclass
class Layer:
    """One block of the backbone. Optional parts are None where the file has none."""

    attn_norm: Norm
    qkv: WeightGroup  # q, k and, where the file has it, v
    q_norm: Tensor
    k_norm: Tensor
    output: Addition
    ffn_norm: Norm
    ffn: FeedForward
    output_scale: Tensor | None
    attn_conv: Conv | None
    ffn_conv: Conv | None
    attention: AttentionSpec

    @property
    def opening(self) -> Opening:
        return Opening(self.attn_norm, self.qkv)


@dataclass
class Stream:
    """The residual stream x [B, T, D] and the next norm of it: prepared, and as it is where a convolution needs it.

    products: the norm times the first weights that follow, where a layer's last launch has made them.
    """

    x: Tensor
    n: Activation | None
    normed: Tensor | None
    products: Sequence[Tensor] | None = None


@dataclass
class Block:
    """A block's result."""

    x: Tensor  # [B, T, D], the stream after the last layer
    n: Activation | None  # the final norm's B*T prepared rows, made for a head that lies here
    logits: Tensor | None  # of that head [B*T, Vd], where the last layer's launch has made them


@dataclass
class Backbone:
    """Weights of a `dflash` file on one device, with the embedding and head borrowed where it has none."""

    config: DFlashConfig
    device: torch.device
    fc: WeightGroup  # [D, m * D]
    hidden_norm: Norm  # after fc
    injection: WeightGroup  # k and v of every layer: they share the fused features as input
    layers: Sequence[Layer]
    output_norm: Norm
    embedding: PackedWeight  # [V, D]
    head: Head  # of Vd rows
    d2t: Tensor | None  # [Vd] int64: target ids of a reduced draft vocabulary

    def keys_values(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Projections [B*W, KV*hd] of one layer to raw K and V [B, W, KV, hd]; no V: normed raw K."""
        common = self.config.common
        k = parts[0].view(*shape, -1, common.key_length)
        if len(parts) > 1:
            return k, parts[1].view(*shape, -1, common.value_length)
        return k, rms_norm(k, torch.ones(k.shape[-1], device=k.device), common.layer_norm_rms_epsilon)

    def inject(self, features: Tensor, rows: Rows, kvs: Sequence[KV]) -> None:
        """features [B, W, m*D] of all rows into every layer's cache."""
        eps, rope = self.config.common.layer_norm_rms_epsilon, self.config.rope
        step = Step.of(rows)
        (fused,) = matmul(prepare(features.reshape(-1, features.shape[-1])), self.fc)
        parts = matmul(enter(fused, self.hidden_norm.weight, self.hidden_norm.eps), self.injection)
        per_layer = len(parts) // len(self.layers)
        turn = (*step.rope(rope), rope)
        for i, (layer, own) in enumerate(zip(self.layers, kvs)):
            k, v = self.keys_values(parts[i * per_layer : (i + 1) * per_layer], (rows.n_batch, rows.width))
            positions = storable(own, rows, step.store_positions)
            store_raw(own, k, v, rows.slots, positions, (layer.k_norm, eps), turn)

    def block(self, rows: Rows, kvs: Sequence[KV]) -> Block:
        """The noise block's tokens [B, T] through all layers."""
        scale = self.config.embedding_scale
        step = Step.of(rows)
        x = look_up(self.embedding, rows.tokens, self.device)
        x = x if scale == 1.0 else x * scale
        stream = self.begin(x, self.layers[0].attn_norm, self.layers[0].attn_conv)
        head = head_opening(self.head, self.output_norm, self.device)
        for i, (layer, own) in enumerate(zip(self.layers, kvs)):
            following = self.layers[i + 1] if i + 1 < len(self.layers) else None
            norm = self.output_norm if following is None else following.attn_norm
            next_conv = None if following is None else following.attn_conv
            before = stream.n
            a, n, dyn = self._attention(stream, layer, own, step)
            if layer.attn_conv is None and layer.ffn_conv is None and self.config.value_scale == 1.0:
                assert before is not None
                after = head if following is None else following.opening
                after = after if layer.output_scale is None else None
                x, opened = close(stream.x, a, layer.output, layer.ffn_norm, layer.ffn, before, after)
                stream = Stream(x, None, None) if opened is None else Stream(x, opened.n, None, opened.products)
            else:
                stream = self.finish(
                    stream, a, n, layer.output, self.config.value_scale, layer.attn_conv, dyn, layer.ffn_norm,
                    layer.ffn_conv,
                )  # fmt: skip
                n, dyn = self.mixed(stream, layer.ffn_conv)
                a = gated(n, layer.ffn.gate_up, layer.ffn.gelu)
                stream = self.finish(stream, a, n, layer.ffn.down, 1.0, layer.ffn_conv, dyn, norm, next_conv)
            if layer.output_scale is not None:
                stream = self.begin(stream.x * layer.output_scale, norm, next_conv)
        return Block(stream.x, stream.n, None if stream.products is None else stream.products[0])

    def begin(self, x: Tensor, norm: Norm, conv: Conv | None) -> Stream:
        """A stream whose norm no product has made; conv: of the sub-layer to come."""
        if conv is None:
            return Stream(x, enter(x.view(-1, x.shape[-1]), norm.weight, norm.eps), None)
        _, normed, n = add_rms_norm_kept(x, None, norm.weight, norm.eps)
        return Stream(x, n, normed)

    def _attention(
        self, stream: Stream, layer: Layer, own: KV, step: Step
    ) -> tuple[Activation, Activation, Tensor | None]:
        """What the output matrix multiplies, what the projections did, and the kernels of the convolution."""
        config, rows = self.config, step.rows
        eps, shape = config.common.layer_norm_rms_epsilon, (rows.n_batch, rows.width)
        n, dyn = self.mixed(stream, layer.attn_conv)
        q, *rest = matmul(n, layer.qkv) if stream.products is None else stream.products
        k, v = self.keys_values(rest, shape)
        q = q.view(*shape, -1, config.common.key_length)
        norms, turn = (layer.q_norm, layer.k_norm, eps), (*step.rope(config.rope), config.rope)
        q = norm_rope_store(own, q, k, v, rows.slots, step.store_positions, norms, turn)
        a = attend_prepared(q, own, rows.slots, rows.n_past, rows.n_rows, layer.attention, q_rotated=True)
        return a, n, dyn

    def mixed(self, stream: Stream, conv: Conv | None) -> tuple[Activation, Tensor | None]:
        """What a sub-layer's first product takes, and the kernels of its convolution."""
        assert stream.n is not None
        if conv is None:
            return stream.n, None
        assert stream.normed is not None
        dyn = conv.kernels(stream.n, (stream.x.shape[0], stream.x.shape[1]))
        return prepared_conv(stream.normed, dyn, conv.base, 0), dyn

    def finish(
        self, stream: Stream, a: Activation, before: Activation, last: Addition, scale: float, conv: Conv | None,
        dyn: Tensor | None, after: Norm, next_conv: Conv | None,
    ) -> Stream:  # fmt: skip
        """The stream plus a sub-layer: a times its last matrix, scaled, convolved, normed; and the norm after it.

        before: what the sub-layer's first product took; next_conv: the convolution of the sub-layer to come.
        """
        x = stream.x
        if conv is None and next_conv is None and scale == 1.0:
            x, n = last(x, a, before, after)
            assert n is not None
            return Stream(x, n, None)
        (y,) = matmul(a, last.weight)
        y = y.view(x.shape)
        if scale != 1.0:
            y = y * scale
        if conv is not None:
            assert dyn is not None
            if last.post_norm is None:
                x, normed, n = add_conv_norm(x, y, dyn, conv.base, 1, after.weight, after.eps)
                return Stream(x, n, normed)
            y = dynamic_conv(y, dyn, conv.base, 1)
        if last.post_norm is not None:
            y = rms_norm(y, last.post_norm.weight, last.post_norm.eps)
        x, normed, n = add_rms_norm_kept(x, y, after.weight, after.eps)
        return Stream(x, n, normed)

    def logits(self, block: Block, first: int) -> Joinable:
        """[B, T - first, V], the block's rows from `first` on; -inf where a reduced vocabulary has no token."""
        product = block.logits
        if product is None and block.n is not None and head_opening(self.head, self.output_norm, self.device):
            (product,) = matmul(block.n, self.head.group)
        if product is None:
            logits = self.head.elsewhere(self.hidden(block))
        else:
            logits = self.head.logits(product, block.x.shape[:-1])
        logits = each(logits, lambda part: part[:, first:])
        if self.d2t is None:
            return logits
        out = whole(logits)
        wide = out.new_full((*out.shape[:-1], self.config.common.n_vocab), -torch.inf)
        wide[..., self.d2t] = out
        return wide

    def hidden(self, block: Block) -> Tensor:
        """[B, T, D] after the final norm."""
        return rms_norm(block.x, self.output_norm.weight, self.output_norm.eps)


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

    def norm(name: str) -> Norm:
        return Norm(vector(name, D), common.layer_norm_rms_epsilon)

    def addition(name: str, columns: int, post_norm: str) -> Addition:
        group = weights.group(device, (name, (D, columns)))
        return Addition(group, post_norm=norm(post_norm) if weights.has(post_norm) else None)

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
                attn_norm=norm(f"{b}.attn_norm.weight"),
                qkv=weights.group(device, *projections),
                q_norm=vector(f"{b}.attn_q_norm.weight", hd),
                k_norm=vector(f"{b}.attn_k_norm.weight", hd),
                output=addition(f"{b}.attn_output.weight", H[i] * hd_v, f"{b}.post_attention_norm.weight"),
                ffn_norm=norm(f"{b}.ffn_norm.weight"),
                ffn=FeedForward(
                    weights.pair(
                        device, Part.of(f"{b}.ffn_gate.weight", (F, D)), Part.of(f"{b}.ffn_up.weight", (F, D))
                    ),
                    addition(f"{b}.ffn_down.weight", F, f"{b}.post_ffw_norm.weight"),
                    config.activation != "silu",
                ),
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
        hidden_norm=norm("enc.output_norm.weight"),
        injection=fuse(injection),
        layers=layers,
        output_norm=norm("output_norm.weight"),
        embedding=embedding,
        head=head,
        d2t=d2t,
    )
