"""The models that `ggufspec bench synth` writes: keys and tensor shapes of a hybrid target and its drafters.

Defaults are the shapes of Qwen3.8-27B with its MTP block, of its DSpark drafter and of its DFlash2 drafter.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggufspec.errors import ConfigError, FileError
from ggufspec.gguf_write import Key
from ggufspec.tokenizer import CHAR_OF

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>")
NORMAL, CONTROL, UNUSED = 1, 3, 5
ROPE_BASE, EPSILON = 1e7, 1e-6
FULL_INTERVAL = 4  # every fourth layer of the target is full attention


@dataclass(frozen=True)
class Sizes:
    """What can be chosen on the command line. `n_layers` leaves the target's MTP block out."""

    n_layers: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_embd: int = 5120
    n_vocab: int = 248320
    n_ctx: int = 262144
    # target only: gated DeltaNet
    state_size: int = 128
    n_key_heads: int = 16
    n_value_heads: int = 48
    conv_kernel: int = 4
    # drafters only
    taps: tuple[int, ...] = ()
    block_size: int = 0
    rank: int = 256
    window: int = 2048
    top_k: int = 16
    conv_group: int = 16
    conv_taps: int = 2


DEFAULTS = {
    "target": Sizes(n_layers=64, n_ff=17408, n_head=24, n_head_kv=4, head_dim=256),
    "dspark": Sizes(
        n_layers=5, n_ff=10240, n_head=40, n_head_kv=8, head_dim=128, taps=(5, 17, 29, 41, 53), block_size=7
    ),
    "dflash2": Sizes(
        n_layers=5, n_ff=17408, n_head=32, n_head_kv=8, head_dim=128, taps=(6, 20, 34, 48, 62), block_size=8
    ),
}


@dataclass
class Recipe:
    """A model to write. `fills` gives the value of F32 tensors that are not 1: a number, or `normal` or
    `first_tap`.
    """

    architecture: str
    keys: list[Key] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fills: dict[str, float | str] = field(default_factory=dict)

    def put(self, name: str, type: str, value: Any) -> None:
        self.keys.append(Key(f"{self.architecture}.{name}", type, value))

    def u32(self, **values: int) -> None:
        for name, value in values.items():
            self.put(name.replace("__", "."), "u32", value)

    def add(self, name: str, *shape: int, fill: float | str = 1.0) -> None:
        self.shapes[name], self.fills[name] = shape, fill


def make_recipe(kind: str, sizes: Sizes, tokens: Path | None) -> Recipe:
    """`kind` is target, dspark or dflash2; `tokens` a file of ranked tokens for the vocabulary (else
    bytes).
    """
    recipe = Recipe("qwen35" if kind == "target" else "dflash")
    recipe.keys.append(Key("general.architecture", "str", recipe.architecture))
    recipe.keys.append(Key("general.name", "str", f"synthetic {kind}"))
    n_blocks = sizes.n_layers + (kind == "target")
    recipe.u32(
        block_count=n_blocks, context_length=sizes.n_ctx, embedding_length=sizes.n_embd,
        feed_forward_length=sizes.n_ff, attention__head_count=sizes.n_head,
        attention__head_count_kv=sizes.n_head_kv, attention__key_length=sizes.head_dim,
        attention__value_length=sizes.head_dim,
    )  # fmt: skip
    recipe.put("attention.layer_norm_rms_epsilon", "f32", EPSILON)
    recipe.put("rope.freq_base", "f32", ROPE_BASE)
    if kind == "target":
        _target(recipe, sizes)
    else:
        _drafter(recipe, sizes, is_dflash2=kind == "dflash2")
    recipe.keys += vocabulary(sizes.n_vocab, tokens, with_mask=kind != "target")
    return recipe


def changed(kind: str, **values: Any) -> Sizes:
    """The default sizes of `kind` with the given ones (None: unchanged). Raises ConfigError if they clash."""
    sizes = replace(DEFAULTS[kind], **{name: value for name, value in values.items() if value is not None})
    if sizes.n_head % sizes.n_head_kv:
        raise ConfigError(f"{sizes.n_head} heads and {sizes.n_head_kv} KV heads, expected a multiple")
    if sizes.n_value_heads % sizes.n_key_heads:
        raise ConfigError(f"{sizes.n_value_heads} value heads and {sizes.n_key_heads} key heads, expected a multiple")
    if kind == "target" and sizes.head_dim < 8:
        raise ConfigError(f"head size {sizes.head_dim}, expected at least 8")
    if kind == "dflash2" and (sizes.n_embd % sizes.conv_group or sizes.n_embd < sizes.top_k * (sizes.top_k + 1)):
        raise ConfigError(
            f"width {sizes.n_embd}, expected a multiple of {sizes.conv_group} and at least "
            f"{sizes.top_k * (sizes.top_k + 1)} (top_k * (top_k + 1))"
        )
    return sizes


def _target(recipe: Recipe, s: Sizes) -> None:
    n_pairs = s.head_dim // 8
    recipe.u32(rope__dimension_count=2 * n_pairs)
    # Time, height and width take turns.
    recipe.put("rope.dimension_sections", "arr[i32]", [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0])
    value_dim, key_dim = s.n_value_heads * s.state_size, s.n_key_heads * s.state_size
    recipe.u32(
        ssm__conv_kernel=s.conv_kernel, ssm__state_size=s.state_size, ssm__group_count=s.n_key_heads,
        ssm__time_step_rank=s.n_value_heads, ssm__inner_size=value_dim, full_attention_interval=FULL_INTERVAL,
        nextn_predict_layers=1,
    )  # fmt: skip
    recipe.add("token_embd.weight", s.n_vocab, s.n_embd)
    recipe.add("output_norm.weight", s.n_embd)
    recipe.add("output.weight", s.n_vocab, s.n_embd)
    for i in range(s.n_layers + 1):
        b, is_mtp = f"blk.{i}.", i == s.n_layers
        recipe.add(b + "attn_norm.weight", s.n_embd)
        recipe.add(b + "post_attention_norm.weight", s.n_embd)
        if is_mtp or (i + 1) % FULL_INTERVAL == 0:
            _attention(recipe, b, s, is_gated=True)
        else:
            recipe.add(b + "attn_qkv.weight", 2 * key_dim + value_dim, s.n_embd)
            recipe.add(b + "attn_gate.weight", value_dim, s.n_embd)
            recipe.add(b + "ssm_conv1d.weight", 2 * key_dim + value_dim, s.conv_kernel, fill="normal")
            recipe.add(b + "ssm_dt.bias", s.n_value_heads, fill=0.5)
            recipe.add(b + "ssm_a", s.n_value_heads, fill=-0.5)
            recipe.add(b + "ssm_beta.weight", s.n_value_heads, s.n_embd)
            recipe.add(b + "ssm_alpha.weight", s.n_value_heads, s.n_embd)
            recipe.add(b + "ssm_norm.weight", s.state_size)
            recipe.add(b + "ssm_out.weight", s.n_embd, value_dim)
        _ffn(recipe, b, s)
    b = f"blk.{s.n_layers}.nextn."
    recipe.add(b + "eh_proj.weight", s.n_embd, 2 * s.n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        recipe.add(f"{b}{name}.weight", s.n_embd)


def _drafter(recipe: Recipe, s: Sizes, *, is_dflash2: bool) -> None:
    recipe.u32(block_size=s.block_size)
    recipe.put("target_layers", "arr[u32]", list(s.taps))
    recipe.put("rope.dimension_sections", "arr[i32]", [s.head_dim // 2, 0, 0, 0])
    recipe.put("attention.causal", "bool", False)
    recipe.add("fc.weight", s.n_embd, len(s.taps) * s.n_embd)
    recipe.add("enc.output_norm.weight", s.n_embd)
    recipe.add("output_norm.weight", s.n_embd)
    if is_dflash2:
        recipe.u32(attention__sliding_window=s.window)
        recipe.put("attention.sliding_window_pattern", "arr[bool]", [True] * s.n_layers)
        recipe.u32(
            conv_kernel_size=s.conv_taps, conv_group_size=s.conv_group, selector_rank=s.rank, selector_top_k=s.top_k
        )
        recipe.add("selector_predecessor.weight", s.n_vocab, s.rank)
        recipe.add("selector_successor.weight", s.n_vocab, s.rank)
        recipe.add("selector_hidden.weight", s.rank, s.n_embd)
    else:
        recipe.put("sample_from_anchor", "bool", True)
        recipe.put("has_confidence_head", "bool", False)
        recipe.add("markov_w1.weight", s.n_vocab, s.rank)
        recipe.add("markov_w2.weight", s.n_vocab, s.rank)
    for i in range(s.n_layers):
        b = f"blk.{i}."
        recipe.add(b + "attn_norm.weight", s.n_embd)
        _attention(recipe, b, s, is_gated=False)
        recipe.add(b + "ffn_norm.weight", s.n_embd)
        _ffn(recipe, b, s)
        for side in ("attn", "ffn") if is_dflash2 else ():
            recipe.add(f"{b}{side}_conv_base", 2, s.conv_taps, s.n_embd, fill="first_tap")
            n_dynamic = 2 * s.conv_taps * (s.n_embd // s.conv_group)
            recipe.add(f"{b}{side}_conv_proj.weight", n_dynamic, s.n_embd)


def _attention(recipe: Recipe, b: str, s: Sizes, *, is_gated: bool) -> None:
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    recipe.add(b + "attn_q.weight", q * (2 if is_gated else 1), s.n_embd)
    recipe.add(b + "attn_k.weight", kv, s.n_embd)
    recipe.add(b + "attn_v.weight", kv, s.n_embd)
    recipe.add(b + "attn_output.weight", s.n_embd, q)
    recipe.add(b + "attn_q_norm.weight", s.head_dim)
    recipe.add(b + "attn_k_norm.weight", s.head_dim)


def _ffn(recipe: Recipe, b: str, s: Sizes) -> None:
    recipe.add(b + "ffn_gate.weight", s.n_ff, s.n_embd)
    recipe.add(b + "ffn_down.weight", s.n_embd, s.n_ff)
    recipe.add(b + "ffn_up.weight", s.n_ff, s.n_embd)


def vocabulary(n_vocab: int, path: Path | None, *, with_mask: bool) -> list[Key]:
    """Byte-level BPE keys: the tokens of `path`, or the 256 bytes, then special and unused ones to
    `n_vocab`.
    """
    ranked = read_ranked_tokens(path) if path else [bytes([byte]) for byte in range(256)]
    if n_vocab < 256 + len(SPECIAL):
        raise ConfigError(f"a vocabulary of {n_vocab} tokens, expected at least {256 + len(SPECIAL)}")
    ranked = ranked[: n_vocab - len(SPECIAL)]
    tokens = ["".join(CHAR_OF[byte] for byte in token) for token in ranked]
    number = {name: len(tokens) + i for i, name in enumerate(SPECIAL)}
    n_unused = n_vocab - len(tokens) - len(SPECIAL)
    types = [NORMAL] * len(tokens) + [CONTROL] * len(SPECIAL) + [UNUSED] * n_unused
    tokens += [*SPECIAL, *(f"<|unused_{i}|>" for i in range(n_unused))]
    keys = [
        Key("tokenizer.ggml.model", "str", "gpt2"),
        Key("tokenizer.ggml.pre", "str", "qwen35"),
        Key("tokenizer.ggml.tokens", "arr[str]", tokens),
        Key("tokenizer.ggml.token_type", "arr[i32]", types),
        Key("tokenizer.ggml.merges", "arr[str]", merges_of(ranked)),
        Key("tokenizer.ggml.eos_token_id", "u32", number["<|im_end|>"]),
        Key("tokenizer.ggml.padding_token_id", "u32", number["<|endoftext|>"]),
        Key("tokenizer.ggml.bos_token_id", "u32", number["<|endoftext|>"]),
        Key("tokenizer.ggml.add_bos_token", "bool", False),
    ]
    if with_mask:
        keys.append(Key("tokenizer.ggml.mask_token_id", "u32", number["<|mask|>"]))
    return [*keys, Key("tokenizer.chat_template", "str", CHAT_TEMPLATE)]


def read_ranked_tokens(path: Path) -> list[bytes]:
    """Tokens of a tiktoken file: a line each, base64 and rank, in the order of rank."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError(f"{path}: cannot be opened: {error.strerror}") from None
    tokens = []
    for i, line in enumerate(lines):
        fields = line.split()
        if not fields:
            continue
        try:
            tokens.append(base64.b64decode(fields[0], validate=True))
        except ValueError:
            raise FileError(f"{path}: line {i + 1}: expected a token in base64 and its rank") from None
    return tokens


def merges_of(ranked: Sequence[bytes]) -> list[str]:
    """The merge that makes each token: of all ways to cut it into two tokens, the one whose later part comes
    first. A vocabulary of single bytes has none; one that never applies keeps loaders content.
    """
    rank = {token: i for i, token in enumerate(ranked)}
    merges = []
    for token in ranked:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(max(rank[a], rank[b]), a, b) for a, b in cuts if a in rank and b in rank]
        if pairs:
            _, a, b = min(pairs, key=lambda pair: pair[0])
            merges.append(" ".join("".join(CHAR_OF[byte] for byte in part) for part in (a, b)))
    return merges or ["a b"]
