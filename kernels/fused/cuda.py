"""Chained products on CUDA: the narrow kernel with an ending, and the first input of a chain."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul import Activation, WeightGroup, narrow
from ggufspec.kernels.matmul.cuda import Launch
from ggufspec.kernels.matmul.joint import Joint
from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.values import bounded_half, power_near, row_place
from ggufspec.kernels.matmul.weight import Normed
from ggufspec.kernels.overlap import begin, overlap


@triton.jit
def enter_kernel(
    x_ptr, weight_ptr, rows_ptr, squares_ptr, power_ptr, D, eps,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: x * weight / power as float16 in the kernels' order, its sum of squares, and power, near its RMS."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * D + e, e < D, 0.0)
    squares = tl.sum(x * x, 0)
    power = power_near(squares / D + eps)
    v = x * tl.load(weight_ptr + e, e < D, 0.0) / power
    tl.store(rows_ptr + row * WIDTH + row_place(e), bounded_half(v), e < WIDTH)
    tl.store(squares_ptr + row, squares)
    tl.store(power_ptr + row, power)


def enter(x: Tensor, weight: Tensor, eps: float) -> Activation:
    x = x.contiguous()
    T, D = x.shape
    width = n_super_blocks(D) * BLOCK
    rows = torch.empty(T, width, dtype=torch.float16, device=x.device)
    # each begins at a whole multiple of 16 bytes: others would be other kernels
    squares, power, following = torch.empty(3, -(-T // 4) * 4, dtype=torch.float32, device=x.device)[:, :T].unbind(0)
    enter_kernel[(T,)](
        x, weight, rows, squares, power, D, eps, width, triton.next_power_of_2(width), num_warps=16, **overlap(x)
    )
    return Activation(rows, D, power, Normed(squares.view(1, T), following, eps))


def added(
    x: Tensor, a: Activation, group: WeightGroup, weight: Tensor, eps: float, before: Activation,
    joint: Joint | None,
) -> tuple[Tensor, Activation]:  # fmt: skip
    assert before.norm is not None
    with torch.cuda.device(x.device):
        return narrow.run_added(group.launches[0], a, x.contiguous(), weight, eps, before.norm.next_power, joint)


def gated(a: Activation, launch: Launch, gelu: bool) -> Activation:
    with torch.cuda.device(a.rows.device):
        return narrow.run_gated(launch, a, gelu)
