"""Grouped dynamic convolution inside a draft block: taps look back over the block's own rows only."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.conv import plain

__all__ = ["dynamic_conv"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.conv import triton

        return triton
    return plain


def dynamic_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Tensor:
    """out[t, c] = sum_tap (base[side, tap, c] + dyn[t, side, tap, c // (D/G)]) h[t - tap, c], rows before 0
    being 0.

    h [B, T, D] float32, dyn [B, T, 2, K, G] (projected from the sub-layer's normed input), base [2, K, D];
    side 0 before the mixer or FFN, 1 after it. Returns [B, T, D].
    """
    return room(h).dynamic_conv(h, dyn, base, side)
