"""Norms and activations that write a matmul's input, one program a row.

A program works in the matmul's order of columns from the start, so that nothing but its loads is rearranged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.values import element_at
from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.norm.triton import sigmoid_of
from ggufspec.kernels.overlap import begin, overlap


@triton.jit
def write(v, row, p, rows_ptr, scale_ptr, WIDTH: tl.constexpr):
    """v, zero past the columns, as float16 divided by the power of two that puts its maximum in 2^14..2^15."""
    largest = tl.max(tl.abs(v), 0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(largest > 0, tl.maximum(exponent - 14, 1), 127)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rows_ptr + row * WIDTH + p, (v * up).to(tl.float16), p < WIDTH)
    tl.store(scale_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def norm_input_kernel(
    x_ptr, delta_ptr, weight_ptr, total_ptr, rows_ptr, scale_ptr, K, eps,
    ADD: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rms_norm(x [+ delta]) of one row; the sum goes to total."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SIZE)
    e = p // 256 * 256 + element_at(p % 256)
    mask = e < K
    x = tl.load(x_ptr + row * K + e, mask, 0.0)
    if ADD:
        x += tl.load(delta_ptr + row * K + e, mask, 0.0)
        tl.store(total_ptr + row * K + e, x, mask)
    scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    write(x * scale * tl.load(weight_ptr + e, mask, 0.0), row, p, rows_ptr, scale_ptr, WIDTH)


@triton.jit
def activation_input_kernel(
    a_ptr, b_ptr, rows_ptr, scale_ptr, K, a_row, b_row,
    GELU: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(a) * b or gelu(a) * b of one row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SIZE)
    e = p // 256 * 256 + element_at(p % 256)
    mask = e < K
    a = tl.load(a_ptr + row * a_row + e, mask, 0.0)
    b = tl.load(b_ptr + row * b_row + e, mask, 0.0)
    if GELU:
        v = a * sigmoid_of(1.5957691216057308 * a * (1.0 + 0.044715 * a * a)) * b
    else:
        v = a * sigmoid_of(a) * b
    write(v, row, p, rows_ptr, scale_ptr, WIDTH)


@triton.jit
def gated_input_kernel(
    o_ptr, z_ptr, weight_ptr, inverse_ptr, rows_ptr, scale_ptr, N, z_row, eps,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rms_norm(o) * silu(z) over each of N heads of D, of one row. inverse: scratch for the heads' norms."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    o = tl.load(o_ptr + (row * N + h[:, None]) * D + d[None, :], (h < N)[:, None] & (d < D)[None, :], 0.0)
    tl.store(inverse_ptr + row * N + h, tl.rsqrt(tl.sum(o * o, 1) / D + eps), h < N)
    tl.debug_barrier()
    p = tl.arange(0, SIZE)
    e = p // 256 * 256 + element_at(p % 256)
    mask = e < N * D
    x = tl.load(o_ptr + row * N * D + e, mask, 0.0) * tl.load(inverse_ptr + row * N + e // D, mask, 0.0)
    z = tl.load(z_ptr + row * z_row + e, mask, 0.0)
    v = x * tl.load(weight_ptr + e % D, mask, 0.0) * (z * sigmoid_of(z))
    write(v, row, p, rows_ptr, scale_ptr, WIDTH)


def rows_of(x: Tensor, n: int) -> tuple[Tensor, int]:
    """x [.., n columns] as rows with contiguous columns, and the stride of a row."""
    x = x.reshape(-1, n)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


class Target:
    """A new activation of T rows of K columns, and what kernels that fill it are launched with."""

    def __init__(self, T: int, K: int, x: Tensor):
        width = n_super_blocks(K) * BLOCK
        self.size = triton.next_power_of_2(width)
        self.rows = torch.empty(T, width, dtype=torch.float16, device=x.device)
        self.scale = torch.empty(T, dtype=torch.float32, device=x.device)
        self.activation = Activation(self.rows, K, self.scale)
        warps = max(1, min(16, self.size // 1024))
        self.constants = {"WIDTH": width, "SIZE": self.size, "num_warps": warps, **overlap(x)}


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    K = x.shape[-1]
    x = x.contiguous()
    to = Target(x.numel() // K, K, x)
    total = x if delta is None else torch.empty_like(x)
    norm_input_kernel[(x.numel() // K,)](
        x, x if delta is None else delta.contiguous(), weight, total, to.rows, to.scale, K, eps,
        ADD=delta is not None, **to.constants,
    )  # fmt: skip
    return total, to.activation


def activation(gate: Tensor, up: Tensor, gelu: bool) -> Activation:
    K = gate.shape[-1]
    (gate, gate_row), (up, up_row) = rows_of(gate, K), rows_of(up, K)
    to = Target(gate.shape[0], K, gate)
    activation_input_kernel[(gate.shape[0],)](
        gate, up, to.rows, to.scale, K, gate_row, up_row, GELU=gelu, **to.constants
    )
    return to.activation


def swiglu(gate: Tensor, up: Tensor) -> Activation:
    return activation(gate, up, False)


def geglu(gate: Tensor, up: Tensor) -> Activation:
    return activation(gate, up, True)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Activation:
    N, D = o.shape[-2:]
    o = o.contiguous()
    z, z_row = rows_of(z, N * D)
    T = o.numel() // (N * D)
    to = Target(T, N * D, o)
    gated_input_kernel[(T,)](
        o, z, weight, torch.empty(T, N, dtype=torch.float32, device=o.device), to.rows, to.scale, N, z_row, eps,
        D=D, HEADS=triton.next_power_of_2(N), BLOCK_D=triton.next_power_of_2(D), **to.constants,
    )  # fmt: skip
    return to.activation
