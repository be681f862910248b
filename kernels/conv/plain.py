"""DFlash2's grouped dynamic convolution in PyTorch: the CPU path and the oracle of the Triton kernel."""

import torch
from torch import Tensor


def dynamic_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Tensor:
    B, T, D = h.shape
    K, G = dyn.shape[3:]
    size = D // G
    out = torch.zeros_like(h)
    for tap in range(min(K, T)):
        weight = base[side, tap] + dyn[:, tap:, side, tap].repeat_interleave(size, -1)
        out[:, tap:] += weight * h[:, : T - tap]
    return out
