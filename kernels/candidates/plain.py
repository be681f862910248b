"""Keys and their merge in PyTorch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = -(2**63 - 1)  # the key of no token
LAST_ID = 0x7FFFFFFF


def keys(x: Tensor, ids: Tensor, first: int, k: int) -> Tensor:
    bits = (x.gather(1, ids) + 0.0).view(torch.int32)  # + 0.0: no negative zero, which would order below zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    out = ids.new_full((ids.shape[0], k), NOTHING)
    out[:, : ids.shape[1]] = (ordered << 32) | (LAST_ID - (ids + first))
    return out


def merge(keys: Tensor) -> tuple[Tensor, Tensor]:
    N, T, k = keys.shape
    best = keys.transpose(0, 1).reshape(T, N * k).sort(dim=1, descending=True).values[:, :k]
    ordered = (best >> 32).to(torch.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, LAST_ID - (best & 0xFFFFFFFF)
