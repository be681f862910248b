"""A borrowed head, and what p_min is compared with where a drafter goes by probability."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.base import Head, Norm, Opening
from ..unjoined import Joinable, argmax, top_k

N_CANDIDATES = 10  # llama.cpp's drafters normalize over their ten best tokens


def head_opening(head: Head, norm: Norm, device: torch.device) -> Opening | None:
    """A borrowed head as what a drafter's last layer is followed by, where it lies on the drafter's device."""
    return Opening(norm, head.group) if head.device == device else None


def best(logits: Joinable, p_min: float) -> tuple[Tensor, Tensor]:
    """logits [.., V]: the likeliest tokens and their shares among the ten best; ones where nothing would be compared
    with them."""
    if p_min <= 0.0:
        tokens = argmax(logits)
        return tokens, torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
    values, ids = top_k(logits, min(N_CANDIDATES, logits.shape[-1]))
    return ids[..., 0], values.softmax(-1)[..., 0]
