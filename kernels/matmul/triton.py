"""Quantized matmul in plain Triton: activations into the kernels' order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.weight import Activation


@triton.jit
def place_to_element(p):
    """Column of a super-block that stands at place p of the kernels' order."""
    return (p % 2) * 128 + (p // 8 % 4) * 32 + (p // 32 % 8) * 4 + p // 2 % 4


@triton.jit
def prepare_rows(x, rows, scale, K, x_stride, width: tl.constexpr, SIZE: tl.constexpr):
    """One row: float16 in the kernels' order, divided by the power of two that puts its maximum in 2^14..2^15."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SIZE)
    e = p // 256 * 256 + place_to_element(p % 256)
    v = tl.load(x + row * x_stride + e, mask=e < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(v), 0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(largest > 0, tl.maximum(exponent - 14, 1), 127)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rows + row * width + p, (v * up).to(tl.float16), mask=p < width)
    tl.store(scale + row, (exponent << 23).to(tl.float32, bitcast=True))


def prepare(x: Tensor) -> Activation:
    """x [T, K] float to float16 [T, S * 256] in the kernels' order, with a scale for each row."""
    n_tokens, n_columns = x.shape
    width = n_super_blocks(n_columns) * BLOCK
    rows = torch.empty((n_tokens, width), dtype=torch.float16, device=x.device)
    scale = torch.empty(n_tokens, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(width)
    if n_tokens:
        prepare_rows[(n_tokens,)](
            x, rows, scale, n_columns, x.stride(0), width, size, num_warps=max(1, min(16, size // 1024))
        )
    return Activation(rows, n_columns, scale)
