"""Which implementation works on a tensor."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.select import plain


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.select import triton

        return triton
    return plain
