"""A borrowed head, and what p_min is compared with where a drafter goes by probability."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.select import top_k_softmax
from ..models.base import Head, Norm, Opening

N_CANDIDATES = 10  # llama.cpp's drafters normalize over their ten best tokens


def head_opening(head: Head, norm: Norm, device: torch.device) -> Opening | None:
    """A borrowed head as what a drafter's last layer is followed by, where all of it lies on the drafter's device."""
    return Opening(norm, head.group) if head.device == device and head.bounds is None else None


def first_share(logits: Tensor, p_min: float) -> Tensor:
    """logits [.., V]: share of the best among the ten best. Ones where nothing would be compared with it."""
    if p_min <= 0.0:
        return torch.ones(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    shares, _ = top_k_softmax(logits, min(N_CANDIDATES, logits.shape[-1]))
    return shares[..., 0]
