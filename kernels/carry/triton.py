"""Carried rows as Triton kernels, a program a row and piece."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import ENTRY_NUMBERS, begin, overlap

PIECE = 1024
FEW = {"do_not_specialize": ["W", "most"], "do_not_specialize_on_alignment": ENTRY_NUMBERS}


@triton.jit(**FEW)
def before_kernel(
    pending_ptr, slot_ptr, n_past_ptr, hidden_ptr, out_ptr, W, D, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    at = tl.program_id(0).to(tl.int64)
    b, row = at // W, at % W
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    if row == 0:
        seen = tl.load(n_past_ptr + b) > 0
        x = tl.load(pending_ptr + tl.load(slot_ptr + b) * D + c, mask, 0.0)
        tl.store(out_ptr + at * D + c, tl.where(seen, x, 0.0), mask)
    else:
        tl.store(out_ptr + at * D + c, tl.load(hidden_ptr + (at - 1) * D + c, mask, 0.0), mask)


@triton.jit(**FEW)
def keep_kernel(
    pending_ptr, verified_ptr, verified_rows_ptr, hidden_ptr, slot_ptr, n_rows_ptr, W, D, most,
    TENTATIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    at = tl.program_id(0).to(tl.int64)
    b, row = at // W, at % W
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < D
    slot, n_rows = tl.load(slot_ptr + b), tl.load(n_rows_ptr + b)
    last = row == n_rows - 1
    if (TENTATIVE or last) and n_rows > 0:
        x = tl.load(hidden_ptr + at * D + c, mask, 0.0)
        if last:
            tl.store(pending_ptr + slot * D + c, x, mask)
        if TENTATIVE:
            tl.store(verified_ptr + (slot * most + row) * D + c, x, mask)
            if row == 0:
                tl.store(verified_rows_ptr + slot, n_rows)


@triton.jit(**FEW)
def take_kernel(
    pending_ptr, verified_ptr, verified_rows_ptr, slot_ptr, n_accepted_ptr, D, most,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + b)
    n_accepted = tl.load(n_accepted_ptr + b)
    row = tl.minimum(n_accepted, tl.load(verified_rows_ptr + slot) - 1)
    mask = (c < D) & (n_accepted >= 0)
    x = tl.load(verified_ptr + (slot * most + row) * D + c, mask, 0.0)
    tl.store(pending_ptr + slot * D + c, x, mask)


def before(pending: Tensor, slots: Tensor, n_past: Tensor, hidden: Tensor | None = None) -> Tensor:
    D = pending.shape[1]
    W = 1 if hidden is None else hidden.shape[1]
    out = torch.empty((len(slots), W, D), dtype=torch.float32, device=pending.device)
    before_kernel[(len(slots) * W, triton.cdiv(D, PIECE))](
        pending, slots.contiguous(), n_past.contiguous(), out if hidden is None else hidden.contiguous(), out, W, D,
        PIECE, **overlap(out),
    )  # fmt: skip
    return out


def keep(
    pending: Tensor, verified: Tensor, verified_rows: Tensor, hidden: Tensor, slots: Tensor, n_rows: Tensor,
    tentative: bool,
) -> None:  # fmt: skip
    B, W, D = hidden.shape
    keep_kernel[(B * W, triton.cdiv(D, PIECE))](
        pending, verified, verified_rows, hidden.contiguous(), slots.contiguous(), n_rows.contiguous(),
        W, D, verified.shape[1], TENTATIVE=tentative, BLOCK=PIECE, **overlap(pending),
    )  # fmt: skip


def take(pending: Tensor, verified: Tensor, verified_rows: Tensor, slots: Tensor, n_accepted: Tensor) -> None:
    D = pending.shape[1]
    take_kernel[(len(slots), triton.cdiv(D, PIECE))](
        pending, verified, verified_rows, slots.contiguous(), n_accepted.contiguous(), D, verified.shape[1], PIECE,
        **overlap(pending),
    )  # fmt: skip
