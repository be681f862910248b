"""Compile products that sum over ranks for three generations of cards; run as a process of its own by test_fused.py."""

import torch
from compiling import compiling
from random_blocks import for_kernels, random_raw

from ggufspec.kernels.matmul import cuda, narrow, triton
from ggufspec.kernels.matmul.joint import Joint

D, F, T = 256, 512, 3

for capability in (80, 90, 120):
    narrow.card = lambda index: (68, 100 << 10, 99 << 10)
    for module in (cuda, narrow):
        module.capability = lambda index, c=capability: divmod(c, 10)
    with compiling(capability) as names:
        for size in (2, 3):
            for type_name in ("Q4_K", "Q8_0"):
                launch = cuda.fuse((for_kernels(random_raw(type_name, D, F, seed=1), type_name, D, F),)).launches[0]
                boxes = torch.zeros(size, dtype=torch.int64)
                joint = Joint(1, size, boxes, 1, launch.config)
                a = triton.prepare(torch.zeros(T, F), pdl=False)
                total, n = narrow.run_added(launch, a, torch.zeros(T, D), torch.ones(D), 1e-6, torch.ones(T), joint)
                assert total.shape == (T, D) and n.norm is not None
    assert names == ["prepare_rows", "narrow"] * 4, names
