"""Draft, verify, accept: the pure tensor part of a speculative step. No host, no policy, no drafter's internals."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import Rows


def lay_out(last: Tensor, draft: Tensor, n_draft: Tensor, slots: Tensor, n_past: Tensor, n_vocab: int) -> Rows:
    """Rows of a verification: the last sampled token, then the drafted ones.

    last [B], draft [B, n], n_draft [B] (how many of a row's drafts are real), all int64. A drafted id outside
    the vocabulary ends its draft there: it is never looked up.
    """
    n = draft.shape[1]
    if n > 0:
        valid = (draft >= 0) & (draft < n_vocab)
        n_valid = valid.to(torch.int64).cumprod(dim=1).sum(dim=1)
        n_draft = torch.minimum(n_draft, n_valid)
        draft = draft.clamp(0, n_vocab - 1)
    return Rows(torch.cat([last[:, None], draft], dim=1), slots, n_past, n_draft + 1, tentative=True)


def accepted_prefix(rows: Rows, sampled: Tensor, is_eog: Tensor) -> Tensor:
    """How many drafted tokens are right: n_accepted [B] int64.

    sampled [B, W]: what the target chose at each row. Row i's draft (the token of row i + 1) is accepted when all
    before it are and it equals the target's choice, and that choice does not end the stream. is_eog [V] bool.
    """
    W = rows.width
    if W == 1:
        return torch.zeros_like(rows.n_past)
    index = torch.arange(W - 1, device=sampled.device)
    proposed = index < (rows.n_rows - 1)[:, None]
    right = (sampled[:, :-1] == rows.tokens[:, 1:]) & proposed & ~is_eog[sampled[:, :-1]]
    return right.to(torch.int64).cumprod(dim=1).sum(dim=1)
