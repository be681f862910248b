"""Compile the kernels for four generations of cards; run as a process of its own by test_candidates.py."""

import torch
from compiling import compiling

from ggufspec.kernels import overlap
from ggufspec.kernels.candidates import LARGEST
from ggufspec.kernels.candidates import triton as kernel
from ggufspec.kernels.peer.link import Link, n_words

for capability in (75, 80, 90, 120):
    overlap.overlaps = lambda x, new=capability >= 90: new
    with compiling(capability) as names:
        for size, k in ((2, 1), (3, 20), (8, LARGEST // 8)):
            link = Link.of(1, [torch.zeros(n_words(size), dtype=torch.int64) for _ in range(size)])
            x, ids = torch.zeros(192, 4096), torch.zeros(192, k, dtype=torch.int64)
            kernel.exchange(x, ids, 64, k, link)
            kernel.merge(kernel.keys(x, ids, 64, k)[None].expand(size, 192, k))
    assert names == ["exchange_kernel", "keys_kernel", "merge_kernel"] * 3, names
