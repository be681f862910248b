"""The grouped dynamic convolution as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

BLOCK = 512


@triton.jit
def dynamic_conv_kernel(
    h_ptr, dyn_ptr, base_ptr, out_ptr, T, D, G,
    SIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, b = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    group = c // (D // G)
    at = (b * T + row).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        seen = mask & (row >= tap)
        weight = tl.load(base_ptr + (SIDE * K + tap) * D + c, mask, 0.0)
        weight += tl.load(dyn_ptr + ((at * 2 + SIDE) * K + tap) * G + group, mask, 0.0)
        total += weight * tl.load(h_ptr + (at - tap) * D + c, seen, 0.0)
    tl.store(out_ptr + at * D + c, total, mask)


def dynamic_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Tensor:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    dynamic_conv_kernel[(T, triton.cdiv(D, BLOCK), B)](
        h.contiguous(), dyn.contiguous(), base.contiguous(), out, T, D, G, side, K, BLOCK, **overlap(h)
    )
    return out
