"""Rotary embedding against a complex-number reference and the scaling rules of the file's keys."""

import math

import pytest
import torch

from ggufspec.kernels.rope import RopeSpec, rotate, tables


def reference(x: torch.Tensor, positions: list[int], angles: list[float], m: float, pairing: str) -> torch.Tensor:
    """x [W, H, hd] float64; angles per position of each pair."""
    out, half = x.clone(), len(angles)
    for w, p in enumerate(positions):
        for j, angle in enumerate(angles):
            a, b = (j, j + half) if pairing == "neox" else (2 * j, 2 * j + 1)
            turned = torch.complex(x[w, :, a], x[w, :, b]) * m * complex(math.cos(p * angle), math.sin(p * angle))
            out[w, :, a], out[w, :, b] = turned.real, turned.imag
    return out


def check(spec: RopeSpec, angles: list[float], m: float = 1.0, hd: int = 24) -> None:
    x = torch.randn(3, 2, hd, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = [0, 7, 100_000]
    cos, sin = tables(torch.tensor(positions), spec)
    assert cos.dtype == torch.float32 and cos.shape == (3, spec.n_rot // 2)
    out = rotate(x.float(), cos, sin, spec)
    assert torch.allclose(out.double(), reference(x, positions, angles, m, spec.pairing), atol=2e-6)


@pytest.mark.parametrize("pairing", ["neox", "norm"])
@pytest.mark.parametrize("n_rot", [16, 24])
def test_plain_angles(pairing, n_rot):
    angles = [10000.0 ** (-2 * j / n_rot) for j in range(n_rot // 2)]
    check(RopeSpec(n_rot, pairing=pairing), angles)
    check(RopeSpec(n_rot, freq_scale=0.25, pairing=pairing), [a / 4 for a in angles])


def test_factors_divide_frequencies():
    factors = torch.linspace(1, 8, 8)
    angles = [5e5 ** (-2 * j / 16) / factors[j].item() for j in range(8)]
    check(RopeSpec(16, base=5e5, factors=factors), angles)


def test_yarn():
    base, n_rot, n_ctx, s = 1e6, 16, 4096, 4.0

    def correction(r: float) -> float:
        return n_rot * math.log(n_ctx / (2 * math.pi * r)) / (2 * math.log(base))

    low, high = max(0, math.floor(correction(32))), min(n_rot - 1, math.ceil(correction(1)))
    angles = []
    for j in range(n_rot // 2):
        theta = base ** (-2 * j / n_rot)
        mix = 1 - min(1, max(0, (j - low) / max(0.001, high - low)))
        angles.append(theta / s * (1 - mix) + theta * mix)
    assert 0 < sum(a != base ** (-2 * j / n_rot) for j, a in enumerate(angles)) < n_rot // 2
    spec = RopeSpec(n_rot, base=base, freq_scale=1 / s, ext_factor=1.0, attn_factor=1.25, n_ctx_orig=n_ctx)
    check(spec, angles, m=(0.1 * math.log(s) + 1) * 1.25)


def test_text_sections():
    angles = [10000.0 ** (-2 * j / 16) for j in range(8)]
    check(RopeSpec(16, sections=(3, 3, 2, 0)), angles)
    # pairs 6 and 7 fall into the fourth section of (2, 2, 2, 2), whose position is 0 for text
    check(RopeSpec(16, sections=(2, 2, 2, 2)), angles[:6] + [0.0, 0.0])


def test_rows_are_independent():
    spec = RopeSpec(16)
    x = torch.randn(2, 9, 3, 24)
    positions = torch.arange(18).view(2, 9) * 31
    whole = rotate(x, *tables(positions, spec), spec)
    one = rotate(x[1:, 4:5], *tables(positions[1:, 4:5], spec), spec)
    assert torch.equal(one, whole[1:, 4:5])
