"""Choosing tokens from logits in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor

from ggufspec.kernels.matmul import PackedWeight, gather

LAST_ID = 0x7FFFFFFF


def packed(x: Tensor, ids: Tensor) -> Tensor:
    """Keys int64 of logits float32 and their ids, whose order is: larger logit first, then lower id."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0: no negative zero, which would order below zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) | (LAST_ID - ids)


def logit_of(keys: Tensor) -> Tensor:
    """float32; -0 has become 0."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def id_of(keys: Tensor) -> Tensor:
    return LAST_ID - (keys & LAST_ID)


def argmax(x: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x if bias is None else x + bias
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


def selector_rows(
    ids: Tensor, last: Tensor, predecessor: PackedWeight, successor: PackedWeight
) -> tuple[Tensor, Tensor]:
    """What `walk` takes: rows of the tables for `last` and the candidates, pred [B, 1 + (n - 1) k, R] and succ
    [B, n, k, R]."""
    B, n, k = ids.shape
    before = torch.cat((last[:, None], ids[:, :-1].reshape(B, -1)), 1)
    return gather(predecessor, before.flatten()).view(*before.shape, -1), gather(successor, ids.flatten()).view(
        B, n, k, -1
    )


def walk(ids: Tensor, values: Tensor, gate: Tensor, pred: Tensor, succ: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of `chains.selector_walk`, rows of the tables looked up: pred [B, 1 + (n - 1) k, R], the anchor
    and every candidate but the last row's; succ [B, n, k, R]."""
    B, n, k = ids.shape
    rows = torch.arange(B, device=ids.device)
    tokens, shares = torch.empty_like(ids[..., 0]), torch.empty_like(values[..., 0])
    chosen = torch.zeros(B, dtype=torch.int64, device=ids.device)  # row of `pred` of the predecessor
    for i in range(n):
        step = (pred[rows, chosen] * gate[:, i]).unsqueeze(1) * succ[:, i]
        scores = values[:, i] + step.sum(-1)
        best = scores.argmax(-1)
        tokens[:, i] = ids[rows, i, best]
        shares[:, i] = scores.softmax(-1)[rows, best]
        chosen = 1 + i * k + best
    return tokens, shares


def log_probability(x: Tensor, ids: Tensor) -> Tensor:
    total = x.float().logsumexp(-1, keepdim=True)
    return x.float().gather(-1, ids) - total
