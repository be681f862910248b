"""qwen35: three gated DeltaNet layers, then a gated attention layer, repeated; optionally an MTP block at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache, KVLayer, RecurrentLayer
from ..errors import ConfigError, FileError, UnsupportedError
from ..kernels import gdn
from ..kernels.attention import AttentionSpec, attend_prepared
from ..kernels.gdn import GdnSpec, GdnWeights
from ..kernels.kv import KV, norm_rope_store, store_raw
from ..kernels.matmul import Activation, PackedWeight, WeightGroup, matmul
from ..kernels.norm import rms_norm
from ..kernels.prepared import gated_norm, rms_norm_pair
from ..kernels.rope import RopeSpec
from ..parallel import WHOLE, Cut, Shard, unit_granularity
from ..placement import Placement
from ..unjoined import Joinable
from ..weights import Part, Weights
from .assemble import CacheLayer, assemble, kv_layer
from .base import Head, Model, Norm, Opened, Opening, Step
from .config import Config, Keys
from .layers import Addition, FeedForward, close, heads_cut
from .whole import check_block_used


def gdn_spec(keys: Keys, eps: float) -> GdnSpec:
    """The `ssm.*` keys; ConfigError when they contradict one another."""
    d, inner = keys.integer("ssm.state_size"), keys.integer("ssm.inner_size")
    n_v, n_k = keys.integer("ssm.time_step_rank"), keys.integer("ssm.group_count")
    if n_v * d != inner or n_k < 1 or n_v % max(n_k, 1) != 0:
        raise ConfigError(
            f"{keys.file.path}: qwen35.ssm.inner_size is {inner}, but time_step_rank {n_v} times state_size {d} is "
            f"{n_v * d} and group_count is {n_k}; expected inner_size = rank x size and rank a multiple of groups"
        )
    return GdnSpec(n_k=n_k, n_v=n_v, d=d, conv_kernel=keys.integer("ssm.conv_kernel"), eps=eps)


def recurrent_layers(keys: Keys, config: Config) -> tuple[bool, ...]:
    """Which blocks are gated DeltaNet; MTP blocks never are."""
    n = config.block_count
    name = "attention.recurrent_layers"
    if keys.has(name):
        flags = tuple(bool(f) for f in keys.array(name, bool))
        if len(flags) < config.n_layers:
            raise FileError(f"{keys.file.path}: key qwen35.{name} has {len(flags)} entries; expected {n}, one a block")
        return (*flags[: config.n_layers], *(False,) * config.nextn_predict_layers)
    interval = keys.integer("full_attention_interval", 4)
    if interval < 1:
        raise FileError(f"{keys.file.path}: key qwen35.full_attention_interval is {interval}; expected 1 or more")
    return tuple(i < config.n_layers and (i + 1) % interval != 0 for i in range(n))


def key_heads_cut(weights: Weights, name: str, spec: GdnSpec, shard: Shard) -> Cut:
    """How a gated DeltaNet layer's key heads are cut: their value heads must fill whole blocks of columns."""
    return Cut.of(shard, spec.n_k, unit_granularity(spec.d, weights.block_size(f"{name}.ssm_out.weight")))


def local_spec(spec: GdnSpec, cut: Cut) -> GdnSpec:
    return replace(spec, n_k=cut.n, n_v=cut.n * (spec.n_v // spec.n_k))


@dataclass
class GatedAttention:
    """Attention whose output is gated: q rows hold, per head, the query and then the gate."""

    inputs: WeightGroup  # q with gate [H * 2 * hd, D], k, v [KV * hd, D]
    output: Addition
    q_norm: Tensor
    k_norm: Tensor
    rope: RopeSpec
    spec: AttentionSpec
    n_head: int  # held here
    n_kv: int
    hd: int
    eps: float

    @classmethod
    def load(cls, weights: Weights, name: str, config: Config, layer: int, device: torch.device,
             shard: Shard) -> GatedAttention:
        D, hd = config.embedding_length, config.key_length
        if config.value_length != hd:
            raise FileError(
                f"{weights.file.path}: qwen35.attention.value_length is {config.value_length}, "
                f"key_length is {hd}; expected the same"
            )
        H, KV_ = config.head_count[layer], config.head_count_kv[layer]
        cut = heads_cut(weights, name, config, layer, shard)
        group = H // KV_  # query heads of a key head
        return cls(
            weights.group(
                device,
                Part.of(f"{name}.attn_q.weight", (2 * H * hd, D), [cut.scaled(2 * group * hd)]),
                Part.of(f"{name}.attn_k.weight", (KV_ * hd, D), [cut.scaled(hd)]),
                Part.of(f"{name}.attn_v.weight", (KV_ * hd, D), [cut.scaled(hd)]),
            ),
            Addition(
                weights.group(
                    device, Part.of(f"{name}.attn_output.weight", (D, H * hd), columns=[cut.scaled(group * hd)])
                ),
                WHOLE if cut.mirrored else shard,
            ),
            weights.vector(f"{name}.attn_q_norm.weight", (hd,), device),
            weights.vector(f"{name}.attn_k_norm.weight", (hd,), device),
            config.rope, AttentionSpec(scale=hd**-0.5, causal=True),
            cut.n * group, cut.n, hd, config.layer_norm_rms_epsilon,
        )

    def __call__(self, products: Sequence[Tensor], step: Step, kv: KV) -> Activation:
        """The inputs' products of B*W rows to what `output` multiplies."""
        rows = step.rows
        B, W = rows.n_batch, rows.width
        q_gate, k, v = products
        q, gate = q_gate.view(B, W, self.n_head, 2, self.hd).unbind(3)
        k, v = (t.view(B, W, self.n_kv, self.hd) for t in (k, v))
        norms, rope = (self.q_norm, self.k_norm, self.eps), (*step.rope(self.rope), self.rope)
        q = norm_rope_store(kv, q, k, v, rows.slots, step.store_positions, norms, rope)
        return attend_prepared(q, kv, rows.slots, rows.n_past, rows.n_rows, self.spec, gate=gate, q_rotated=True)


@dataclass
class GatedDeltaNet:
    """Linear attention with a gated delta rule; see kernels.gdn for the recurrence."""

    inputs: WeightGroup  # qkv [conv_dim, D], z [n_v * d, D], alpha [n_v, D], beta [n_v, D]
    output: Addition  # [D, n_v * d]
    core: GdnWeights
    norm: Tensor  # [d]
    spec: GdnSpec  # of the heads held here

    @classmethod
    def load(cls, weights: Weights, name: str, D: int, spec: GdnSpec, device: torch.device,
             shard: Shard) -> GatedDeltaNet:
        conv, value = spec.conv_dim, spec.n_v * spec.d
        cut = key_heads_cut(weights, name, spec, shard)
        # Value head v * n_k + k goes with key head k: every n_k-th stretch of them, in the file's order.
        heads = [cut.scaled(1, v * spec.n_k) for v in range(spec.n_v // spec.n_k)]
        values = [(start * spec.d, stop * spec.d) for start, stop in heads]
        after = 2 * spec.key_dim
        mixed = [cut.scaled(spec.d), cut.scaled(spec.d, spec.key_dim), *((after + a, after + b) for a, b in values)]
        return cls(
            weights.group(
                device,
                Part.of(f"{name}.attn_qkv.weight", (conv, D), mixed),
                Part.of(f"{name}.attn_gate.weight", (value, D), values),
                Part.of(f"{name}.ssm_alpha.weight", (spec.n_v, D), heads),
                Part.of(f"{name}.ssm_beta.weight", (spec.n_v, D), heads),
            ),
            Addition(
                weights.group(device, Part.of(f"{name}.ssm_out.weight", (D, value), columns=values)),
                WHOLE if cut.mirrored else shard,
            ),
            GdnWeights(
                conv=weights.vector(f"{name}.ssm_conv1d.weight", (conv, spec.conv_kernel), device, mixed),
                dt=weights.vector(f"{name}.ssm_dt.bias", (spec.n_v,), device, heads),
                a=weights.vector(f"{name}.ssm_a", (spec.n_v,), device, heads),
            ),
            weights.vector(f"{name}.ssm_norm.weight", (spec.d,), device),
            local_spec(spec, cut),
        )

    def __call__(self, products: Sequence[Tensor], step: Step, state: gdn.GdnState) -> Activation:
        """The inputs' products of B*W rows to what `output` multiplies."""
        rows = step.rows
        B, W = rows.n_batch, rows.width
        u, z, alpha, beta = (t.view(B, W, -1) for t in products)
        if rows.tentative:
            norm = self.norm, self.spec.eps
            return gdn.step_prepared(u, z, alpha, beta, self.core, *norm, state, rows.slots, rows.n_rows, self.spec)
        o = gdn.chunk(u, alpha, beta, self.core, state, rows.slots, rows.n_rows, self.spec)
        z = z.reshape(B, W, self.spec.n_v, self.spec.d)
        return gated_norm(o, z, self.norm, self.spec.eps)


@dataclass
class Qwen35Block:
    """One trunk block of either kind."""

    index: int
    device: torch.device
    attn_norm: Norm
    mixer: GatedAttention | GatedDeltaNet
    post_attention_norm: Norm  # the norm before the FFN
    ffn: FeedForward

    @property
    def opening(self) -> Opening:
        return Opening(self.attn_norm, self.mixer.inputs)

    @property
    def additions(self) -> tuple[Addition, Addition]:
        return self.mixer.output, self.ffn.down

    def __call__(self, x: Tensor, opened: Opened | None, step: Step, cache: Cache, after: Opening | None
                 ) -> tuple[Tensor, Opened | None]:
        memory = (cache.kv if isinstance(self.mixer, GatedAttention) else cache.recurrent)[self.index]
        assert memory is not None
        return self.run(x, opened, step, memory, after)

    def run(self, x: Tensor, opened: Opened | None, step: Step, memory: Any, after: Opening | None
            ) -> tuple[Tensor, Opened | None]:
        """The block over one layer's memory: a KV, or a gated DeltaNet's state."""
        opened = opened or Opened.of(x, self.opening)
        a = self.mixer(opened.products, step, memory)
        return close(x, a, self.mixer.output, self.post_attention_norm, self.ffn, opened.n, after)


def load_block(weights: Weights, config: Config, i: int, device: torch.device, recurrent: GdnSpec | None,
               shard: Shard) -> Qwen35Block:
    """Block i; `recurrent` is the spec of a gated DeltaNet block, None for an attention block."""
    D, eps, name = config.embedding_length, config.layer_norm_rms_epsilon, f"blk.{i}"
    mixer: GatedAttention | GatedDeltaNet
    if recurrent is not None:
        mixer = GatedDeltaNet.load(weights, name, D, recurrent, device, shard)
    else:
        mixer = GatedAttention.load(weights, name, config, i, device, shard)
    return Qwen35Block(
        i, device,
        Norm(weights.vector(f"{name}.attn_norm.weight", (D,), device), eps),
        mixer,
        Norm(weights.vector(f"{name}.post_attention_norm.weight", (D,), device), eps),
        FeedForward.load(weights, name, D, config.feed_forward_length[i], device, shard),
    )


def load(weights: Weights, config: Config, placement: Placement, shard: Shard) -> Model:
    keys = Keys(weights.file)
    path = weights.file.path
    if not weights.has("blk.0.attn_norm.weight") and config.nextn_predict_layers > 0:
        raise ConfigError(f"{path}: holds only an MTP block (no blk.0.attn_norm.weight); give it with --model-draft")
    if config.nextn_predict_layers > 1:
        n = config.nextn_predict_layers
        raise UnsupportedError(f"{path}: qwen35.nextn_predict_layers is {n}; one is supported")
    check_sections(keys, config)
    spec = gdn_spec(keys, config.layer_norm_rms_epsilon)
    recurrent = recurrent_layers(keys, config)

    def cache_layer(i: int) -> CacheLayer:
        device = placement.layers[i]
        if not recurrent[i]:
            return kv_layer(weights, config, i, device, shard)
        return RecurrentLayer(local_spec(spec, key_heads_cut(weights, f"blk.{i}", spec, shard)), device)

    return assemble(
        weights, config, placement,
        lambda i, device: load_block(weights, config, i, device, spec if recurrent[i] else None, shard),
        [cache_layer(i) for i in range(config.n_layers)],
        shard,
    )


def check_sections(keys: Keys, config: Config) -> None:
    sections = config.rope.sections
    if sections is None or len(sections) != 4:
        raise FileError(
            f"{keys.file.path}: key qwen35.rope.dimension_sections is {list(sections or ())}; expected 4 integers"
        )


@dataclass
class MtpBlock:
    """The multi-token-prediction block: from (token, hidden row before it) to the next hidden row and its logits."""

    block: Qwen35Block  # attention block; its `index` is its place in the MTP cache, 0
    eh_proj: WeightGroup  # [D, 2 D]
    keys_values: WeightGroup  # the attention's k and v alone
    enorm: Tensor
    hnorm: Tensor
    head_norm: Norm
    embedding: PackedWeight  # [V, D]
    head: Head
    cache_layer: KVLayer
    n_vocab: int
    eps: float

    @property
    def device(self) -> torch.device:
        return self.block.device

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded, hidden [B, W, D] (the token's row, the hidden row of the position before) to the block's stream."""
        (x,) = matmul(rms_norm_pair(embedded, hidden, self.enorm, self.hnorm, self.eps), self.eh_proj)
        return x.view(embedded.shape)

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step, kv: KV) -> tuple[Tensor, Joinable]:
        """As `join`, to the stream [B, W, D] after the block and its logits [B, W, V], wherever the head lies."""
        after = Opening(self.head_norm, self.head.group) if self.head.device == self.device else None
        x, opened = self.block.run(self.join(embedded, hidden), None, step, kv, after)
        if opened is None:
            return x, self.head.elsewhere(self.hidden(x))
        return x, self.head.logits(opened.products[0], x.shape[:-1])

    def remember(self, embedded: Tensor, hidden: Tensor, step: Step, kv: KV) -> None:
        """What `forward` leaves in the cache, and nothing else of it."""
        mixer, rows = self.block.mixer, step.rows
        assert isinstance(mixer, GatedAttention)
        opened = Opened.of(self.join(embedded, hidden), Opening(self.block.attn_norm, self.keys_values))
        k, v = (t.view(rows.n_batch, rows.width, mixer.n_kv, mixer.hd) for t in opened.products)
        rope = (*step.rope(mixer.rope), mixer.rope)
        store_raw(kv, k, v, rows.slots, step.store_positions, (mixer.k_norm, mixer.eps), rope)

    def hidden(self, x: Tensor) -> Tensor:
        """A stream [B, W, D] of `forward` to the hidden rows that the next tokens are joined with."""
        return rms_norm(x, self.head_norm.weight, self.head_norm.eps)


def load_mtp(weights: Weights, config: Config, device: torch.device, *, target: Model | None) -> MtpBlock:
    """The MTP block of a file. With `target`, embedding, head and norm that the block lacks are the target's;
    without, they come from this file (a standalone MTP file)."""
    path, D, V = weights.file.path, config.embedding_length, config.n_vocab
    if config.nextn_predict_layers != 1:
        raise ConfigError(
            f"{path}: qwen35.nextn_predict_layers is {config.nextn_predict_layers}; draft-mtp needs a file with 1"
        )
    i = config.n_layers
    name = f"blk.{i}"
    needed = [f"{name}.nextn.{t}.weight" for t in ("eh_proj", "enorm", "hnorm")]
    needed += [f"{name}.{t}.weight" for t in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")]
    missing = next((t for t in needed if not weights.has(t)), None)
    if missing is not None:
        raise ConfigError(f"{path}: metadata promises an MTP block, but tensor {missing} is missing")

    own_embedding, own_head = f"{name}.nextn.embed_tokens.weight", f"{name}.nextn.shared_head_head.weight"
    if weights.has(own_embedding):
        embedding = weights.matrix(own_embedding, (V, D), device)
    elif target is not None:
        embedding = target.embedding
    else:
        embedding = weights.matrix("token_embd.weight", (V, D), device)
    if weights.has(own_head):
        head = Head(weights.group(device, (own_head, (V, D))))
    elif target is not None:
        head = target.head
    else:
        tied = "output.weight" if weights.has("output.weight") else "token_embd.weight"
        head = Head(weights.group(device, (tied, (V, D))))
    norm = weights.optional_vector(f"{name}.nextn.shared_head_norm.weight", (D,), device)
    if norm is None:
        norm = (target.output_norm.to(device) if target is not None
                else weights.vector("output_norm.weight", (D,), device))
    block = load_block(weights, config, i, device, None, WHOLE)
    block.index = 0
    assert isinstance(block.mixer, GatedAttention)
    made = MtpBlock(
        block,
        weights.group(device, (f"{name}.nextn.eh_proj.weight", (D, 2 * D))),
        weights.subgroup(f"{name}.attn_k.weight", block.mixer.inputs, 1),
        weights.vector(f"{name}.nextn.enorm.weight", (D,), device),
        weights.vector(f"{name}.nextn.hnorm.weight", (D,), device),
        Norm(norm, config.layer_norm_rms_epsilon),
        embedding,
        head,
        kv_layer(weights, config, i, device, WHOLE),
        V,
        config.layer_norm_rms_epsilon,
    )
    check_block_used(weights, i)
    return made
