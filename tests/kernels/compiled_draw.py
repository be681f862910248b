"""Compile the kernel for four generations of cards; run as a process of its own by test_draw.py."""

import torch
from compiling import compiling

from ggufspec.kernels import overlap
from ggufspec.kernels.draw import LARGEST_K, Limits
from ggufspec.kernels.draw import triton as kernel

for capability in (75, 80, 90, 120):
    overlap.overlaps = lambda x, new=capability >= 90: new
    with compiling(capability) as names:
        for K in (1, 40, LARGEST_K):
            number, count = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64)
            limits = Limits(count, number, count, number, number, count)
            kernel.draw(torch.zeros(3, K), torch.zeros(3, K, dtype=torch.int64), limits, count)
    assert names == ["draw_kernel"] * 3
