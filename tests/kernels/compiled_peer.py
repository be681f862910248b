"""Compile the sums for four generations of cards; run as a process of its own by test_peer_sums.py."""

import torch
from compiling import compiling

from ggufspec.kernels import overlap
from ggufspec.kernels.peer import triton as kernel
from ggufspec.kernels.peer.link import Link, n_words

for capability in (75, 80, 90, 120):
    overlap.overlaps = lambda x, new=capability >= 90: new
    with compiling(capability) as names:
        for size in (2, 4):
            link = Link.of(1, [torch.zeros(n_words(size), dtype=torch.int64) for _ in range(size)])
            x = torch.zeros(3, 5120)
            kernel.sum_parts(x, link)
            kernel.sum_add_rms_norm(x, x, x[0], 1e-6, link)
    assert names == ["sum_kernel", "sum_norm_kernel"] * 2, names
