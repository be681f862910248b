"""Carried rows in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor


def before(pending: Tensor, slots: Tensor, n_past: Tensor, hidden: Tensor | None = None) -> Tensor:
    first = torch.where(n_past[:, None] == 0, 0.0, pending[slots])[:, None]
    return first if hidden is None else torch.cat([first, hidden[:, :-1]], dim=1)


def keep(
    pending: Tensor, verified: Tensor, verified_rows: Tensor, hidden: Tensor, slots: Tensor, n_rows: Tensor,
    tentative: bool,
) -> None:  # fmt: skip
    pending[slots] = hidden[torch.arange(len(slots), device=slots.device), n_rows - 1]
    if tentative:
        verified[slots, : hidden.shape[1]] = hidden
        verified_rows[slots] = n_rows


def take(pending: Tensor, verified: Tensor, verified_rows: Tensor, slots: Tensor, n_accepted: Tensor) -> None:
    row = torch.minimum(n_accepted, verified_rows[slots] - 1)
    pending[slots] = verified[slots, row]
