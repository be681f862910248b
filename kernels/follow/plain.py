"""A step's values in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor


def take(table: Tensor, values: Tensor) -> Tensor:
    slots, lengths, is_fresh = table[0], table[1], table[2] > 0
    taken = torch.where(is_fresh, table[3:], values[:, slots])
    return torch.cat([taken, torch.minimum(lengths, taken[2].clamp(min=0))[None]])


def advance(values: Tensor, taken: Tensor, slots: Tensor, tokens: Tensor, n_accepted: Tensor, n_rows: Tensor) -> Tensor:
    n = n_accepted + 1
    last = tokens.gather(1, n_accepted.clamp(min=0)[:, None])[:, 0]
    new = torch.stack([last, taken[1] + n, taken[2] - n, torch.minimum(n, n_rows - 1)])
    values[:, slots] = torch.where(n_rows > 0, new, values[:, slots])
    return torch.cat([tokens, n_accepted[:, None], n_rows[:, None]], dim=1)
