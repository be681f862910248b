"""Rotary position embedding: one table of cosines and sines a step, shared by all layers with the same
spec."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.rope import plain
from ggufspec.kernels.rope.plain import Pairing, RopeSpec

__all__ = ["Pairing", "RopeSpec", "rotate", "tables"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.rope import triton

        return triton
    return plain


def tables(positions: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    """positions [..] int64 to (cos, sin), each float32 [.., n_rot/2]; angles are computed in float64."""
    return room(positions).tables(positions, spec)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RopeSpec) -> Tensor:
    """x [.., H, hd] float32 with tables [.., n_rot/2] to a new tensor of x's shape."""
    return room(x).rotate(x, cos, sin, spec)
