"""Embedding rows for a drafter, which may borrow the target's matrix on another device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..handover import hand_over, on
from ..kernels.matmul import PackedWeight, gather


def look_up(embedding: PackedWeight, tokens: Tensor, device: torch.device) -> Tensor:
    """tokens [B, W] to their rows [B, W, D] float32 on the device, looked up where the matrix lies."""
    (ids,) = hand_over([tokens.reshape(-1)], embedding.device)
    with on(embedding.device):
        (x,) = hand_over([gather(embedding, ids)], device)
    return x.view(*tokens.shape, -1)
