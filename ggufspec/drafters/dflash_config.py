"""The keys of a `dflash` file, read and checked: DFlash, DSpark and DFlash2 share the architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, FileError, UnsupportedError
from ..kernels.rope import RopeSpec
from ..models.config import Config, Keys, read_config

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")  # both gelu names mean the tanh form
CONV_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class DFlashConfig:
    """Keys of the family on top of the common ones; names as in the file."""

    common: Config
    kind: str  # "dflash", "dspark" or "dflash2"
    target_layers: tuple[int, ...]  # taps: the stream entering these target layers
    block_size: int
    mask_token_id: int
    causal: bool
    sliding_window: int  # 0: none
    is_sliding: tuple[bool, ...]  # per layer
    embedding_scale: float
    attention_scale: float
    value_scale: float
    activation: str
    logit_scale: float
    logit_softcap: float  # 0: none; this and logit_scale act in DFlash2 only
    sample_from_anchor: bool
    has_confidence_head: bool
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    rope: RopeSpec  # without sections: pairs that text does not rotate are folded into its factors

    @property
    def first_row(self) -> int:
        """The first block row that predicts a token."""
        return 0 if self.kind == "dspark" and self.sample_from_anchor else 1

    @property
    def n_limit(self) -> int:
        """The most tokens a block of the trained size can draft."""
        return self.block_size - self.first_row


def kind_of(file: GGUFFile) -> str:
    """Which of the three drafters a `dflash` file is, by the tensors that make it one."""
    dspark, dflash2 = "markov_w1.weight" in file.tensors, "selector_hidden.weight" in file.tensors
    if dspark and dflash2:
        raise ConfigError(
            f"{file.path}: holds markov_w1.weight (DSpark) and selector_hidden.weight (DFlash2); expected one"
        )
    for name, kind, found in (
        ("selector_top_k", "DFlash2", dflash2),
        ("sample_from_anchor", "DSpark", dspark),
    ):
        if file.key(name) in file.metadata and not found:
            tensor = "selector_hidden.weight" if kind == "DFlash2" else "markov_w1.weight"
            raise ConfigError(
                f"{file.path}: key {file.key(name)} says {kind}, but tensor {tensor} is missing"
            )
    return "dspark" if dspark else "dflash2" if dflash2 else "dflash"


def read_dflash_config(file: GGUFFile) -> DFlashConfig:
    """FileError: a missing or ill-typed key; ConfigError: a contradiction; UnsupportedError: another variant."""
    keys, common, kind = Keys(file), read_config(file), kind_of(file)
    n_layers = common.block_count
    if keys.integer("hyper_connection.count", 0) > 0:
        raise UnsupportedError(f"{file.path}: dflash with hyper connections is not supported")
    activation = keys.text("hidden_activation", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{file.path}: key dflash.hidden_activation is {activation!r}; "
            f"expected one of {', '.join(ACTIVATIONS)}"
        )
    window = keys.integer("attention.sliding_window", 0)
    pattern = keys.array("attention.sliding_window_pattern", bool) if window > 0 else [False] * n_layers
    if len(pattern) != n_layers:
        raise ConfigError(
            f"{file.path}: dflash.attention.sliding_window_pattern has {len(pattern)} entries, "
            f"dflash.block_count is {n_layers}; expected one entry a block"
        )
    block_size = keys.integer("block_size", 16) if kind == "dflash" else keys.integer("block_size")
    anchor = keys.flag("sample_from_anchor", True)
    if block_size < 2 and not (kind == "dspark" and anchor and block_size == 1):
        raise ConfigError(f"{file.path}: key dflash.block_size is {block_size}; expected 2 or more")
    taps = tuple(int(t) for t in keys.array("target_layers", int))
    if not taps:
        raise FileError(f"{file.path}: key dflash.target_layers is empty; expected indices of target layers")
    numbers = {name: keys.integer(name) if kind == "dflash2" else 0 for name in CONV_KEYS}
    if kind == "dflash2":
        _check_dflash2(file, common.embedding_length, numbers)
    return DFlashConfig(
        common=common,
        kind=kind,
        target_layers=taps,
        block_size=block_size,
        mask_token_id=keys.integer("tokenizer.ggml.mask_token_id"),
        causal=keys.flag("attention.causal", False),
        sliding_window=window,
        is_sliding=tuple(bool(p) for p in pattern),
        embedding_scale=keys.number("embedding_scale", 1.0),
        attention_scale=keys.number("attention.scale", common.key_length**-0.5),
        value_scale=keys.number("attention.value_scale", 1.0),
        activation=activation,
        logit_scale=keys.number("logit_scale", 1.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        sample_from_anchor=anchor,
        has_confidence_head=keys.flag("has_confidence_head", True),
        rope=_rope(file, common.rope),
        **numbers,
    )


def _check_dflash2(file: GGUFFile, D: int, numbers: dict[str, int]) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{file.path}: key dflash.{name} is {value}; expected 1 or more")
    group, k = numbers["conv_group_size"], numbers["selector_top_k"]
    if D % group:
        raise ConfigError(
            f"{file.path}: dflash.embedding_length {D} is not a multiple of dflash.conv_group_size {group}"
        )
    if D < k * (k + 1):
        raise ConfigError(
            f"{file.path}: dflash.selector_top_k is {k}, which needs an embedding_length of {k * (k + 1)}, "
            f"but that is {D}"
        )


def _rope(file: GGUFFile, rope: RopeSpec) -> RopeSpec:
    """Plain NEOX rope for text. With sections, pairs of the fourth one stand at position 0: infinite divisor."""
    pairs = rope.n_rot // 2
    if rope.sections is not None and any(rope.sections):
        sections = (*rope.sections, 0, 0, 0, 0)[:4]
        k = torch.arange(pairs) % sum(sections)
        rotates = k < sum(sections[:3])
        factors = None if bool(rotates.all()) else torch.where(rotates, 1.0, torch.inf)
        return replace(rope, sections=None, factors=factors)
    if "rope_freqs.weight" in file.tensors:
        from ..weights import Weights

        factors = Weights(file).vector("rope_freqs.weight", (pairs,), torch.device("cpu"))
        return replace(rope, sections=None, factors=factors)
    return replace(rope, sections=None)
