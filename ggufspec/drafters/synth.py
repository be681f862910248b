"""Synthetic acceptance: how fast a run would be if drafts were right at given rates. The text is then meaningless.

For benchmarks only. Verification is replaced by one random number per drafted token; the target still runs on
every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..rows import Rows

N_BISECTIONS = 32
BLOCK = 64  # random numbers drawn at a time
NOTICE = "synthetic acceptance is on: drafts are accepted at random, the output text is not the model's"


def rates_of_length(length: float, n_max: int) -> list[float]:
    """Rates p, p^2, ... p^n_max whose sum is length - 1: the mean number of tokens a step emits is `length`."""
    if not (math.isfinite(length) and 1.0 <= length <= n_max + 1):
        raise ConfigError(
            f"--spec-synth-len is {length:g}; expected 1 to {n_max + 1} (up to {n_max} drafted tokens and one more)"
        )
    low, high = 0.0, 1.0
    for _ in range(N_BISECTIONS):
        p = 0.5 * (low + high)
        if sum(p**i for i in range(1, n_max + 1)) < length - 1.0:
            low = p
        else:
            high = p
    p = 0.0 if length == 1.0 else 1.0 if length == n_max + 1 else 0.5 * (low + high)
    return [p ** (i + 1) for i in range(n_max)]


def check_rates(rates: Sequence[float], n_max: int) -> list[float]:
    """`--spec-synth-rates`: rate i is the probability that the first i + 1 drafted tokens are all right."""
    if len(rates) != n_max:
        raise ConfigError(
            f"--spec-synth-rates has {len(rates)} values; expected {n_max}, one per drafted token of a step"
        )
    for i, rate in enumerate(rates):
        if not (math.isfinite(rate) and 0.0 <= rate <= 1.0):
            raise ConfigError(f"--spec-synth-rates value {i + 1} is {rate:g}; expected 0 to 1")
        if i > 0 and rate > rates[i - 1]:
            raise ConfigError(
                f"--spec-synth-rates value {i + 1} is {rate:g}, above the one before it, {rates[i - 1]:g}; "
                "expected a non-increasing list"
            )
    return list(rates)


def conditional(rates: Sequence[float]) -> list[float]:
    """The probability of each drafted token given that all before it were accepted."""
    before = [1.0, *rates[:-1]]
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before)]


class Uniforms:
    """Uniform doubles from a 32-bit Mersenne Twister, two outputs each, that can be looked at before use."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed & 0xFFFFFFFF)
        self._ahead: list[float] = []

    def peek(self, n: int) -> list[float]:
        """The next n numbers, without using them."""
        while len(self._ahead) < n:  # in blocks: a call costs far more than a number
            halves = self._twister.randint(0, 2**32, size=2 * BLOCK, dtype=np.uint32).astype(np.float64)
            self._ahead += ((halves[::2] + 2.0**32 * halves[1::2]) / 2.0**64).tolist()
        return self._ahead[:n]

    def use(self, n: int) -> None:
        del self._ahead[:n]


class SyntheticAcceptance:
    """Random acceptance for an engine's slots: `draw` before a step, `settle` in it, `used` after it."""

    def __init__(self, rates: Sequence[float], n_slots: int, device: torch.device) -> None:
        self.rates = list(rates)
        self.conditional = torch.tensor(conditional(rates), dtype=torch.float64, device=device)
        self.device = device
        self.uniforms = [Uniforms(0) for _ in range(n_slots)]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Other rates, as many as before; steps that were captured follow them."""
        self.rates = list(rates)
        self.conditional.copy_(torch.tensor(conditional(rates), dtype=torch.float64))

    def start(self, slot: int, seed: int) -> None:
        """A request begins in the slot."""
        self.uniforms[slot] = Uniforms(seed)

    def draw(self, slots: Sequence[int], n: int) -> Tensor:
        """[B, n] float64 on the device, one number per drafted token."""
        return torch.tensor([self.uniforms[slot].peek(n) for slot in slots], dtype=torch.float64).to(self.device)

    def settle(self, rows: Rows, sampled: Tensor, uniforms: Tensor, is_eog: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [B, W], n_accepted [B]): accepted drafts stand in place of what the target chose.

        sampled [B, W]: the target's choices; uniforms [B, W - 1]; is_eog [V] bool: such a draft is never accepted.
        n_accepted is -1 for padding.
        """
        n = rows.width - 1
        drafted = rows.tokens[:, 1:]
        chance = torch.nn.functional.pad(self.conditional, (0, max(0, n - len(self.conditional))))[:n]
        proposed = torch.arange(n, device=sampled.device) < (rows.n_rows - 1)[:, None]
        right = (uniforms < chance) & proposed & ~is_eog[drafted]
        n_accepted = torch.minimum(right.to(torch.int64).cumprod(dim=1).sum(dim=1), rows.n_rows - 1)
        taken = torch.arange(n, device=sampled.device) < n_accepted[:, None]
        tokens = sampled.clone()
        tokens[:, :n] = torch.where(taken, drafted, sampled[:, :n])
        return tokens, n_accepted

    def used(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        """A number is drawn for every accepted token and for the first that was not."""
        self.uniforms[slot].use(min(n_accepted + 1, n_drafted))
