"""Norms and activations that write a matmul's input.

Columns are loaded in file order and brought into the matmul's order in registers, so that loads and stores are whole.
Norms take one program a row, which scales it by a power of two of its own as `prepare` does. Everything else is cut
into pieces of a row and divided by `FIXED_SCALE`, and so is all of a batch wider than the narrow kernel takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.cuda import NARROW_TOKENS
from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.values import FIXED_SCALE, fixed_half, row_place
from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.norm.triton import sigmoid_of
from ggufspec.kernels.overlap import begin, overlap, release, wait

PIECE = 1024  # columns a program of an activation takes
GATED_PIECE = 512  # of a gated norm


@triton.jit
def in_order(v, SIZE: tl.constexpr):
    """v [SIZE], a multiple of 256 columns in file order, to the matmul's order (see `repack.order`)."""
    v = tl.reshape(v, (SIZE // 256, 2, 4, 8, 4))
    return tl.reshape(tl.permute(v, (0, 3, 2, 4, 1)), (SIZE,))


@triton.jit
def write_row(v, row, rows_ptr, scale_ptr, FIXED: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """A whole row v, zero past its columns: float16 over the power of two that puts its maximum in 2^14..2^15."""
    if FIXED:
        write_piece(v, row, 0, rows_ptr, scale_ptr, WIDTH, SIZE)
    else:
        largest = tl.max(tl.abs(v), 0)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.where(largest > 0, tl.maximum(exponent - 14, 1), 127)
        up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        p = tl.arange(0, SIZE)
        tl.store(rows_ptr + row * WIDTH + p, in_order((v * up).to(tl.float16), SIZE), p < WIDTH)
        tl.store(scale_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def write_piece(v, row, piece, rows_ptr, scale_ptr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Piece number `piece` of a row, zero past its columns."""
    p = piece * SIZE + tl.arange(0, SIZE)
    tl.store(rows_ptr + row * WIDTH + p, in_order(fixed_half(v), SIZE), p < WIDTH)
    if piece == 0:
        tl.store(scale_ptr + row, FIXED_SCALE)


@triton.jit
def norm_input_kernel(
    x_ptr, delta_ptr, weight_ptr, total_ptr, normed_ptr, rows_ptr, scale_ptr, K, eps,
    ADD: tl.constexpr, KEEP: tl.constexpr, FIXED: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rms_norm(x [+ delta]) of one row; the sum goes to total and, if KEEP, the norm as it is to normed."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, SIZE)
    mask = e < K
    weight = tl.load(weight_ptr + e, mask, 0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * K + e, mask, 0.0)
    if ADD:
        x += tl.load(delta_ptr + row * K + e, mask, 0.0)
        tl.store(total_ptr + row * K + e, x, mask)
    v = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
    if KEEP:
        tl.store(normed_ptr + row * K + e, v, mask)
    write_row(v, row, rows_ptr, scale_ptr, FIXED, WIDTH, SIZE)


@triton.jit
def pair_input_kernel(
    a_ptr, b_ptr, a_weight_ptr, b_weight_ptr, rows_ptr, scale_ptr, K, eps,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, half): columns 0..K are rms_norm(a), columns K..2 K rms_norm(b)."""
    release(PDL)
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, SIZE)
    mask = e < K
    if half == 0:
        weight = tl.load(a_weight_ptr + e, mask, 0.0)
        wait(PDL)
        x = tl.load(a_ptr + row * K + e, mask, 0.0)
    else:
        weight = tl.load(b_weight_ptr + e, mask, 0.0)
        wait(PDL)
        x = tl.load(b_ptr + row * K + e, mask, 0.0)
    v = fixed_half(x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight)
    at = rows_ptr + row * WIDTH + row_place(half * K + e)
    if half == 0:
        tl.store(at, v, mask)
        tl.store(scale_ptr + row, FIXED_SCALE)
    else:
        tl.store(at, v, e < WIDTH - K)  # zeros past the columns


@triton.jit
def activation_input_kernel(
    a_ptr, b_ptr, rows_ptr, scale_ptr, K, a_row, b_row,
    GELU: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, piece): silu(a) * b or gelu(a) * b. RUN > 0: after each RUN columns, a and b skip as many."""
    begin(PDL)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = piece * SIZE + tl.arange(0, SIZE)
    mask = e < K
    at = e + e // RUN * RUN if RUN else e
    a = tl.load(a_ptr + row * a_row + at, mask, 0.0)
    b = tl.load(b_ptr + row * b_row + at, mask, 0.0)
    if GELU:
        v = a * sigmoid_of(1.5957691216057308 * a * (1.0 + 0.044715 * a * a)) * b
    else:
        v = a * sigmoid_of(a) * b
    write_piece(v, row, piece, rows_ptr, scale_ptr, WIDTH, SIZE)


@triton.jit
def gated_input_kernel(
    o_ptr, z_ptr, weight_ptr, rows_ptr, scale_ptr, N, z_row, eps,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, piece): rms_norm(o) * silu(z) over each of HEADS of the row's N heads of D."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    weight = tl.load(weight_ptr + d, d < D, 0.0)
    wait(PDL)
    e = h * D + d
    mask = (h < N) & (d < D)
    o = tl.load(o_ptr + row * N * D + e, mask, 0.0)
    z = tl.load(z_ptr + row * z_row + e, mask, 0.0)
    v = o * tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None] * weight * (z * sigmoid_of(z))
    tl.store(rows_ptr + row * WIDTH + row_place(e), fixed_half(v), (e < WIDTH) & (d < D))
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + row, FIXED_SCALE)


def rows_of(x: Tensor, n: int) -> tuple[Tensor, int]:
    """x [.., n columns] as rows with contiguous columns, and the stride of a row."""
    x = x.reshape(-1, n)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


class Target:
    """A new activation of T rows of K columns on x's device, for kernels to fill."""

    def __init__(self, T: int, K: int, x: Tensor):
        self.width = n_super_blocks(K) * BLOCK
        self.rows = torch.empty(T, self.width, dtype=torch.float16, device=x.device)
        self.scale = torch.empty(T, dtype=torch.float32, device=x.device)
        fixed = float(FIXED_SCALE.value) if T > NARROW_TOKENS else None
        self.activation = Activation(self.rows, K, self.scale, fixed=fixed)


def whole_row(width: int) -> dict[str, int]:
    """Launch constants of a kernel that takes a row a program."""
    size = triton.next_power_of_2(width)
    return {"WIDTH": width, "SIZE": size, "num_warps": max(1, min(16, size // 256))}


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, keep: bool) -> tuple[Tensor, Tensor, Activation]:
    """(sum, norm, prepared norm); without `keep` the second is not computed."""
    K = x.shape[-1]
    x = x.contiguous()
    T = x.numel() // K
    to = Target(T, K, x)
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x) if keep else x
    norm_input_kernel[(T,)](
        x, x if delta is None else delta.contiguous(), weight, total, normed, to.rows, to.scale, K, eps,
        ADD=delta is not None, KEEP=keep, FIXED=T > NARROW_TOKENS, **whole_row(to.width), **overlap(x),
    )  # fmt: skip
    return total, normed, to.activation


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    total, _, a = norm(x, delta, weight, eps, False)
    return total, a


def add_rms_norm_kept(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    return norm(x, delta, weight, eps, True)


def rms_norm_pair(a: Tensor, b: Tensor, a_weight: Tensor, b_weight: Tensor, eps: float) -> Activation:
    K = a.shape[-1]
    a, b = a.contiguous(), b.contiguous()
    T = a.numel() // K
    to = Target(T, 2 * K, a)
    size = triton.next_power_of_2(to.width - K)  # a half and the zeros after it
    pair_input_kernel[(T, 2)](
        a, b, a_weight, b_weight, to.rows, to.scale, K, eps,
        WIDTH=to.width, SIZE=size, num_warps=max(1, min(16, size // 256)), **overlap(a),
    )  # fmt: skip
    return to.activation


def activation(gate: Tensor, up: Tensor, gelu: bool) -> Activation:
    K = gate.shape[-1]
    (gate, gate_row), (up, up_row) = rows_of(gate, K), rows_of(up, K)
    return launch_activation(gate, up, K, gate_row, up_row, gelu, 0)


def launch_activation(
    gate: Tensor, up: Tensor, K: int, gate_row: int, up_row: int, gelu: bool, run: int
) -> Activation:
    T = gate.shape[0]
    to = Target(T, K, gate)
    size = min(PIECE, triton.next_power_of_2(to.width))
    activation_input_kernel[(T, triton.cdiv(to.width, size))](
        gate, up, to.rows, to.scale, K, gate_row, up_row,
        GELU=gelu, RUN=run, WIDTH=to.width, SIZE=size, num_warps=4, **overlap(gate),
    )  # fmt: skip
    return to.activation


def swiglu(gate: Tensor, up: Tensor) -> Activation:
    return activation(gate, up, False)


def geglu(gate: Tensor, up: Tensor) -> Activation:
    return activation(gate, up, True)


def gated_columns(y: Tensor, K: int, run: int, gelu: bool) -> Activation:
    y = y if y.stride(1) == 1 else y.contiguous()
    return launch_activation(y, y[:, run:], K, y.stride(0), y.stride(0), gelu, run)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Activation:
    N, D = o.shape[-2:]
    o = o.contiguous()
    z, z_row = rows_of(z, N * D)
    T = o.numel() // (N * D)
    to = Target(T, N * D, o)
    block_d = triton.next_power_of_2(D)
    heads = max(1, GATED_PIECE // block_d)
    gated_input_kernel[(T, triton.cdiv(to.width, heads * D))](
        o, z, weight, to.rows, to.scale, N, z_row, eps,
        D=D, HEADS=heads, BLOCK_D=block_d, WIDTH=to.width, num_warps=4, **overlap(o),
    )  # fmt: skip
    return to.activation
