"""RMS norms and gated activations. Float32 in and out; leading dimensions are free; a row never sees
another."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.norm import plain
from ggufspec.kernels.norm.plain import sigmoid, silu

__all__ = [
    "add_rms_norm", "gated_norm", "geglu", "rms_norm", "sigmoid", "sigmoid_gate", "silu", "swiglu",
]  # fmt: skip


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.norm import triton

        return triton
    return plain


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., D], weight [D]: x / sqrt(mean(x^2) + eps) * weight, eps inside the root."""
    return room(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [.., D]: (x + delta, rms_norm(x + delta)), the residual addition and the norm after it."""
    return room(x).add_rms_norm(x, delta, weight, eps)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o, z [.., d], weight [d]: rms_norm(o) * silu(z), over the last dimension."""
    return room(o).gated_norm(o, z, weight, eps)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), same shapes: the output gate of gated attention."""
    return room(x).sigmoid_gate(x, gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, same shapes."""
    return room(gate).swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, same shapes, GELU in its tanh form."""
    return room(gate).geglu(gate, up)
