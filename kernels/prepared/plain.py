"""Norms and activations followed by `prepare`: the CPU path and the oracle of the fused kernels."""

import torch
from torch import Tensor

from ggufspec.kernels import norm
from ggufspec.kernels.matmul import Activation, prepare


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    if delta is None:
        return x, prepare(flat(norm.rms_norm(x, weight, eps)))
    total, normed = norm.add_rms_norm(x, delta, weight, eps)
    return total, prepare(flat(normed))


def add_rms_norm_kept(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Activation]:
    total, normed = (x, norm.rms_norm(x, weight, eps)) if delta is None else norm.add_rms_norm(x, delta, weight, eps)
    return total, normed, prepare(flat(normed))


def rms_norm_pair(a: Tensor, b: Tensor, a_weight: Tensor, b_weight: Tensor, eps: float) -> Activation:
    return prepare(flat(torch.cat([norm.rms_norm(a, a_weight, eps), norm.rms_norm(b, b_weight, eps)], dim=-1)))


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Activation:
    return prepare(flat(norm.gated_norm(o, z, weight, eps).flatten(-2)))


def swiglu(gate: Tensor, up: Tensor) -> Activation:
    return prepare(flat(norm.swiglu(gate, up)))


def gated_columns(y: Tensor, K: int, run: int, gelu: bool) -> Activation:
    gate, up = y[:, : 2 * K].unflatten(1, (-1, 2, run)).transpose(1, 2).flatten(2).unbind(1)
    return geglu(gate, up) if gelu else swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Activation:
    return prepare(flat(norm.geglu(gate, up)))
