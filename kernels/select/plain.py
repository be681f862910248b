"""Choosing tokens from logits in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)  # documented to be the first of equal maxima


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    kth = rows.topk(k, -1).values[:, -1:]
    values, ids = [], []
    for row, least in zip(rows, kth):
        candidates = (row >= least).nonzero().squeeze(-1)  # ascending ids: a stable sort keeps their order
        order = row[candidates].sort(descending=True, stable=True)
        values.append(order.values[:k])
        ids.append(candidates[order.indices[:k]])
    shape = (*x.shape[:-1], k)
    return torch.stack(values).view(shape), torch.stack(ids).view(shape)


def log_softmax(x: Tensor) -> Tensor:
    return x.float().log_softmax(-1)


def log_probability(x: Tensor, ids: Tensor) -> Tensor:
    total = x.float().logsumexp(-1, keepdim=True)
    return x.float().gather(-1, ids) - total
