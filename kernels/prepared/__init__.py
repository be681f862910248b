"""Norms and activations straight into a matmul's input: `norm` and `matmul.prepare` in one launch.

    x, a = add_rms_norm(x, delta, weight, eps)
    q, k, v = matmul(a, group)
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.prepared import plain

__all__ = ["add_rms_norm", "gated_norm", "geglu", "swiglu"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.prepared import triton

        return triton
    return plain


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    """x, delta [.., K]: (x + delta, prepared rms_norm of it); delta None: (x, prepared rms_norm(x))."""
    return room(x).add_rms_norm(x, delta, weight, eps)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Activation:
    """o [.., n, d], z [.., n, d], weight [d]: prepared rows [.., n * d] of rms_norm(o) * silu(z) a head."""
    return room(o).gated_norm(o, z, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Activation:
    """gate, up [.., K]: prepared silu(gate) * up."""
    return room(gate).swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Activation:
    """gate, up [.., K]: prepared gelu(gate) * up, GELU in its tanh form."""
    return room(gate).geglu(gate, up)
