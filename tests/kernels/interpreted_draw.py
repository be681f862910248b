"""The kernel in Triton's interpreter against its twin; run as a process of its own by test_draw.py."""

import interpreter  # noqa: F401  # before any kernel
import torch

from ggufspec.kernels.draw import Limits, plain
from ggufspec.kernels.draw import triton as kernel


def between(low: float, high: float, n: int, g: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(n, generator=g, dtype=torch.float64)


def check() -> None:
    g = torch.Generator().manual_seed(0)
    for R, K in ((7, 64), (5, 40), (3, 1), (4, 300)):
        values = (torch.randn(R, K, generator=g) * 4).sort(descending=True).values
        values[0, K // 2 :] = float("-inf")
        if R > 6:
            values[1] = float("-inf")
        ids = torch.stack([torch.randperm(5000, generator=g)[:K] for _ in range(R)])
        for case in range(6):
            limits = Limits(
                key=torch.randint(-(2**62), 2**62, (R,), generator=g),
                temperature=between(-0.5, 2.0, R, g),
                top_k=torch.randint(1, K + 1, (R,), generator=g),
                top_p=between(0.0, 1.3, R, g),
                min_p=between(-0.1, 0.3, R, g),
                min_keep=torch.randint(1, 4, (R,), generator=g),
            )
            positions = torch.randint(0, 2**40, (R,), generator=g)
            tokens, w = kernel.draw(values, ids, limits, positions)
            expected, expected_w = plain.draw(values, ids, limits, positions)
            assert torch.equal(tokens, expected), (R, K, case)
            # exp may differ in its last bit, which moves a weight by one
            assert ((w - expected_w).abs() <= 1).all() and torch.equal(w > 0, expected_w > 0)


check()
