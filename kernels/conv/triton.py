"""The grouped dynamic convolution as Triton kernels: alone, into a matmul's input, and up to the next norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.cuda import NARROW_TOKENS
from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.overlap import begin, overlap, release, wait
from ggufspec.kernels.prepared.triton import Target, whole_row, write_piece, write_row

BLOCK = 512


@triton.jit
def convolved(
    h_ptr, dyn_ptr, base_ptr, at, row, c, mask, D,
    SIZE: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels c of row number `row` of its block, `at` of all rows. SIZE: channels of a group."""
    G = D // SIZE
    group = c // SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        weight = tl.load(base_ptr + (SIDE * K + tap) * D + c, mask, 0.0)
        weight += tl.load(dyn_ptr + ((at * 2 + SIDE) * K + tap) * G + group, mask, 0.0)
        total += weight * tl.load(h_ptr + (at - tap) * D + c, mask & (row >= tap), 0.0)
    return total


@triton.jit
def dynamic_conv_kernel(
    h_ptr, dyn_ptr, base_ptr, out_ptr, T, D,
    GROUP: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of all, piece)."""
    begin(PDL)
    at = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    out = convolved(h_ptr, dyn_ptr, base_ptr, at, at % T, c, mask, D, GROUP, SIDE, K, BLOCK)
    tl.store(out_ptr + at * D + c, out, mask)


@triton.jit
def conv_input_kernel(
    h_ptr, dyn_ptr, base_ptr, rows_ptr, scale_ptr, T, D,
    GROUP: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`dynamic_conv_kernel` into a matmul's input."""
    begin(PDL)
    at, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = piece * BLOCK + tl.arange(0, BLOCK)
    v = convolved(h_ptr, dyn_ptr, base_ptr, at, at % T, c, c < D, D, GROUP, SIDE, K, BLOCK)
    write_piece(v, at, piece, rows_ptr, scale_ptr, WIDTH, BLOCK)


@triton.jit
def conv_norm_kernel(
    x_ptr, h_ptr, dyn_ptr, base_ptr, weight_ptr, total_ptr, normed_ptr, rows_ptr, scale_ptr, T, D, eps,
    GROUP: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, FIXED: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): x + the convolution of h, and its norm, both as it is and into a matmul's input."""
    release(PDL)
    at = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, SIZE)
    mask = c < D
    weight = tl.load(weight_ptr + c, mask, 0.0)
    wait(PDL)
    x = tl.load(x_ptr + at * D + c, mask, 0.0)
    x += convolved(h_ptr, dyn_ptr, base_ptr, at, at % T, c, mask, D, GROUP, SIDE, K, SIZE)
    tl.store(total_ptr + at * D + c, x, mask)
    v = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    tl.store(normed_ptr + at * D + c, v, mask)
    write_row(v, at, rows_ptr, scale_ptr, FIXED, WIDTH, SIZE)


def dynamic_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Tensor:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    dynamic_conv_kernel[(B * T, triton.cdiv(D, BLOCK))](
        h.contiguous(), dyn.contiguous(), base.contiguous(), out, T, D, D // G, side, K, BLOCK, **overlap(h)
    )
    return out


def prepared_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Activation:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    to = Target(B * T, D, h)
    conv_input_kernel[(B * T, triton.cdiv(to.width, BLOCK))](
        h.contiguous(), dyn.contiguous(), base.contiguous(), to.rows, to.scale, T, D,
        GROUP=D // G, SIDE=side, K=K, WIDTH=to.width, BLOCK=BLOCK, **overlap(h),
    )  # fmt: skip
    return to.activation


def add_conv_norm(
    x: Tensor, h: Tensor, dyn: Tensor, base: Tensor, side: int, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    to = Target(B * T, D, h)
    total, normed = (torch.empty(B, T, D, dtype=torch.float32, device=h.device) for _ in range(2))
    conv_norm_kernel[(B * T,)](
        x.contiguous(), h.contiguous(), dyn.contiguous(), base.contiguous(), weight, total, normed, to.rows, to.scale,
        T, D, eps, GROUP=D // G, SIDE=side, K=K, FIXED=B * T > NARROW_TOKENS, **whole_row(to.width), **overlap(h),
    )  # fmt: skip
    return total, normed, to.activation
