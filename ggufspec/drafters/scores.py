"""Logits of a borrowed head, and what p_min is compared with where a drafter goes by probability."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.matmul import Activation, matmul
from ..kernels.norm import rms_norm
from ..kernels.select import top_k_softmax
from ..models.base import Head, Norm

N_CANDIDATES = 10  # llama.cpp's drafters normalize over their ten best tokens


def head_logits(head: Head, x: Tensor, n: Activation, norm: Norm, device: torch.device) -> Tensor:
    """Stream x [B, T, D] and its norm, B*T prepared rows, to logits [B, T, V] on `device`, wherever the head lies."""
    if head.device != x.device or head.bounds is not None:
        return head(rms_norm(x, norm.weight, norm.eps)).to(device)
    (out,) = matmul(n, head.group)
    return out.view(*x.shape[:-1], -1).to(device)


def first_share(logits: Tensor, p_min: float) -> Tensor:
    """logits [.., V]: share of the best among the ten best. Ones where nothing would be compared with it."""
    if p_min <= 0.0:
        return torch.ones(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    shares, _ = top_k_softmax(logits, min(N_CANDIDATES, logits.shape[-1]))
    return shares[..., 0]
