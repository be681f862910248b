"""A step's bookkeeping in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor


def positions(n_past: Tensor, n_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(width, device=n_past.device)
    places = n_past[:, None] + index
    return places, torch.where(index < n_rows[:, None], places, -1)


def masked_block(last: Tensor, mask: int, width: int, n_past: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(last), width), mask, dtype=torch.int64, device=last.device)
    tokens[:, 0] = last
    return tokens, torch.where(n_past < 0, 0, width)


def lay_out(last: Tensor, draft: Tensor, n_draft: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    if draft.shape[1] > 0:
        valid = (draft >= 0) & (draft < n_vocab)
        n_draft = torch.minimum(n_draft, valid.to(torch.int64).cumprod(dim=1).sum(dim=1))
        draft = draft.clamp(0, n_vocab - 1)
    return torch.cat([last[:, None], draft], dim=1), n_draft + 1


def accepted_prefix(tokens: Tensor, sampled: Tensor, n_rows: Tensor, is_eog: Tensor) -> Tensor:
    W = tokens.shape[1]
    if W == 1:
        return n_rows - 1
    proposed = torch.arange(W - 1, device=tokens.device) < (n_rows - 1)[:, None]
    right = (sampled[:, :-1] == tokens[:, 1:]) & proposed & ~is_eog[sampled[:, :-1]]
    return torch.minimum(right.to(torch.int64).cumprod(dim=1).sum(dim=1), n_rows - 1)
