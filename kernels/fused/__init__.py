"""Products whose result goes straight into the next product's input, in one launch where the narrow kernel runs.

    n = enter(x, attn_norm, eps)                          # x [T, D]: the first norm of a chain
    q, k, v = matmul(n, qkv)
    x, n = added(x, a, output, ffn_norm, eps, n)          # x + a Wo, and its norm
    x, n = added(x, gated(n, gate_up), down, next_norm, eps, n)

The norm of such an input is finished by the product that takes it: rows are x * weight / 2^e, and the row's mean square
arrives as partial sums of the tiles that wrote it. 2^e follows the row's size one norm earlier.
On the CPU, for prompt chunks, and where a kernel of its own is missing, the steps run one by one.
"""

import torch
from torch import Tensor

from ggufspec.kernels import prepared
from ggufspec.kernels.fused.pair import EIGHT, GatedPair, join, split
from ggufspec.kernels.matmul import Activation, WeightGroup, matmul
from ggufspec.kernels.matmul.joint import COLUMNS, ROWS, Joint

__all__ = ["GatedPair", "Joint", "added", "enter", "gated", "join", "joins", "runs_narrow", "split"]


def runs_narrow(device: torch.device) -> bool:
    """Whether the narrow kernel runs on a device."""
    if device.type != "cuda":
        return False
    from ggufspec.kernels.matmul import cuda

    return cuda.capability(device.index) >= (8, 0)


def is_narrow(x: Tensor) -> bool:
    """Whether rows on x's device, as many as x has, go through the narrow kernel."""
    if not runs_narrow(x.device):
        return False
    from ggufspec.kernels.matmul import cuda

    return 0 < x.shape[0] <= cuda.NARROW_TOKENS


def enter(x: Tensor, weight: Tensor, eps: float) -> Activation:
    """x [T, D], weight [D]: rms_norm(x) * weight as a product's input."""
    if is_narrow(x):
        from ggufspec.kernels.fused import cuda

        return cuda.enter(x, weight, eps)
    return prepared.add_rms_norm(x, None, weight, eps)[1]


def added(
    x: Tensor, a: Activation, group: WeightGroup, weight: Tensor, eps: float, before: Activation,
    joint: Joint | None = None,
) -> tuple[Tensor, Activation]:  # fmt: skip
    """x [T, D] + a W for the group's one weight [D, K], and rms_norm of that * weight as a product's input.

    before: the input, D columns, that this layer's norm gave; its product has run. joint: a W is a part of what is
    added, the other ranks have the rest; `joins` says for which rows that can be asked.
    """
    assert joint is None or joins(x, group, before)
    if before.norm is not None and is_narrow(x) and len(group.launches) == 1:
        from ggufspec.kernels.fused import cuda

        return cuda.added(x, a, group, weight, eps, before, joint)
    (y,) = matmul(a, group)
    return prepared.add_rms_norm(x, y.view(x.shape), weight, eps)


def joins(x: Tensor, group: WeightGroup, before: Activation) -> bool:
    """Whether `added` of these can sum over ranks."""
    is_chained = before.norm is not None and is_narrow(x) and len(group.launches) == 1
    return is_chained and x.shape[0] <= ROWS and x.shape[1] <= COLUMNS


def gated(a: Activation, pair: GatedPair, gelu: bool = False) -> Activation:
    """silu(a Wg) * (a Wu), or gelu in its tanh form, as a product's input of F columns."""
    if pair.launch is not None and is_narrow(a.rows):
        from ggufspec.kernels.fused import cuda

        return cuda.gated(a, pair.launch, gelu)
    if pair.launch is not None:
        from ggufspec.kernels.matmul import wide

        y, (n_rows,) = wide.multiply_launch(a, pair.launch), pair.launch.n_rows
        return prepared.gated_columns(y, n_rows // 2, EIGHT, gelu)
    gate, up = split(a, pair)
    return prepared.geglu(gate, up) if gelu else prepared.swiglu(gate, up)
