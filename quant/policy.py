"""Which type each tensor of a file gets, for every file type: llama-quantize's rules as tables.

A tensor's type is decided in this order; the first that applies wins:

1. tensors that keep their type (`keeps_type`);
2. the type asked for token embeddings; 3. the type asked for the output tensor; 4. the first matching pattern;
5. with `pure`, the file type's default; 6. the tables below; 7. if the row does not divide into blocks of the
   type, its fallback (`FALLBACK`), which never touches types asked for in 2. and 3.

Counters: `i` of a rule counts the tensors of its role that the tables have decided so far, in visiting order
(`visiting_order`); types from patterns do not advance it. Tensors of an expert model use their block number for
`ffn_down`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.quant import layouts


@dataclass(frozen=True)
class FileType:
    """A kind of file: its name, its number in `general.file_type`, and the type most tensors get."""

    name: str
    id: int
    default: str


FILE_TYPES = (
    FileType("Q8_0", 7, "Q8_0"), FileType("Q6_K", 18, "Q6_K"),
    FileType("Q5_K_M", 17, "Q5_K"), FileType("Q5_K_S", 16, "Q5_K"),
    FileType("Q4_K_M", 15, "Q4_K"), FileType("Q4_K_S", 14, "Q4_K"),
    FileType("Q3_K_L", 13, "Q3_K"), FileType("Q3_K_M", 12, "Q3_K"), FileType("Q3_K_S", 11, "Q3_K"),
    FileType("Q2_K", 10, "Q2_K"), FileType("Q2_K_S", 21, "Q2_K"),
    FileType("IQ4_NL", 25, "IQ4_NL"), FileType("IQ4_XS", 30, "IQ4_XS"),
    FileType("Q4_0", 2, "Q4_0"), FileType("Q4_1", 3, "Q4_1"),
    FileType("Q5_0", 8, "Q5_0"), FileType("Q5_1", 9, "Q5_1"),
    FileType("F16", 1, "F16"), FileType("BF16", 32, "BF16"), FileType("F32", 0, "F32"),
)  # fmt: skip
COPY = FileType("COPY", -1, "")
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# File types llama.cpp writes and this quantizer does not: their blocks have no encoder here.
NOT_WRITTEN = {
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24, "IQ3_S": 26, "IQ3_M": 27,
    "IQ2_S": 28, "IQ2_M": 29, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38,
}  # fmt: skip
# The file type that a file's commonest tensor type suggests, when no key says it.
GUESSED = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10,
    "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
GUESSED_FLAG = 1024
PLAIN = ("F32", "F16", "BF16")

# A type whose blocks are wider than a row can hold, and the next best one.
FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip

# Names that are never quantized although they end in "weight".
KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d",
    "shortconv.conv.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight",
    "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "indexer.k_proj.weight",
    "indexer.q_proj.weight",
)  # fmt: skip
KEPT_NAMES = ("position_embd.weight", "token_types.weight")


class Tensor(Protocol):
    """What the rules look at. `shape` is in PyTorch order, `columns` its last size."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def columns(self) -> int: ...


@dataclass(frozen=True)
class Facts:
    """What the rules need to know about a model."""

    architecture: str = ""
    n_blocks: int = 0  # MTP blocks included
    n_gqa: int = 1  # query heads per KV head of block 0
    n_experts: int = 0
    has_gqa: bool = False


@dataclass(frozen=True)
class Place:
    """Where a rule is applied: the tensor is number `i` of `n` of its role."""

    i: int
    n: int
    n_gqa: int
    has_imatrix: bool

    @property
    def gets_more(self) -> bool:
        """The first and the last eighth, and every third in between."""
        return self.i < self.n // 8 or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2

    @property
    def is_first_eighth(self) -> bool:
        return self.i < self.n // 8


# A rule is a type, or a function of the place that gives a type or None for the file type's default.
Rule = str | Callable[[Place], str | None]

VALUE_RULES: dict[str, Rule] = {  # attn_v, attn_qkv, attn_kv_b
    "Q2_K": lambda at: "Q4_K" if at.n_gqa >= 4 else "Q3_K",
    "Q2_K_S": lambda at: "Q4_K" if at.n_gqa >= 4 else None,
    "Q3_K_M": lambda at: "Q5_K" if at.i < 2 else "Q4_K",
    "Q3_K_L": "Q5_K",
    "Q4_K_S": lambda at: "Q5_K" if at.i < 4 else None,
    "Q4_K_M": lambda at: "Q6_K" if at.gets_more else None,
    "Q5_K_M": lambda at: "Q6_K" if at.gets_more else None,
    "IQ4_NL": lambda at: "Q5_K" if at.n_gqa >= 4 else None,
    "IQ4_XS": lambda at: "Q5_K" if at.n_gqa >= 4 else None,
}
DOWN_RULES: dict[str, Rule] = {  # ffn_down
    "Q2_K": "Q3_K",
    "Q2_K_S": lambda at: "Q4_K" if at.is_first_eighth else None,
    "Q3_K_M": lambda at: "Q5_K" if at.i < at.n // 16 else "Q4_K",
    "Q3_K_L": "Q5_K",
    "Q4_K_S": lambda at: "Q5_K" if at.is_first_eighth else None,
    "Q4_K_M": lambda at: "Q6_K" if at.gets_more else None,
    "Q5_K_M": lambda at: "Q6_K" if at.gets_more else None,
    "IQ4_NL": lambda at: "Q5_K" if at.is_first_eighth and not at.has_imatrix else None,
    "IQ4_XS": lambda at: "Q5_K" if at.is_first_eighth and not at.has_imatrix else None,
    "Q4_0": lambda at: "Q4_1" if at.is_first_eighth and at.has_imatrix else None,
    "Q5_0": lambda at: "Q5_1" if at.is_first_eighth and at.has_imatrix else None,
}
ATTENTION_OUTPUT_RULES: dict[str, Rule] = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
# Models with exactly eight experts: attn_v and attn_k get Q8_0, and attn_output Q5_K in these file types.
EIGHT_EXPERTS_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")


@dataclass(frozen=True)
class Choices:
    """What the user asked for. Types are layout names; `patterns` are (regular expression, type) in order."""

    file_type: FileType
    pure: bool = False
    leave_output: bool = False
    output_type: str | None = None
    embedding_type: str | None = None
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()
    has_imatrix: bool = False


@dataclass(frozen=True)
class Decision:
    """A tensor's type and how it came about. `wanted` is the type before a fallback."""

    name: str
    type_name: str
    wanted: str
    by_pattern: bool = False
    kept: bool = False

    @property
    def fell_back(self) -> bool:
        return self.wanted != self.type_name


@dataclass
class _Counters:
    values: int = 0
    downs: int = 0


@dataclass
class _Model:
    facts: Facts
    choices: Choices
    n_values: int
    is_tied: bool
    seen: _Counters = field(default_factory=_Counters)


def file_type(text: str) -> FileType:
    """The file type of a name (any case) or number. Raises ConfigError for neither, UnsupportedError for one
    that llama.cpp knows and this quantizer does not write."""
    name = text.upper()
    if name == "COPY":
        return COPY
    for known in FILE_TYPES:
        if ALIASES.get(name, name) == known.name or text == str(known.id):
            return known
    for other, number in NOT_WRITTEN.items():
        if name == other or text == str(number):
            written = ", ".join(t.name for t in FILE_TYPES)
            raise UnsupportedError(f"file type {other} is not written here; choose one of {written}, COPY")
    written = ", ".join(t.name for t in FILE_TYPES)
    raise ConfigError(f"invalid ftype '{text}', expected one of {written}, COPY")


def display_name(text: str) -> str:
    """How a file type given as `text` is called in a default output name: aliases stay, numbers are named."""
    return text.upper() if text.upper() in ALIASES else file_type(text).name


def is_file_type(text: str) -> bool:
    """True if `text` names a file type, written here or not."""
    try:
        file_type(text)
    except UnsupportedError:
        return True
    except ConfigError:
        return False
    return True


def tensor_type(text: str) -> str:
    """The layout name of a ggml type name in any case. Raises ConfigError for a type no encoder writes."""
    written = set(GUESSED)
    for name in layouts.BY_NAME:
        if name.lower() == text.lower() and name in written:
            return name
    raise ConfigError(f"unknown tensor type {text!r}, expected one of {' '.join(sorted(written)).lower()}")


def block_elements(type_name: str) -> int:
    return layouts.BY_NAME[type_name].n_elements


def visiting_order(names: Iterable[str]) -> list[str]:
    """Names sorted by block number, those without one first, then by their bytes."""

    def place(name: str) -> tuple[int, bytes]:
        match = re.match(r"blk\.(\d+)\.", name)
        return (int(match[1]) if match else -1), name.encode()

    return sorted(names, key=place)


def keeps_type(info: Tensor, choices: Choices) -> bool:
    """True for tensors that are copied as they are: vectors, norms, biases and a few small matrices."""
    name = info.name
    return (
        choices.file_type is COPY
        or max(info.shape[:-1], default=1) == 1
        or not name.endswith("weight")
        or (choices.leave_output and name == "output.weight")
        or name in KEPT_NAMES
        or any(part in name for part in KEPT_PARTS)
    )


def is_value(name: str) -> bool:
    return any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))


def decide(tensors: Sequence[Tensor], facts: Facts, choices: Choices) -> list[Decision]:
    """The types of all `tensors`, which are in visiting order and already pruned."""
    if facts.architecture == "falcon":
        raise UnsupportedError("architecture falcon has tensor rules of its own, which are not implemented")
    names = {info.name for info in tensors}
    n_values = sum(is_value(name) for name in names)
    model = _Model(facts, choices, n_values, is_tied="output.weight" not in names)
    return [_decide_one(info, model) for info in tensors]


def _decide_one(info: Tensor, model: _Model) -> Decision:
    choices, name = model.choices, info.name
    if keeps_type(info, choices):
        return Decision(name, info.type_name, info.type_name, kept=True)
    is_embedding = name in ("token_embd.weight", "per_layer_token_embd.weight")
    for asked in (
        choices.embedding_type if is_embedding else None,
        choices.output_type if name == "output.weight" else None,
    ):
        if asked:
            return Decision(name, asked, asked)
    default = choices.file_type.default
    if default in PLAIN:
        return Decision(name, default, default)
    for pattern, asked in choices.patterns:
        if pattern.search(name):
            return Decision(name, with_fallback(asked, info.columns), asked, by_pattern=True)
    wanted = default if choices.pure else _by_rules(info, model)
    if not choices.pure and model.is_tied and name == "token_embd.weight" and choices.output_type:
        return Decision(name, wanted, wanted)
    return Decision(name, with_fallback(wanted, info.columns), wanted)


def _by_rules(info: Tensor, model: _Model) -> str:
    name, facts, choices, seen = info.name, model.facts, model.choices, model.seen
    kind, default = choices.file_type.name, choices.file_type.default

    def apply(rules: dict[str, Rule], i: int, n: int) -> str:
        rule = rules.get(kind)
        if callable(rule):
            rule = rule(Place(i, n, facts.n_gqa, choices.has_imatrix))
        return rule or default

    if name == "output.weight" or (model.is_tied and name == "token_embd.weight"):
        if choices.output_type:
            return choices.output_type
        if info.columns % block_elements(default):
            return "Q8_0"
        return "Q8_0" if default == "Q8_0" else "Q6_K"
    if is_value(name):
        chosen = apply(VALUE_RULES, seen.values, model.n_values)
        seen.values += 1
        if _is_70b(facts) and chosen in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"
        return "Q8_0" if facts.n_experts == 8 else chosen
    if "attn_k.weight" in name:
        return "Q8_0" if facts.n_experts == 8 else default
    if "ffn_down" in name:
        i = seen.downs
        if facts.n_experts > 1:
            match = re.match(r"blk\.(\d+)\.", name)
            if not match or int(match[1]) >= facts.n_blocks:
                raise ConfigError(f"tensor {name!r}: no block number below {facts.n_blocks} in an expert model")
            i = int(match[1])
        seen.downs += 1
        return apply(DOWN_RULES, i, facts.n_blocks)
    if "attn_output.weight" in name:
        if facts.n_experts == 8:
            return "Q5_K" if kind in EIGHT_EXPERTS_OUTPUT else default
        return apply(ATTENTION_OUTPUT_RULES, 0, 1)
    return default


def _is_70b(facts: Facts) -> bool:
    """Models whose attn_v is so small that one more bit is nearly free."""
    return facts.n_blocks == 80 and (
        facts.architecture == "qwen2" or (facts.architecture == "llama" and facts.has_gqa)
    )


def with_fallback(type_name: str, n_columns: int) -> str:
    """The type itself, or the next best one whose blocks divide a row of `n_columns`."""
    if n_columns % block_elements(type_name) == 0:
        return type_name
    smaller = FALLBACK.get(type_name, "F16")
    return smaller if n_columns % block_elements(smaller) == 0 else "F16"


def needs_imatrix(name: str, type_name: str, choices: Choices) -> bool:
    """True where llama.cpp refuses to quantize without an importance matrix."""
    exempt = name in ("output.weight", "token_embd.weight", "per_layer_token_embd.weight")
    return type_name == "Q2_K" and choices.file_type.name == "Q2_K_S" and not exempt
