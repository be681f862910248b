"""Grouped dynamic convolution inside a draft block: taps look back over the block's own rows only."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.conv import plain
from ggufspec.kernels.matmul import Activation

__all__ = ["add_conv_norm", "dynamic_conv", "prepared_conv"]


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


def prepared_conv(h: Tensor, dyn: Tensor, base: Tensor, side: int) -> Activation:
    """`dynamic_conv`, prepared: B*T rows."""
    return room(h).prepared_conv(h, dyn, base, side)


def add_conv_norm(
    x: Tensor, h: Tensor, dyn: Tensor, base: Tensor, side: int, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    """x [B, T, D] plus `dynamic_conv` of h, rms_norm (weight [D]) of the sum, and that prepared."""
    return room(h).add_conv_norm(x, h, dyn, base, side, weight, eps)
