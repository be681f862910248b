"""Norms and gated activations in PyTorch: the CPU path and the oracle of the Triton kernels.

A row's result does not depend on its neighbours. Sums run over the last dimension of a contiguous tensor, and
only functions that give an element the same bits wherever it stands are used: torch.exp does, torch.sigmoid
and torch.nn.functional.silu do not (their vector body and scalar tail round differently).
"""

import torch
from torch import Tensor

GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[.., D] to [.., 1] float32: 1 / sqrt(mean(x^2) + eps), squares summed in float64."""
    squares = x.double().square().sum(-1, keepdim=True)
    return (squares / x.shape[-1] + eps).rsqrt().float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float().contiguous()
    return x * inverse_rms(x, eps) * weight


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm(total, weight, eps)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(o, weight, eps) * silu(z)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * sigmoid(gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    inner = GELU_SCALE * gate * (1.0 + 0.044715 * gate * gate)
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up
