"""Carried rows in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor


def before(pending: Tensor, slots: Tensor, n_past: Tensor, hidden: Tensor | None = None) -> Tensor:
    first = torch.where(n_past[:, None] <= 0, 0.0, pending[slots])[:, None]
    return first if hidden is None else torch.cat([first, hidden[:, :-1]], dim=1)


def keep(
    pending: Tensor, verified: Tensor, verified_rows: Tensor, hidden: Tensor, slots: Tensor, n_rows: Tensor,
    tentative: bool,
) -> None:  # fmt: skip
    has_rows = n_rows > 0
    last = hidden[torch.arange(len(slots), device=slots.device), n_rows.clamp(min=1) - 1]
    pending[slots] = torch.where(has_rows[:, None], last, pending[slots])
    if tentative:
        W = hidden.shape[1]
        verified[slots, :W] = torch.where(has_rows[:, None, None], hidden, verified[slots, :W])
        verified_rows[slots] = torch.where(has_rows, n_rows, verified_rows[slots])


def take(pending: Tensor, verified: Tensor, verified_rows: Tensor, slots: Tensor, n_accepted: Tensor) -> None:
    row = torch.minimum(n_accepted, verified_rows[slots] - 1).clamp(min=0)
    pending[slots] = torch.where(n_accepted[:, None] < 0, pending[slots], verified[slots, row])
