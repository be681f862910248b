"""Logits for choices between ranks, the same in every process."""

import torch


def logits_of(call: int, T: int, V: int) -> torch.Tensor:
    """Few different numbers, so that there are ties within and across ranks; a row of zeros of both signs, one of -inf
    but for a few."""
    generator = torch.Generator().manual_seed(call)
    x = torch.randint(-8, 8, (T, V), generator=generator) / 4
    x[T // 2] = torch.where(torch.rand(V, generator=generator) < 0.5, 0.0, -0.0)
    x[T - 1, torch.rand(V, generator=generator) < 0.9] = -torch.inf
    return x
