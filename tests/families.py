"""Makers of small random model files, one function an architecture, that llama.cpp loads as well.

    make_qwen35(tmp_path / "m.gguf", seed=1, n_layers=4, type="Q4_K")
    make_dflash(tmp_path / "d.gguf", kind="dspark", taps=(1, 3))

`type` is the type of every matrix (norms, biases and convolutions stay F32); rows that its blocks don't
divide become F16. `keys` adds or replaces keys, `{"qwen3.rope.scaling.factor": ("f32", 4.0)}`; the value None
drops one. `fill(name, shape)` gives the float32 weights; the default draws them from `seed` in a range where
the model is the model is neither flat nor chaotic, so that greedy continuations have clear winners.

Random drafters are practically never right. `follow` > 0 in `make_qwen35` and `make_dflash(kind="dspark")` makes
target, MTP block and Markov head lean towards the same fixed successor of each token, so that drafts are accepted
now and then: around 0.1 the accepted lengths vary most.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libgguf
import numpy as np
from small_vocabulary import byte_bpe, fragments, sentence_pieces

from ggufspec.gguf_write import Entry, Key, write_gguf
from ggufspec.quant.layouts import BY_NAME, F16, F32, I64, Layout

Fill = Callable[[str, tuple[int, ...]], np.ndarray]
Keys = dict[str, tuple[str, Any] | None]


@dataclass
class Draft:
    """A file in the making: keys under the architecture's name and tensors in order."""

    architecture: str
    fill: Fill
    layout: Layout
    keys: dict[str, Key] = field(default_factory=dict)
    tensors: list[tuple[Entry, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.put("general.architecture", "str", self.architecture)
        self.put("general.name", "str", f"random {self.architecture}")

    def put(self, name: str, type: str, value: Any) -> None:
        self.keys[name] = Key(name, type, value)

    def u32(self, **values: int) -> None:
        for name, value in values.items():
            self.put(f"{self.architecture}.{name.replace('__', '.')}", "u32", value)

    def f32(self, **values: float) -> None:
        for name, value in values.items():
            self.put(f"{self.architecture}.{name.replace('__', '.')}", "f32", value)

    def add(self, name: str, *shape: int, quiet_rows: Sequence[int] = ()) -> None:
        """A tensor in its own type: matrices quantized, everything else F32. `quiet_rows` are made small."""
        data = self.fill(name, shape).astype(np.float32).reshape(shape)
        data[list(quiet_rows)] *= 0.01
        is_matrix = len(shape) == 2 and shape[0] > 1 and name.endswith(".weight") and "ssm_conv1d" not in name
        layout = self.layout if is_matrix else F32
        if shape[-1] % layout.n_elements:
            layout = F16
        raw = data if layout is F32 else libgguf.quantize_rows(data, layout.id)
        self.tensors.append((Entry(name, shape, layout), raw))

    def write(self, path: Path | str, keys: Keys | None) -> Path:
        for name, value in (keys or {}).items():
            if value is None:
                self.keys.pop(name, None)
            else:
                self.put(name, *value)
        entries = [entry for entry, _ in self.tensors]
        write_gguf(path, list(self.keys.values()), entries, (raw for _, raw in self.tensors))
        return Path(path)


def random_fill(seed: int, tied: bool = False) -> Fill:
    """Weights drawn from (seed, tensor name), so that a file does not change when tensors are added to it.

    A tied embedding is kept small: a token would otherwise predict itself for ever.
    """

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * normal
        if name.endswith("ssm_a"):
            return -np.exp(0.5 * normal)
        if name.endswith(("ssm_conv1d.weight", "_conv_base", ".bias", "attn_sinks.weight")):
            return 0.4 * normal
        if name == "token_embd.weight" and tied:
            return 1.5 * normal / np.sqrt(shape[-1])
        if name in ("token_embd.weight", "markov_w1.weight"):
            return normal
        if name.startswith("selector_"):
            return normal / shape[-1] ** 0.25
        gain = 3.0 if name in ("output.weight", "markov_w2.weight") else 1.2
        return gain * normal / np.sqrt(shape[-1])

    return fill


def formula_fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights by a fixed formula of (name, index): the models with published numbers (`fixtures.py`)."""
    k = np.arange(int(np.prod(shape)), dtype=np.uint64)
    a = (zlib.crc32(name.encode()) + k * 0x9E3779B9) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        a = ((a ^ (a >> np.uint64(shift))) * factor) & 0xFFFFFFFF
    u = (a.astype(np.float64) / 2**31 - 1).reshape(shape)
    if name.endswith("norm.weight"):
        return 1 + 0.25 * u
    if name.endswith(".bias"):
        return u
    if name.endswith(("ssm_conv1d.weight", "_conv_base")):
        return 0.8 * u
    if name.endswith("ssm_a"):
        return np.full(shape, -1.0)
    if name in (
        "token_embd.weight", "markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight",
    ):  # fmt: skip
        return 1.5 * u
    return 5 * u / np.sqrt(shape[-1])


@dataclass(frozen=True)
class Sizes:
    """What all architectures share."""

    n_layers: int = 4
    n_embd: int = 256
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_vocab: int = 320
    n_ctx: int = 2048
    rope_base: float = 10000.0
    tied: bool = False


def _successors(n_vocab: int) -> np.ndarray:
    """A fixed cycle through the printable ASCII byte tokens; every other token is followed by one of them."""
    letters = np.random.default_rng(0).permutation(np.arange(33, 127))
    successors = letters[np.arange(n_vocab) % len(letters)]
    successors[letters] = np.roll(letters, -1)
    return successors


def _leaning(fill: Fill, follow: float) -> Fill:
    """`fill` with heads that lean towards the successor of the token that was read last."""

    def leaning(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = fill(name, shape)
        codes = {"output.weight": "token_embd.weight", "markov_w2.weight": "markov_w1.weight"}
        if name in codes:
            strength = follow if name == "output.weight" else 4 * follow
            np.add.at(values, _successors(shape[0]), strength * fill(codes[name], shape))
        if name.endswith("nextn.eh_proj.weight"):
            values += np.eye(*shape)
        return values

    return leaning


def _start(
    architecture: str,
    sizes: Sizes,
    seed: int,
    type: str,
    fill: Fill | None,
    vocabulary: list[Key],
    n_blocks: int,
) -> Draft:
    draft = Draft(architecture, fill or random_fill(seed, sizes.tied), BY_NAME[type])
    draft.u32(
        block_count=n_blocks, context_length=sizes.n_ctx, embedding_length=sizes.n_embd,
        feed_forward_length=sizes.n_ff, attention__head_count=sizes.n_head,
        attention__head_count_kv=sizes.n_head_kv, attention__key_length=sizes.head_dim,
        attention__value_length=sizes.head_dim,
    )  # fmt: skip
    draft.f32(attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=sizes.rope_base)
    for key in vocabulary:
        draft.put(key.name, key.type, key.value)
    return draft


def _ends(draft: Draft, sizes: Sizes) -> None:
    """Embedding and head. Tokens that are a part of a character are never predicted: llama.cpp reports the
    probabilities of whole characters only.
    """
    quiet = fragments(draft.keys["tokenizer.ggml.tokens"].value)
    draft.add("token_embd.weight", sizes.n_vocab, sizes.n_embd, quiet_rows=quiet if sizes.tied else ())
    draft.add("output_norm.weight", sizes.n_embd)
    if not sizes.tied:
        draft.add("output.weight", sizes.n_vocab, sizes.n_embd, quiet_rows=quiet)


def _attention(draft: Draft, b: str, s: Sizes, *, qk_norm: bool, gated: bool = False, bias: bool = False) -> None:
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    draft.add(b + "attn_q.weight", q * (2 if gated else 1), s.n_embd)
    draft.add(b + "attn_k.weight", kv, s.n_embd)
    draft.add(b + "attn_v.weight", kv, s.n_embd)
    draft.add(b + "attn_output.weight", s.n_embd, q)
    if bias:
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            draft.add(f"{b}attn_{name}.bias", n)
    if qk_norm:
        draft.add(b + "attn_q_norm.weight", s.head_dim)
        draft.add(b + "attn_k_norm.weight", s.head_dim)


def _ffn(draft: Draft, b: str, s: Sizes) -> None:
    draft.add(b + "ffn_gate.weight", s.n_ff, s.n_embd)
    draft.add(b + "ffn_up.weight", s.n_ff, s.n_embd)
    draft.add(b + "ffn_down.weight", s.n_embd, s.n_ff)


def _plain_blocks(draft: Draft, s: Sizes, *, qk_norm: bool, bias: bool = False) -> None:
    """Attention and feed-forward, each behind its norm."""
    for i in range(s.n_layers):
        b = f"blk.{i}."
        draft.add(b + "attn_norm.weight", s.n_embd)
        _attention(draft, b, s, qk_norm=qk_norm, bias=bias)
        draft.add(b + "ffn_norm.weight", s.n_embd)
        _ffn(draft, b, s)


def make_qwen3(
    path: Path | str, *, seed: int = 0, type: str = "F16", fill: Fill | None = None,
    vocabulary: list[Key] | None = None, keys: Keys | None = None, **sizes: Any,
) -> Path:  # fmt: skip
    s = Sizes(**sizes)
    draft = _start("qwen3", s, seed, type, fill, vocabulary or byte_bpe(s.n_vocab, "qwen2"), s.n_layers)
    _ends(draft, s)
    _plain_blocks(draft, s, qk_norm=True)
    return draft.write(path, keys)


def make_qwen2(
    path: Path | str,
    *,
    seed: int = 0,
    type: str = "F16",
    bias: bool = True,
    keys: Keys | None = None,
    **sizes: Any,
) -> Path:
    """Heads times head size equal the width here; q, k and v have biases."""
    s = Sizes(**sizes)
    draft = _start("qwen2", s, seed, type, None, byte_bpe(s.n_vocab, "qwen2"), s.n_layers)
    _ends(draft, s)
    _plain_blocks(draft, s, qk_norm=False, bias=bias)
    return draft.write(path, keys)


def make_llama(
    path: Path | str, *, seed: int = 0, type: str = "F16", rope_factors: bool = True, tied: bool = True,
    pre: str = "llama-bpe", keys: Keys | None = None, **sizes: Any,
) -> Path:  # fmt: skip
    """With a tied head and Llama 3's frequency divisors (factor 8) unless told otherwise."""
    s = Sizes(tied=tied, **sizes)
    draft = _start("llama", s, seed, type, None, byte_bpe(s.n_vocab, pre), s.n_layers)
    draft.u32(rope__dimension_count=s.head_dim, vocab_size=s.n_vocab)
    if rope_factors:
        n = s.head_dim // 2
        factors = np.linspace(1, 8, n, dtype=np.float32)
        draft.tensors.append((Entry("rope_freqs.weight", (n,), F32), factors))
    _ends(draft, s)
    _plain_blocks(draft, s, qk_norm=False)
    return draft.write(path, keys)


def make_gemma3(
    path: Path | str, *, seed: int = 0, type: str = "F16", window: int = 16, n_layers: int = 7,
    tied: bool = True, n_vocab: int = 512, keys: Keys | None = None, **sizes: Any,
) -> Path:  # fmt: skip
    """Layer 5 is full, the others slide over `window` positions with their own frequency base."""
    s = Sizes(n_layers=n_layers, tied=tied, n_vocab=n_vocab, **{"rope_base": 1e6, **sizes})
    plain = random_fill(seed, tied)

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # Strong branches: a tied, scaled embedding would otherwise predict itself for ever.
        return plain(name, shape) * (8 if "post_" in name else 2 if name == "token_embd.weight" else 1)

    draft = _start("gemma3", s, seed, type, fill, sentence_pieces(s.n_vocab), s.n_layers)
    draft.u32(attention__sliding_window=window)
    _ends(draft, s)
    for i in range(s.n_layers):
        b = f"blk.{i}."
        draft.add(b + "attn_norm.weight", s.n_embd)
        _attention(draft, b, s, qk_norm=True)
        draft.add(b + "post_attention_norm.weight", s.n_embd)
        draft.add(b + "ffn_norm.weight", s.n_embd)
        _ffn(draft, b, s)
        draft.add(b + "post_ffw_norm.weight", s.n_embd)
    return draft.write(path, keys)


def make_qwen35(
    path: Path | str, *, seed: int = 0, type: str = "F16", fill: Fill | None = None, mtp: bool = True,
    mtp_only: bool = False, mtp_own_ends: bool = False, full_interval: int = 4, n_rot: int = 16,
    sections: Sequence[int] = (3, 3, 2, 0), conv_kernel: int = 4, state_size: int = 32, n_key_heads: int = 2,
    n_value_heads: int = 4, follow: float = 0.0, vocabulary: list[Key] | None = None, keys: Keys | None = None,
    **sizes: Any,
) -> Path:  # fmt: skip
    """`n_layers` trunk layers (every `full_interval`-th is full attention, the others gated DeltaNet) and an
    MTP block after them. `mtp_only` leaves the trunk out; `mtp_own_ends` gives the block its own embedding
    and head.
    """
    s = Sizes(**sizes)
    n_blocks = s.n_layers + int(mtp)
    fill = _leaning(fill or random_fill(seed), follow) if follow else fill
    draft = _start("qwen35", s, seed, type, fill, vocabulary or byte_bpe(s.n_vocab, "qwen35"), n_blocks)
    value_dim, conv_dim = n_value_heads * state_size, (2 * n_key_heads + n_value_heads) * state_size
    draft.u32(
        rope__dimension_count=n_rot, ssm__conv_kernel=conv_kernel, ssm__inner_size=value_dim,
        ssm__state_size=state_size, ssm__time_step_rank=n_value_heads, ssm__group_count=n_key_heads,
        full_attention_interval=full_interval, nextn_predict_layers=int(mtp),
    )  # fmt: skip
    draft.put("qwen35.rope.dimension_sections", "arr[i32]", list(sections))
    _ends(draft, s)
    for i in range(s.n_layers if mtp_only else 0, n_blocks):
        b, is_mtp = f"blk.{i}.", i == s.n_layers
        draft.add(b + "attn_norm.weight", s.n_embd)
        draft.add(b + "post_attention_norm.weight", s.n_embd)
        if is_mtp or (i + 1) % full_interval == 0:
            _attention(draft, b, s, qk_norm=True, gated=True)
        else:
            draft.add(b + "attn_qkv.weight", conv_dim, s.n_embd)
            draft.add(b + "attn_gate.weight", value_dim, s.n_embd)
            draft.add(b + "ssm_conv1d.weight", conv_dim, conv_kernel)
            draft.add(b + "ssm_alpha.weight", n_value_heads, s.n_embd)
            draft.add(b + "ssm_beta.weight", n_value_heads, s.n_embd)
            draft.add(b + "ssm_dt.bias", n_value_heads)
            draft.add(b + "ssm_a", n_value_heads)
            draft.add(b + "ssm_norm.weight", state_size)
            draft.add(b + "ssm_out.weight", s.n_embd, value_dim)
        _ffn(draft, b, s)
        if is_mtp:
            draft.add(b + "nextn.eh_proj.weight", s.n_embd, 2 * s.n_embd)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                draft.add(f"{b}nextn.{norm}.weight", s.n_embd)
            if mtp_own_ends:
                draft.add(b + "nextn.embed_tokens.weight", s.n_vocab, s.n_embd)
                draft.add(b + "nextn.shared_head_head.weight", s.n_vocab, s.n_embd)
    return draft.write(path, keys)


def make_dflash(
    path: Path | str, *, kind: str = "v1", seed: int = 0, type: str = "F16", fill: Fill | None = None,
    taps: Sequence[int] = (1, 3), block_size: int = 8, n_layers: int = 2, window: int = 0,
    window_layers: Sequence[bool] | None = None, causal: bool | None = None,
    sections: Sequence[int] | None = None, rank: int = 32, sample_from_anchor: bool = True,
    confidence: bool = True, d2t: Sequence[int] | None = None, conv_kernel: int = 3, conv_group: int = 8,
    top_k: int = 4, follow: float = 0.0, sinks: bool = False, own_embedding: bool = False, own_head: bool = False,
    vocabulary: list[Key] | None = None, keys: Keys | None = None, **sizes: Any,
) -> Path:  # fmt: skip
    """A drafter of `kind` v1, dspark or dflash2 for a target of the same width and vocabulary. `d2t` names
    the target tokens of a reduced draft vocabulary (the head is then the draft's own); `rank` is DSpark's
    Markov rank and DFlash2's selector rank. `window` > 0 makes `window_layers` (default: the first) sliding.
    """
    s = Sizes(n_layers=n_layers, **sizes)
    n_draft_vocab = len(d2t) if d2t is not None else s.n_vocab
    fill = _leaning(fill or random_fill(seed), follow) if follow else fill
    draft = _start("dflash", s, seed, type, fill, vocabulary or byte_bpe(s.n_vocab, "qwen2"), n_layers)
    draft.u32(block_size=block_size)
    draft.put("dflash.target_layers", "arr[u32]", list(taps))
    if causal is not None:
        draft.put("dflash.attention.causal", "bool", causal)
    if window:
        draft.u32(attention__sliding_window=window)
        pattern = list(window_layers) if window_layers else [i == 0 for i in range(n_layers)]
        draft.put("dflash.attention.sliding_window_pattern", "arr[bool]", pattern)
    if sections:
        draft.put("dflash.rope.dimension_sections", "arr[i32]", list(sections))
    draft.add("fc.weight", s.n_embd, len(taps) * s.n_embd)
    draft.add("enc.output_norm.weight", s.n_embd)
    draft.add("output_norm.weight", s.n_embd)
    if own_embedding:
        draft.add("token_embd.weight", s.n_vocab, s.n_embd)
    if own_head or d2t is not None:
        draft.add("output.weight", n_draft_vocab, s.n_embd)
    if d2t is not None:
        draft.tensors.append((Entry("d2t", (n_draft_vocab,), I64), np.asarray(d2t, np.int64)))
    if kind == "dspark":
        _dspark_head(draft, s, rank, n_draft_vocab, sample_from_anchor, confidence)
    elif kind == "dflash2":
        draft.u32(conv_kernel_size=conv_kernel, conv_group_size=conv_group, selector_rank=rank, selector_top_k=top_k)
        draft.add("selector_predecessor.weight", s.n_vocab, rank)
        draft.add("selector_successor.weight", s.n_vocab, rank)
        draft.add("selector_hidden.weight", rank, s.n_embd)
    elif kind != "v1":
        raise ValueError(f"kind is {kind!r}, expected 'v1', 'dspark' or 'dflash2'")
    for i in range(n_layers):
        b = f"blk.{i}."
        draft.add(b + "attn_norm.weight", s.n_embd)
        _attention(draft, b, s, qk_norm=True)
        if sinks:
            draft.add(b + "attn_sinks.weight", s.n_head)
        draft.add(b + "ffn_norm.weight", s.n_embd)
        _ffn(draft, b, s)
        if kind == "dflash2":
            for side in ("attn", "ffn"):
                draft.add(f"{b}{side}_conv_base", 2, conv_kernel, s.n_embd)
                n = 2 * conv_kernel * s.n_embd // conv_group
                draft.add(f"{b}{side}_conv_proj.weight", n, s.n_embd)
    return draft.write(path, keys)


def _dspark_head(
    draft: Draft, s: Sizes, rank: int, n_draft_vocab: int, sample_from_anchor: bool, confidence: bool
) -> None:
    draft.put("dflash.sample_from_anchor", "bool", sample_from_anchor)
    draft.put("dflash.has_confidence_head", "bool", confidence)
    draft.add("markov_w1.weight", s.n_vocab, rank)
    draft.add("markov_w2.weight", n_draft_vocab, rank)
    if confidence:
        draft.add("conf_proj.weight", 1, s.n_embd + rank)
        draft.add("conf_proj.bias", 1)
