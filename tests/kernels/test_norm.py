"""Norms and gated activations: float64 references, and the same bits whatever rows stand beside a row."""

import oracles
import pytest
import torch

from ggufspec.kernels import norm

EPS = 1e-6


def rows(T: int, D: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("D", [32, 100, 1280, 5120])
def test_norms_equal_float64(D):
    x, delta, z, weight = rows(7, D), rows(7, D, 1), rows(7, D, 2), rows(1, D, 3)[0]
    expected = oracles.rms_norm(x, weight, EPS)
    assert torch.allclose(norm.rms_norm(x, weight, EPS).double(), expected, rtol=1e-6, atol=1e-6)
    total, normed = norm.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert torch.allclose(normed.double(), oracles.rms_norm(x + delta, weight, EPS), rtol=1e-6, atol=1e-6)
    gated = expected * z.double() * torch.sigmoid(z.double())
    assert torch.allclose(norm.gated_norm(x, z, weight, EPS).double(), gated, rtol=2e-6, atol=1e-6)


def test_eps_is_inside_the_root():
    x = torch.zeros(1, 4)
    x[0, 0] = 1e-3
    expected = 1e-3 / (1e-6 / 4 + 1e-2) ** 0.5
    assert norm.rms_norm(x, torch.ones(4), 1e-2)[0, 0].item() == pytest.approx(expected, rel=1e-6)


def test_activations_equal_float64():
    gate, up = rows(9, 77), rows(9, 77, 1)
    g, u = gate.double(), up.double()
    assert torch.allclose(norm.swiglu(gate, up).double(), g * torch.sigmoid(g) * u, rtol=2e-6, atol=1e-6)
    expected = torch.nn.functional.gelu(g, approximate="tanh") * u
    assert torch.allclose(norm.geglu(gate, up).double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(norm.sigmoid_gate(gate, up).double(), g * torch.sigmoid(u), rtol=2e-6, atol=1e-6)


def test_swiglu_saturates_without_nan():
    gate = torch.tensor([[-200.0, -90.0, 90.0, 200.0]])
    out = norm.swiglu(gate, torch.ones_like(gate))[0]
    assert out[2:].tolist() == [90.0, 200.0]
    assert out[:2].abs().max() < 1e-30  # and not NaN


@pytest.mark.parametrize("D", [33, 64, 1000, 5120])
def test_a_row_does_not_see_its_neighbours(D):
    x, y, weight = rows(40, D), rows(40, D, 1), rows(1, D, 2)[0]
    functions = {
        "rms_norm": lambda a, b: norm.rms_norm(a, weight, EPS),
        "add_rms_norm": lambda a, b: norm.add_rms_norm(a, b, weight, EPS)[1],
        "gated_norm": lambda a, b: norm.gated_norm(a, b, weight, EPS),
        "swiglu": norm.swiglu,
        "geglu": norm.geglu,
        "sigmoid_gate": norm.sigmoid_gate,
    }
    for name, function in functions.items():
        whole = function(x, y)
        for start, n in ((0, 1), (3, 2), (5, 7), (39, 1), (16, 16)):
            part = function(x[start : start + n].clone(), y[start : start + n].clone())
            assert torch.equal(part, whole[start : start + n]), (name, start, n)
