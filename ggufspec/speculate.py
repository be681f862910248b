"""Draft, verify, accept: the pure tensor part of a speculative step. No host, no policy, no drafter's internals."""

from __future__ import annotations

from torch import Tensor

from .handover import on
from .kernels import rows as kernels
from .rows import Rows


def lay_out(last: Tensor, draft: Tensor, n_draft: Tensor, slots: Tensor, n_past: Tensor, n_vocab: int) -> Rows:
    """Rows of a verification: the last sampled token, then the drafted ones.

    last [B], draft [B, n], n_draft [B] (how many of a row's drafts are real), all int64. A drafted id outside
    the vocabulary ends its draft there: it is never looked up.
    """
    with on(last.device):
        tokens, n_rows = kernels.lay_out(last, draft, n_draft, n_vocab)
    return Rows(tokens, slots, n_past, n_rows, tentative=True)


def accepted_prefix(rows: Rows, sampled: Tensor, is_eog: Tensor) -> Tensor:
    """How many drafted tokens are right: n_accepted [B] int64.

    sampled [B, W]: what the target chose at each row. Row i's draft (the token of row i + 1) is accepted when all
    before it are and it equals the target's choice, and that choice does not end the stream. is_eog [V] bool.
    """
    with on(sampled.device):
        return kernels.accepted_prefix(rows.tokens, sampled, rows.n_rows, is_eog)
