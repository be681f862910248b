"""The table of cases, and what they all draw, move and compare tensors with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CASES: dict[str, Callable[[str, bool], None]] = {}
EPS = 1e-6


def case(function: Callable[[str, bool], None]) -> Callable[[str, bool], None]:
    CASES[function.__name__] = function
    return function


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(got: Tensor, expected: Tensor, limit: float, what: str = "") -> None:
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    error = (got.cpu().double() - expected.double()).abs().max().item()
    assert error <= limit, f"{what}: off by {error}, limit {limit}"


def same(got: Tensor, expected: Tensor, what: str = "") -> None:
    different = int((got.cpu() != expected.cpu()).sum())
    assert got.shape == expected.shape and different == 0, f"{what}: {different} of {got.numel()} differ"


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)


def one(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor([value], device=device)
