"""Rotary position embedding in PyTorch: the CPU path and the oracle of the Triton kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pairing = Literal["neox", "norm"]


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """How positions turn head vectors. The first `n_rot` dimensions rotate in pairs, the rest is copied.

    freq_scale: 1 / scaling factor (1: none). ext_factor: 1 for YaRN, else 0. attn_factor: amplitude of cos
    and sin before YaRN's own factor. factors: float [n_rot/2] divisors of the frequencies, or None. pairing:
    `neox` pairs (j, j + n_rot/2), `norm` pairs (2j, 2j + 1). sections: four counts of interleaved M-RoPE, or
    None; a text token has the same position in the first three sections and 0 in the fourth.
    """

    n_rot: int
    base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: Tensor | None = None
    pairing: Pairing = "neox"
    sections: tuple[int, int, int, int] | None = None


def yarn_ramp(spec: RopeSpec) -> Tensor:
    """[n_rot/2] float64, 1 where a pair keeps its unscaled angle, 0 where it takes the scaled one."""

    def dimension(rotations: float) -> float:
        return spec.n_rot * math.log(spec.n_ctx_orig / (2 * math.pi * rotations)) / (2 * math.log(spec.base))

    low = max(0, math.floor(dimension(spec.beta_fast)))
    high = min(spec.n_rot - 1, math.ceil(dimension(spec.beta_slow)))
    j = torch.arange(spec.n_rot // 2, dtype=torch.float64)
    return 1.0 - ((j - low) / max(0.001, high - low)).clamp(0.0, 1.0)


def amplitude(spec: RopeSpec) -> float:
    """Multiplier of cos and sin."""
    if spec.ext_factor != 0.0 and spec.freq_scale < 1.0:
        return (0.1 * math.log(1.0 / spec.freq_scale) + 1.0) * spec.attn_factor
    return spec.attn_factor


def frequencies(spec: RopeSpec) -> Tensor:
    """[n_rot/2] float64 on the CPU: the angle of each pair per position, scaling and sections applied."""
    j = torch.arange(spec.n_rot // 2, dtype=torch.float64)
    theta = torch.pow(torch.tensor(spec.base, dtype=torch.float64), -2.0 * j / spec.n_rot)
    if spec.factors is not None:
        theta = theta / spec.factors.double().cpu()
    scaled = spec.freq_scale * theta
    if spec.ext_factor != 0.0:
        mix = yarn_ramp(spec) * spec.ext_factor
        scaled = scaled * (1.0 - mix) + theta * mix
    if spec.sections is not None:
        scaled = torch.where(text_sections(spec.sections, spec.n_rot // 2), scaled, 0.0)
    return scaled


def text_sections(sections: tuple[int, int, int, int], n_pairs: int) -> Tensor:
    """[n_pairs] bool: the pair takes one of the three positions that a text token has; False: position 0."""
    total = sum(sections)
    k = torch.arange(n_pairs) % total
    taken = torch.zeros(n_pairs, dtype=torch.bool)
    for remainder in range(3):
        taken |= (k % 3 == remainder) & (k < 3 * sections[remainder])
    return taken


def tables(positions: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    angles = positions.double().unsqueeze(-1) * frequencies(spec).to(positions.device)
    m = amplitude(spec)
    return (torch.cos(angles) * m).float(), (torch.sin(angles) * m).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RopeSpec) -> Tensor:
    n, half = spec.n_rot, spec.n_rot // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads of a position
    out = x.clone(memory_format=torch.contiguous_format)
    if spec.pairing == "neox":
        a, b = x[..., :half], x[..., half:n]
        out[..., :half] = a * cos - b * sin
        out[..., half:n] = a * sin + b * cos
    else:
        a, b = x[..., 0:n:2], x[..., 1:n:2]
        out[..., 0:n:2] = a * cos - b * sin
        out[..., 1:n:2] = a * sin + b * cos
    return out
