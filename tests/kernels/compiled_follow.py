"""Compile the kernels for four generations of cards; run as a process of its own by test_follow.py."""

import torch
from compiling import compiling

from ggufspec.kernels import overlap
from ggufspec.kernels.follow import triton as kernel

for capability in (75, 80, 90, 120):
    overlap.overlaps = lambda x, new=capability >= 90: new
    with compiling(capability) as names:
        for W in (1, 8, 17):
            values, n = torch.zeros(4, 24, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
            taken = kernel.take(torch.zeros(7, 3, dtype=torch.int64), values)
            kernel.advance(values, taken, n, torch.zeros(3, W, dtype=torch.int64), n, n)
    assert names == ["take_values_kernel", "advance_kernel"] * 3
