"""The kernels in Triton's interpreter against their twins; run as a process of its own by test_follow.py."""

import interpreter  # noqa: F401  # before any kernel
import torch

from ggufspec.kernels.follow import plain
from ggufspec.kernels.follow import triton as kernel


def check() -> None:
    g = torch.Generator().manual_seed(0)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g)

    for B, W in ((1, 1), (3, 1), (2, 8), (5, 17)):
        values = numbers(50, 4, 6)
        values[2] -= 10  # no room left
        slots = torch.randperm(6, generator=g)[:B]
        table = torch.stack([slots, numbers(9, B), numbers(2, B), *numbers(50, 4, B)])
        taken = kernel.take(table, values)
        assert torch.equal(taken, plain.take(table, values)), (B, W)
        tokens, n_rows = numbers(1000, B, W + 1)[:, :W], 1 + numbers(W, B)
        n_rows[1::2] = 0  # padding
        n_accepted = (n_rows - 1) // 2
        mine, theirs = values.clone(), values.clone()
        shown = kernel.advance(mine, taken, slots, tokens, n_accepted, n_rows)
        assert torch.equal(shown, plain.advance(theirs, taken, slots, tokens, n_accepted, n_rows)), (B, W)
        assert torch.equal(mine, theirs), (B, W)


check()
