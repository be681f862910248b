"""Chained products on CUDA: the narrow kernel with an ending, and the first input of a chain."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.fused.pair import Tail
from ggufspec.kernels.matmul import Activation, WeightGroup, chain, narrow
from ggufspec.kernels.matmul.cuda import Launch, with_rest
from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.values import HEADROOM, row_place
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
    exponent = ((((squares / D + eps).to(tl.int32, bitcast=True) >> 23) - 127) >> 1) + 127 + HEADROOM
    power = (exponent << 23).to(tl.float32, bitcast=True)
    v = x * tl.load(weight_ptr + e, e < D, 0.0) / power
    v = tl.minimum(tl.maximum(v, -65504.0), 65504.0).to(tl.float16)
    tl.store(rows_ptr + row * WIDTH + row_place(e), v, e < WIDTH)
    tl.store(squares_ptr + row, squares)
    tl.store(power_ptr + row, power)


def enter(x: Tensor, weight: Tensor, eps: float) -> Activation:
    x = x.contiguous()
    T, D = x.shape
    width = n_super_blocks(D) * BLOCK
    rows = torch.empty(T, width, dtype=torch.float16, device=x.device)
    squares, power, following = torch.empty(3, T, dtype=torch.float32, device=x.device).unbind(0)
    enter_kernel[(T,)](
        x, weight, rows, squares, power, D, eps, width, triton.next_power_of_2(width), num_warps=16, **overlap(x)
    )
    return Activation(rows, D, power, Normed(squares.view(1, T), following, eps))


def added(
    x: Tensor, a: Activation, group: WeightGroup, weight: Tensor, eps: float, before: Activation
) -> tuple[Tensor, Activation]:
    assert before.norm is not None
    with torch.cuda.device(x.device):
        step, out = narrow.added_step(group.launches[0], a, x.contiguous(), weight, eps, before.norm.next_power)
        narrow.start(step)
    return out


def gated(a: Activation, launch: Launch, gelu: bool) -> Activation:
    with torch.cuda.device(a.rows.device):
        step, out = narrow.gated_step(launch, a, gelu)
        narrow.start(step)
    return out


def tail(
    x: Tensor, a: Activation, w: Tail, before: Activation
) -> tuple[Tensor, Activation, tuple[Tensor, ...]] | None:
    """All products of a tail in one launch; None where its weights or this many rows need a launch each."""
    pair, groups = w.gate_up.launch, (w.output, w.down)
    if pair is None or any(len(group.launches) != 1 for group in groups):
        return None
    (first, down), index = (group.launches[0] for group in groups), x.device.index
    if not chain.stages((first, pair, down, *w.following.launches), x.shape[0], index):
        return None
    assert before.norm is not None
    with torch.cuda.device(x.device):
        one, (x, n) = narrow.added_step(first, a, x.contiguous(), w.norm, w.eps, before.norm.next_power)
        assert n.norm is not None
        two, inner = narrow.gated_step(pair, n, w.gelu, waits=True)
        three, (x, n) = narrow.added_step(
            down, inner, x, w.following_norm, w.following_eps, n.norm.next_power, waits=True
        )
        steps, outs = [one, two, three], {}
        for k, launch in enumerate(w.following.launches):
            step, pieces = narrow.rows_step(launch, n, waits=k == 0)
            steps.append(step)
            outs.update(zip(launch.members, pieces))
        chain.run(steps)
        rest = with_rest(n, w.following, outs)
    return x, n, rest
