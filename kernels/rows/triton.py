"""A step's bookkeeping as Triton kernels, a program an entry."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

# Few numbers, read and written one by one: their alignment and the sizes would only make more kernels.
FEW = {
    "do_not_specialize": ["W", "mask", "n", "draft_row", "n_vocab", "token_row", "sampled_row"],
    "do_not_specialize_on_alignment": [
        "n_past_ptr", "n_rows_ptr", "all_ptr", "valid_ptr", "last_ptr", "token_ptr", "draft_ptr", "n_draft_ptr",
        "sampled_ptr", "eog_ptr", "out_ptr",
    ],
}  # fmt: skip


@triton.jit(**FEW)
def positions_kernel(n_past_ptr, n_rows_ptr, all_ptr, valid_ptr, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(n_past_ptr + b) + i
    tl.store(all_ptr + b * W + i, place, i < W)
    tl.store(valid_ptr + b * W + i, tl.where(i < tl.load(n_rows_ptr + b), place, -1), i < W)


@triton.jit(**FEW)
def masked_block_kernel(last_ptr, n_past_ptr, token_ptr, n_rows_ptr, mask, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(token_ptr + b * W + i, tl.where(i == 0, tl.load(last_ptr + b), mask), i < W)
    tl.store(n_rows_ptr + b, tl.where(tl.load(n_past_ptr + b) < 0, 0, W).to(tl.int64))


@triton.jit(**FEW)
def lay_out_kernel(
    last_ptr, draft_ptr, n_draft_ptr, token_ptr, n_rows_ptr, n, draft_row, n_vocab,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    draft = tl.load(draft_ptr + b * draft_row + i, i < n, 0)
    first = tl.min(tl.where((draft >= 0) & (draft < n_vocab) & (i < n), n, i), 0)  # the first that ends the draft
    tl.store(token_ptr + b * (n + 1) + 1 + i, tl.minimum(tl.maximum(draft, 0), n_vocab - 1), i < n)
    tl.store(token_ptr + b * (n + 1), tl.load(last_ptr + b))
    tl.store(n_rows_ptr + b, tl.minimum(tl.load(n_draft_ptr + b), tl.minimum(first, n).to(tl.int64)) + 1)


@triton.jit(**FEW)
def accepted_prefix_kernel(
    token_ptr, sampled_ptr, n_rows_ptr, eog_ptr, out_ptr, W, token_row, sampled_row,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < W - 1
    sampled = tl.load(sampled_ptr + b * sampled_row + i, inside, 0)
    right = inside & (sampled == tl.load(token_ptr + b * token_row + 1 + i, inside, 0))
    right = right & (tl.load(eog_ptr + sampled, inside, 0) == 0)
    first = tl.min(tl.where(right, W - 1, i), 0)  # the first that is wrong
    tl.store(out_ptr + b, tl.minimum(tl.minimum(first, W - 1).to(tl.int64), tl.load(n_rows_ptr + b) - 1))


def whole(width: int) -> int:
    """Numbers a program takes: as many for all narrow widths."""
    return max(16, triton.next_power_of_2(width))


def positions(n_past: Tensor, n_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    every, valid = torch.empty((2, len(n_past), width), dtype=torch.int64, device=n_past.device).unbind(0)
    block = 16 if width <= 16 else 256
    positions_kernel[(len(n_past), triton.cdiv(width, block))](
        n_past.contiguous(), n_rows.contiguous(), every, valid, width, block, num_warps=1, **overlap(every)
    )
    return every, valid


def masked_block(last: Tensor, mask: int, width: int, n_past: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.empty((len(last), width), dtype=torch.int64, device=last.device)
    n_rows = torch.empty_like(last)
    masked_block_kernel[(len(last),)](
        last.contiguous(), n_past.contiguous(), tokens, n_rows, mask, width, whole(width), num_warps=1,
        **overlap(tokens),
    )  # fmt: skip
    return tokens, n_rows


def lay_out(last: Tensor, draft: Tensor, n_draft: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    B, n = draft.shape
    draft = draft if n == 0 or draft.stride(1) == 1 else draft.contiguous()
    tokens = torch.empty((B, n + 1), dtype=torch.int64, device=last.device)
    n_rows = torch.empty(B, dtype=torch.int64, device=last.device)
    lay_out_kernel[(B,)](
        last.contiguous(), draft, n_draft.contiguous(), tokens, n_rows, n, draft.stride(0), n_vocab, whole(n),
        num_warps=1, **overlap(tokens),
    )  # fmt: skip
    return tokens, n_rows


def accepted_prefix(tokens: Tensor, sampled: Tensor, n_rows: Tensor, is_eog: Tensor) -> Tensor:
    B, W = tokens.shape
    tokens, sampled = (t if t.stride(1) == 1 else t.contiguous() for t in (tokens, sampled))
    out = torch.empty(B, dtype=torch.int64, device=tokens.device)
    accepted_prefix_kernel[(B,)](
        tokens, sampled, n_rows.contiguous(), is_eog.view(torch.uint8), out, W, tokens.stride(0), sampled.stride(0),
        whole(W), num_warps=1, **overlap(tokens),
    )  # fmt: skip
    return out
