"""A step's values as Triton kernels, a program an entry."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

# Few numbers, read and written one by one: their alignment and the sizes would only make more kernels.
FEW = {
    "do_not_specialize": ["W", "token_row", "B", "S"],
    "do_not_specialize_on_alignment": [
        "table_ptr", "value_ptr", "out_ptr", "taken_ptr", "slot_ptr", "token_ptr", "accepted_ptr", "n_rows_ptr",
    ],
}  # fmt: skip


@triton.jit(**FEW)
def take_values_kernel(table_ptr, value_ptr, out_ptr, B, S, PDL: tl.constexpr):
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, 4)
    slot = tl.load(table_ptr + b)
    is_fresh = tl.load(table_ptr + 2 * B + b) > 0
    taken = tl.where(is_fresh, tl.load(table_ptr + (3 + i) * B + b), tl.load(value_ptr + i * S + slot))
    tl.store(out_ptr + i * B + b, taken)
    room = tl.sum(tl.where(i == 2, taken, 0), 0)
    tl.store(out_ptr + 4 * B + b, tl.minimum(tl.load(table_ptr + B + b), tl.maximum(room, 0)))


@triton.jit(**FEW)
def advance_kernel(
    value_ptr, taken_ptr, slot_ptr, token_ptr, accepted_ptr, n_rows_ptr, out_ptr, W, token_row, B, S,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    n = tl.load(accepted_ptr + b)
    n_rows = tl.load(n_rows_ptr + b)
    tokens = tl.load(token_ptr + b * token_row + i, i < W, 0)
    tl.store(out_ptr + b * (W + 2) + i, tl.where(i < W, tokens, tl.where(i == W, n, n_rows)), i < W + 2)
    slot = tl.load(slot_ptr + b)
    has_rows = n_rows > 0
    tl.store(value_ptr + slot, tl.sum(tl.where(i == n, tokens, 0), 0), has_rows)
    tl.store(value_ptr + S + slot, tl.load(taken_ptr + B + b) + n + 1, has_rows)
    tl.store(value_ptr + 2 * S + slot, tl.load(taken_ptr + 2 * B + b) - n - 1, has_rows)
    tl.store(value_ptr + 3 * S + slot, tl.minimum(n + 1, n_rows - 1), has_rows)


def take(table: Tensor, values: Tensor) -> Tensor:
    B = table.shape[1]
    out = torch.empty((5, B), dtype=torch.int64, device=values.device)
    take_values_kernel[(B,)](table.contiguous(), values, out, B, values.shape[1], num_warps=1, **overlap(values))
    return out


def advance(values: Tensor, taken: Tensor, slots: Tensor, tokens: Tensor, n_accepted: Tensor, n_rows: Tensor) -> Tensor:
    B, W = tokens.shape
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    out = torch.empty((B, W + 2), dtype=torch.int64, device=values.device)
    advance_kernel[(B,)](
        values, taken.contiguous(), slots.contiguous(), tokens, n_accepted.contiguous(), n_rows.contiguous(), out,
        W, tokens.stride(0), B, values.shape[1], max(32, triton.next_power_of_2(W + 2)), num_warps=1, **overlap(values),
    )  # fmt: skip
    return out
