"""Model configuration: one dataclass per idea, filled from a GGUF file's keys (names as in the file)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, FileError
from ..kernels.rope import Pairing, RopeSpec

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

PAIRING: dict[str, Pairing] = {"qwen2": "neox", "qwen3": "neox", "qwen35": "neox", "gemma3": "neox", "dflash": "neox",
                 "llama": "norm"}


@dataclass(frozen=True)
class Config:
    """Keys every architecture has; `{A}.` stands for the architecture name in the comments."""

    architecture: str
    name: str
    context_length: int
    embedding_length: int  # D
    block_count: int  # all blocks, MTP ones included
    nextn_predict_layers: int
    feed_forward_length: tuple[int, ...]  # F per block
    head_count: tuple[int, ...]  # H per block
    head_count_kv: tuple[int, ...]  # KV per block
    key_length: int  # hd of q and k
    value_length: int  # hd of v
    layer_norm_rms_epsilon: float
    causal: bool
    rope: RopeSpec
    n_vocab: int

    @property
    def n_layers(self) -> int:
        """Trunk layers: blocks without the MTP ones."""
        return self.block_count - self.nextn_predict_layers


class Keys:
    """Typed access to one file's keys, with `{A}.` filled in and errors that name the key."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = file.architecture

    def _name(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return self._name(key) in self.file.metadata

    def is_number(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(self._name(key)), int)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._get(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, float, default))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._get(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """An array of one kind (int, bool, float, str)."""
        return self._get(key, list[kind], default)  # type: ignore[valid-type]

    def integers(self, key: str, n: int, default: int | None = None) -> tuple[int, ...]:
        """A key that may be one integer or an array with one entry per block; always `n` values."""
        name = self._name(key)
        if default is not None and name not in self.file.metadata:
            return (default,) * n
        return tuple(self.file.get_per_block(name, int, n))

    def _get(self, key: str, kind: Any, default: Any) -> Any:
        name = self._name(key)
        if default is not None and name not in self.file.metadata:
            return default
        return self.file.get(name, kind)


def read_config(file: GGUFFile) -> Config:
    """The common keys of `file`; FileError names a missing or ill-typed key, ConfigError a contradiction."""
    keys = Keys(file)
    architecture = keys.architecture
    D = keys.integer("embedding_length")
    n = keys.integer("block_count")
    if n < 1 or n > 4096:
        raise FileError(f"{file.path}: key {architecture}.block_count is {n}; expected 1 to 4096")
    heads = keys.integers("attention.head_count", n, 0)
    first = max(heads) if heads else 0
    default_length = D // first if first else 0
    key_length = keys.integer("attention.key_length", default_length)
    value_length = keys.integer("attention.value_length", default_length)
    for key, value in (("head_count", first), ("key_length", key_length), ("value_length", value_length)):
        if value < 1:
            raise FileError(f"{file.path}: key {architecture}.attention.{key} is {value}; expected 1 or more")
    nextn = keys.integer("nextn_predict_layers", 0)
    if nextn >= n and nextn > 0:
        raise ConfigError(
            f"{file.path}: {architecture}.nextn_predict_layers is {nextn} but block_count is only {n}; "
            "expected fewer MTP blocks than blocks"
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight") or file.tensors.get("output.weight")
    n_vocab = len(tokens) if tokens is not None else (embedding.shape[0] if embedding else 0)
    return Config(
        architecture=architecture,
        name=keys.text("general.name", ""),
        context_length=keys.integer("context_length"),
        embedding_length=D,
        block_count=n,
        nextn_predict_layers=nextn,
        feed_forward_length=keys.integers("feed_forward_length", n, 0),
        head_count=heads,
        head_count_kv=keys.integers("attention.head_count_kv", n) if keys.has("attention.head_count_kv") else heads,
        key_length=key_length,
        value_length=value_length,
        layer_norm_rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        causal=keys.flag("attention.causal", True),
        rope=read_rope(keys, key_length),
        n_vocab=n_vocab,
    )


def read_rope(keys: Keys, key_length: int) -> RopeSpec:
    """The rope keys as one spec; scaling as models use it (none, linear, yarn)."""
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise FileError(
            f"{keys.file.path}: key {keys.architecture}.rope.scaling.type is {scaling!r}; "
            "expected none, linear, yarn or longrope"
        )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    sections = keys.array("rope.dimension_sections", int, [])
    if len(sections) not in (0, 4):
        raise FileError(
            f"{keys.file.path}: key {keys.architecture}.rope.dimension_sections has {len(sections)} entries; expected 4"
        )
    n_rot = keys.integer("rope.dimension_count", key_length)
    if n_rot % 2 or not 2 <= n_rot <= key_length:
        raise FileError(
            f"{keys.file.path}: key {keys.architecture}.rope.dimension_count is {n_rot}; "
            f"expected an even number from 2 to the head size {key_length}"
        )
    return RopeSpec(
        n_rot=n_rot,
        base=keys.number("rope.freq_base", 10000.0),
        freq_scale=1.0 if scaling == "none" or factor == 0.0 else 1.0 / factor,
        ext_factor=1.0 if scaling == "yarn" else 0.0,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        pairing=PAIRING.get(keys.architecture, "neox"),
        sections=(sections[0], sections[1], sections[2], sections[3]) if sections else None,
    )
