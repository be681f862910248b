"""Norms and activations straight into a matmul's input: `norm` and `matmul.prepare` in one launch.

    x, a = add_rms_norm(x, delta, weight, eps)
    q, k, v = matmul(a, group)
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.prepared import plain

__all__ = ["add_rms_norm", "add_rms_norm_kept", "gated_columns", "gated_norm", "geglu", "rms_norm_pair", "swiglu"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.prepared import triton

        return triton
    return plain


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    """x, delta [.., K]: (x + delta, prepared rms_norm of it); delta None: (x, prepared rms_norm(x))."""
    return room(x).add_rms_norm(x, delta, weight, eps)


def add_rms_norm_kept(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    """`add_rms_norm` that also returns the norm as it is: (x + delta, rms_norm of it, prepared rms_norm of it)."""
    return room(x).add_rms_norm_kept(x, delta, weight, eps)


def rms_norm_pair(a: Tensor, b: Tensor, a_weight: Tensor, b_weight: Tensor, eps: float) -> Activation:
    """a, b [.., K]: prepared rows [.., 2 K] of rms_norm(a) followed by rms_norm(b)."""
    return room(a).rms_norm_pair(a, b, a_weight, b_weight, eps)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Activation:
    """o [.., n, d], z [.., n, d], weight [d]: prepared rows [.., n * d] of rms_norm(o) * silu(z) a head."""
    return room(o).gated_norm(o, z, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Activation:
    """gate, up [.., K]: prepared silu(gate) * up."""
    return room(gate).swiglu(gate, up)


def gated_columns(y: Tensor, K: int, run: int, gelu: bool = False) -> Activation:
    """y [T, 2 K or more]: `run` columns of gate and `run` of up in turn, to prepared swiglu (or geglu) of K columns."""
    return room(y).gated_columns(y, K, run, gelu)


def geglu(gate: Tensor, up: Tensor) -> Activation:
    """gate, up [.., K]: prepared gelu(gate) * up, GELU in its tanh form."""
    return room(gate).geglu(gate, up)
