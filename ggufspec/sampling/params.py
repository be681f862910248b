"""Sampling parameters: llama.cpp's names (those of its HTTP requests), defaults, ranges and sampler names."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ggufspec.errors import ConfigError

if TYPE_CHECKING:
    from ggufspec.sampling.dry import Breakers
    from ggufspec.sampling.infill import Pieces

RANDOM_SEED = 0xFFFFFFFF

# letter, name; the order of the first nine is the default chain
SAMPLERS = (
    ("e", "penalties"),
    ("d", "dry"),
    ("s", "top_n_sigma"),
    ("k", "top_k"),
    ("y", "typ_p"),
    ("p", "top_p"),
    ("m", "min_p"),
    ("x", "xtc"),
    ("t", "temperature"),
    ("i", "infill"),
    ("a", "adaptive_p"),
)
DEFAULT_CHAIN = tuple(name for _, name in SAMPLERS[:9])
_ALIASES = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typicalp": "typ_p",
    "typical": "typ_p",
}
_BY_LETTER = dict(SAMPLERS)
_BY_NAME = {name.replace("_", ""): name for _, name in SAMPLERS} | _ALIASES

DEFAULT_BREAKERS = ("\n", ":", '"', "*")


def sampler_names(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(known, unknown) of a list of sampler names: case, `-` and `_` do not matter, llama.cpp's aliases
    count.
    """
    known: list[str] = []
    unknown: list[str] = []
    for name in names:
        found = _BY_NAME.get(name.strip().lower().replace("-", "").replace("_", ""))
        if found is not None:
            known.append(found)
        elif name.strip():
            unknown.append(name.strip())
    return known, unknown


def sampler_letters(letters: str) -> tuple[list[str], list[str]]:
    """(known, unknown) of a string of sampler letters such as `edskypmxt`."""
    return [_BY_LETTER[c] for c in letters if c in _BY_LETTER], [c for c in letters if c not in _BY_LETTER]


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler. A value outside its range raises ConfigError when it is built.

    `seed` 0xFFFFFFFF asks for a fresh random seed: `with_seed()` draws it once, before the request starts.
    `logit_bias` is a tuple of (token id, bias); -inf bans a token.
    """

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = DEFAULT_CHAIN
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_probs: int = 0
    post_sampling_probs: bool = False

    def __post_init__(self) -> None:
        for name in ("repeat_last_n", "dry_penalty_last_n", "min_keep", "n_probs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"invalid {name.replace('_', '-')} = {getattr(self, name)}: expected 0 or more")
        if not (math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0):
            raise ConfigError(f"invalid repeat-penalty = {self.repeat_penalty}: expected a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"invalid {name.replace('_', '-')} = {getattr(self, name)}: expected a finite number")
        if self.mirostat not in (0, 1, 2):
            raise ConfigError(f"invalid mirostat = {self.mirostat}: expected 0, 1 or 2")
        if math.isnan(self.temperature):
            raise ConfigError("invalid temperature = nan: expected a number")
        unknown = [name for name in self.samplers if name not in _BY_LETTER.values()]
        if unknown:
            raise ConfigError(f"unknown sampler {unknown[0]!r}: expected {', '.join(_BY_LETTER.values())}")
        for entry in self.logit_bias:
            if len(entry) != 2 or entry[0] < 0 or math.isnan(entry[1]) or entry[1] == math.inf:
                raise ConfigError(f"invalid logit bias {entry!r}: expected (token id, number or -inf)")

    # --- which samplers are at work
    # -----------------------------------------------------------------------------

    @property
    def penalizes(self) -> bool:
        return (
            "penalties" in self.samplers
            and self.repeat_last_n > 0
            and (self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0)
        )

    @property
    def dries(self) -> bool:
        return (
            "dry" in self.samplers
            and self.dry_multiplier != 0.0
            and self.dry_base >= 1.0
            and self.dry_penalty_last_n > 0
        )

    def active_samplers(self) -> list[str]:
        """Names of the chain that can change anything, in order (`adaptive_p` always stands last)."""
        at_work = {
            "penalties": self.penalizes,
            "dry": self.dries,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
            "xtc": self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1.0 or self.dynatemp_range > 0,
            "infill": True,
        }
        chain = [name for name in self.samplers if at_work.get(name, False)]
        return chain + ["adaptive_p"] if "adaptive_p" in self.samplers else chain

    @property
    def greedy(self) -> bool:
        """True when the choice is always the (first) largest logit after bias, mask and penalties."""
        active = self.active_samplers()
        return (
            self.mirostat == 0
            and "temperature" in active
            and self.temperature <= 0
            and self.dynatemp_range <= 0
            and not {"typ_p", "xtc", "infill", "adaptive_p"} & set(active)
            and _ordered(active, ("penalties", "dry", "*", "temperature"))
        )

    @property
    def on_device(self) -> bool:
        """True when the batched device path (`sampling.device`) computes this request's tokens."""
        if self.mirostat or self.dries:
            return False
        if self.greedy:
            return True
        return self.dynatemp_range <= 0 and _ordered(
            self.active_samplers(), ("penalties", "top_k", "top_p", "min_p", "temperature")
        )

    @property
    def is_sequential(self) -> bool:
        """True when a token's choice changes the state that the next one reads (mirostat, adaptive_p)."""
        return self.mirostat != 0 or "adaptive_p" in self.samplers

    @property
    def history_needed(self) -> int:
        """How many of the last tokens (prompt included) the samplers read."""
        return max(self.repeat_last_n if self.penalizes else 0, self.dry_penalty_last_n if self.dries else 0)

    def with_seed(self) -> SamplingParams:
        """Itself, or with a fresh 32-bit seed where a random one was asked for."""
        if self.seed & RANDOM_SEED != RANDOM_SEED:
            return self
        return replace(self, seed=secrets.randbelow(RANDOM_SEED))


def _ordered(active: list[str], order: tuple[str, ...]) -> bool:
    """True if `active` is a subsequence of `order`; `*` stands for any run of filters that keep the
    maximum.
    """
    keeps_maximum = {"top_n_sigma", "top_k", "top_p", "min_p"}
    at = 0
    for name in active:
        while at < len(order) and order[at] != name and not (order[at] == "*" and name in keeps_maximum):
            at += 1
        if at == len(order):
            return False
        if order[at] != "*":
            at += 1
    return True


@dataclass(frozen=True)
class BoundParams(SamplingParams):
    """SamplingParams with what its samplers need from a vocabulary; made by `bind`."""

    breakers: Breakers | None = field(default=None, compare=False, repr=False)
    pieces: Pieces | None = field(default=None, compare=False, repr=False)
