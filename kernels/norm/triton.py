"""Norms and gated activations as Triton kernels.

A tile holds a number of rows that depends on the row length alone, and a row is reduced inside its own tile line,
so its bits do not depend on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

TILE = 1024  # elements a program takes of short rows
FLAT = 1024  # elements a program takes of elementwise work


@triton.jit
def sigmoid_of(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["T"])
def norm_kernel(
    x_ptr, delta_ptr, gate_ptr, weight_ptr, total_ptr, out_ptr, T, D, eps,
    ADD: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = rms_norm(x [+ delta]) [* silu(gate)] for ROWS rows of D <= BLOCK elements."""
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < T) & (column < D)
    at = row.to(tl.int64) * D + column
    x = tl.load(x_ptr + at, mask, 0.0)
    if ADD:
        x += tl.load(delta_ptr + at, mask, 0.0)
        tl.store(total_ptr + at, x, mask)
    mean = tl.sum(x * x, 1) / D
    scale = tl.rsqrt(mean + eps)
    out = x * scale[:, None] * tl.load(weight_ptr + column, column < D, 0.0)
    if GATE:
        z = tl.load(gate_ptr + at, mask, 0.0)
        out = out * (z * sigmoid_of(z))
    tl.store(out_ptr + at, out, mask)


@triton.jit
def activation_kernel(a_ptr, b_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """KIND 0: silu(a) * b, 1: gelu(a) * b, 2: a * sigmoid(b)."""
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    a = tl.load(a_ptr + at, mask, 0.0)
    b = tl.load(b_ptr + at, mask, 0.0)
    if KIND == 0:
        out = a * sigmoid_of(a) * b
    elif KIND == 1:
        inner = 0.7978845608028654 * a * (1.0 + 0.044715 * a * a)
        out = a * sigmoid_of(2.0 * inner) * b  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
    else:
        out = a * sigmoid_of(b)
    tl.store(out_ptr + at, out, mask)


def launch_norm(x: Tensor, delta: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float):
    x = x.float().contiguous()
    D = x.shape[-1]
    T = x.numel() // D
    out = torch.empty_like(x)
    total = torch.empty_like(x) if delta is not None else x
    block = triton.next_power_of_2(D)
    rows = max(1, TILE // block)
    norm_kernel[(triton.cdiv(T, rows),)](
        x, x if delta is None else delta.contiguous(), x if gate is None else gate.contiguous(), weight, total, out,
        T, D, eps, delta is not None, gate is not None, rows, block, num_warps=8 if block >= 4096 else 4, **overlap(x),
    )  # fmt: skip
    return total, out


def launch_activation(a: Tensor, b: Tensor, kind: int) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    n = a.numel()
    activation_kernel[(triton.cdiv(n, FLAT),)](a, b, out, n, kind, FLAT, **overlap(a))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, None, None, weight, eps)[1]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return launch_norm(x, delta, None, weight, eps)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(o, None, z, weight, eps)[1]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return launch_activation(gate, up, 0)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return launch_activation(gate, up, 1)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return launch_activation(x, gate, 2)
