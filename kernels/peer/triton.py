"""The sums as kernels, one program a row; the protocol is in this room's `__init__`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.overlap import begin, overlap
from ggufspec.kernels.peer.link import COLUMNS, ROWS, Link
from ggufspec.kernels.prepared.triton import Target, whole_row, write_row


@triton.jit
def exchange(
    part_ptr, row, K, bases_ptr, calls_ptr, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 3 for one row; the half of the inbox where the others' rows are then. limit: polls, 0 for ever."""
    FLAGS: tl.constexpr = 2 * N * N_ROWS * WIDEST
    call = tl.load(calls_ptr + row) + 1
    half = call & 1
    column = tl.arange(0, SIZE)
    mask = column < K
    part = tl.load(part_ptr + row * K + column, mask, 0.0)
    for other in tl.static_range(N):
        if other != RANK:
            base = tl.load(bases_ptr + other).to(tl.pointer_type(tl.float32))
            place = base + ((half * N + RANK) * N_ROWS + row) * WIDEST
            tl.store(tl.multiple_of(place, 16) + column, part, mask)
    tl.debug_barrier()  # all of the program's stores come before the flags
    for other in tl.static_range(N):
        if other != RANK:
            flags = tl.load(bases_ptr + other).to(tl.pointer_type(tl.int32)) + FLAGS
            tl.atomic_xchg(flags + RANK * N_ROWS + row, call, sem="release", scope="sys")
    own = tl.load(bases_ptr + RANK).to(tl.pointer_type(tl.int32)) + FLAGS
    for other in tl.static_range(N):
        if other != RANK:
            flag = own + other * N_ROWS + row
            behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call
            n_polls = 1
            while (behind < 0) & ((limit == 0) | (n_polls < limit)):
                behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call
                n_polls += 1
            if behind < 0:
                tl.store(late_ptr, 1)
    tl.debug_barrier()  # no load of a row comes before the flags were seen
    tl.store(calls_ptr + row, call)
    return half


@triton.jit
def total_of(
    part_ptr, row, K, bases_ptr, half, e, mask,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """Step 4 for the columns e. Loads pass the first-level cache by: it may hold what was there two calls ago."""
    inbox = tl.load(bases_ptr + RANK).to(tl.pointer_type(tl.float32))
    for other in tl.static_range(N):
        if other == RANK:
            v = tl.load(part_ptr + row * K + e, mask, 0.0)
        else:
            place = tl.multiple_of(inbox + ((half * N + other) * N_ROWS + row) * WIDEST, 16)
            v = tl.load(place + e, mask, 0.0, cache_modifier=".cg")
        if other == 0:
            total = v
        else:
            total += v
    return total


@triton.jit(do_not_specialize=["limit"])
def sum_kernel(
    part_ptr, out_ptr, K, bases_ptr, calls_ptr, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    half = exchange(part_ptr, row, K, bases_ptr, calls_ptr, late_ptr, limit, RANK, N, N_ROWS, WIDEST, SIZE)
    e = tl.arange(0, SIZE)
    mask = e < K
    tl.store(out_ptr + row * K + e, total_of(part_ptr, row, K, bases_ptr, half, e, mask, RANK, N, N_ROWS, WIDEST), mask)


@triton.jit(do_not_specialize=["limit"])
def sum_norm_kernel(
    x_ptr, part_ptr, weight_ptr, total_ptr, rows_ptr, scale_ptr, K, eps, bases_ptr, calls_ptr, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`norm_input_kernel` of x and the sum: the same operations in the same order once the sum is there."""
    begin(PDL)
    row = tl.program_id(0)
    half = exchange(part_ptr, row, K, bases_ptr, calls_ptr, late_ptr, limit, RANK, N, N_ROWS, WIDEST, SIZE)
    e = tl.arange(0, SIZE)
    mask = e < K
    x = tl.load(x_ptr + row * K + e, mask, 0.0)
    x += total_of(part_ptr, row, K, bases_ptr, half, e, mask, RANK, N, N_ROWS, WIDEST)
    tl.store(total_ptr + row * K + e, x, mask)
    v = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * tl.load(weight_ptr + e, mask, 0.0)
    write_row(v, row, rows_ptr, scale_ptr, False, WIDTH, SIZE)


def places(link: Link, limit: int) -> tuple[tuple, dict[str, int]]:
    """A launch's arguments for `exchange`."""
    constants = {"RANK": link.rank, "N": link.size, "N_ROWS": ROWS, "WIDEST": COLUMNS}
    return (link.bases, link.calls, link.late, limit), constants


def sum_parts(part: Tensor, link: Link, limit: int = 0) -> Tensor:
    """limit: polls a flag is waited for before the sum is taken as it is and `link.late` set; 0: no end."""
    K = part.shape[-1]
    part = part.contiguous()
    out = torch.empty_like(part)
    size = triton.next_power_of_2(K)
    arguments, constants = places(link, limit)
    sum_kernel[(part.numel() // K,)](
        part, out, K, *arguments, **constants,
        SIZE=size, num_warps=max(1, min(16, size // 256)), **overlap(part),
    )  # fmt: skip
    return out


def sum_add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float, link: Link, limit: int = 0
                     ) -> tuple[Tensor, Activation]:
    K = x.shape[-1]
    x, part = x.contiguous(), part.contiguous()
    n_rows = x.numel() // K
    to, total = Target(n_rows, K, x), torch.empty_like(x)
    arguments, constants = places(link, limit)
    sum_norm_kernel[(n_rows,)](
        x, part, weight, total, to.rows, to.scale, K, eps, *arguments, **constants,
        **whole_row(to.width), **overlap(x),
    )  # fmt: skip
    return total, to.activation
