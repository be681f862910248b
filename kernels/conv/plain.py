"""DFlash2's grouped dynamic convolution in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor

from ggufspec.kernels.matmul import Activation, prepare
from ggufspec.kernels.prepared import plain as prepared


def dynamic_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Tensor:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    size = D // G
    out = torch.zeros_like(h)
    for tap in range(min(K, T)):
        weight = base[side, tap] + dyn[:, tap:, side, tap].repeat_interleave(size, -1)
        out[:, tap:] += weight * h[:, : T - tap]
    return out


def prepared_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Activation:
    return prepare(dynamic_conv(h, dyn, base, side).flatten(0, 1))


def add_conv_norm(
    x: Tensor, h: Tensor, dyn: Tensor, base: Tensor, side: int, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    return prepared.add_rms_norm_kept(x, dynamic_conv(h, dyn, base, side), weight, eps)
