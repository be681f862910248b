"""Filter, weigh and draw in PyTorch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ggufspec.kernels.draw import Limits

WEIGHT_ONE = 2.0**40  # weight of the most likely candidate; 2**22 candidates still fit an int64
GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as int64: torch has no arithmetic on uint64
M1 = 0xBF58476D1CE4E5B9 - 2**64
M2 = 0x94D049BB133111EB - 2**64


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64 (torch's `>>` keeps the sign)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 words."""
    x = (x ^ _shift(x, 30)) * M1
    x = (x ^ _shift(x, 27)) * M2
    return x ^ _shift(x, 31)


def uniform_of_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1) for stream keys and positions (int64, same shape or broadcast)."""
    z = mix(keys + (positions + 1) * GAMMA)
    return _shift(z, 11).to(torch.float64) * 2.0**-53


def weights(logits: Tensor, keep: Tensor, temperature: Tensor) -> Tensor:
    """Integer weights [R, K] of candidates [R, K] float64, 0 where not kept. temperature [R] float64; a
    temperature <= 0 leaves the first candidate alone.
    """
    cold = (temperature <= 0)[:, None]
    t = torch.where(cold, 1.0, temperature[:, None])
    scaled = torch.exp((logits - logits[:, :1]) / t)
    first = torch.arange(logits.shape[1], device=logits.device) == 0
    # The best candidate always weighs one: a row of -inf (everything masked) still has a defined choice.
    w = torch.where(first, WEIGHT_ONE, torch.where(torch.isfinite(logits), scaled * WEIGHT_ONE, 0.0))
    return torch.where(keep & (first | ~cold), w, 0.0).to(torch.int64)


def kept(logits: Tensor, limits: Limits) -> Tensor:
    """Which of the sorted candidates [R, K] float64 survive top_k, top_p and min_p: bool [R, K]."""
    index = torch.arange(logits.shape[1], device=logits.device)[None, :]
    keep = index < limits.top_k[:, None]
    w = weights(logits, keep, torch.ones_like(limits.temperature))
    before = (w.cumsum(1) - w).to(torch.float64)  # weight of the better candidates
    total = w.sum(1, keepdim=True).to(torch.float64)
    must = index < limits.min_keep[:, None]
    top_p = limits.top_p[:, None]
    keep &= (top_p >= 1) | (before < top_p * total) | must | (index == 0)
    min_p = limits.min_p[:, None]
    threshold = logits[:, :1] + torch.log(min_p.clamp_min(1e-300))
    keep &= (min_p <= 0) | (logits >= threshold) | must
    return keep


def choose(w: Tensor, u: Tensor) -> Tensor:
    """Index [R] of the first candidate whose running weight exceeds u * total. w [R, K] int64, u [R] float64."""
    running = w.cumsum(1)
    target = torch.minimum((u * running[:, -1].to(torch.float64)).to(torch.int64), running[:, -1] - 1)
    return (running <= target[:, None]).sum(1)


def draw(values: Tensor, ids: Tensor, limits: Limits, positions: Tensor) -> tuple[Tensor, Tensor]:
    logits = values.to(torch.float64)
    w = weights(logits, kept(logits, limits), limits.temperature)
    at = choose(w, uniform_of_keys(limits.key, positions))
    return ids.gather(1, at[:, None])[:, 0], w
