"""The sums as kernels, one program a row; the protocol is in this room's `__init__`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.overlap import overlap, release, wait
from ggufspec.kernels.peer.link import COLUMNS, ROWS, Link
from ggufspec.kernels.prepared.triton import Target, whole_row, write_row


@triton.jit
def inboxes_at(bases_ptr, N: tl.constexpr):
    """Every rank's inbox. No kernel writes these addresses: they may be read before the kernels ahead have ended."""
    found = ()  # type: tuple
    for rank in tl.static_range(N):
        found = found + (tl.load(bases_ptr + rank).to(tl.pointer_type(tl.int64)),)
    return found


@triton.jit
def place_of(inbox, rank, row, call, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr):
    """Where an inbox has the row of a rank in this call."""
    return tl.multiple_of(inbox + (((call & 1) * N + rank) * N_ROWS + row) * WIDEST, 16)


@triton.jit
def give(
    part, row, call, e, mask, inboxes,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """Step 1 for one row: columns e of `part` and the call's number into every other rank's inbox."""
    words = (part.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    for other in tl.static_range(N):
        if other != RANK:
            tl.store(place_of(inboxes[other], RANK, row, call, N, N_ROWS, WIDEST) + e, words, mask)


@triton.jit
def n_missing(words, call):
    """How many words are not of this call."""
    return tl.sum(((words >> 32).to(tl.int32) != call).to(tl.int32), 0)


@triton.jit
def awaited_bits(at, mask, call, late_ptr, limit):
    """Step 2: the numbers at `at`, as int32, once all words there are of this call. limit: polls, 0 for ever."""
    nothing = call.to(tl.int64) << 32
    words = tl.load(at, mask, nothing, volatile=True)
    missing = n_missing(words, call)
    n_polls = 1
    while (missing > 0) & ((limit == 0) | (n_polls < limit)):
        words = tl.load(at, mask, nothing, volatile=True)
        missing = n_missing(words, call)
        n_polls += 1
    if missing > 0:
        tl.store(late_ptr, 1)
    return words.to(tl.int32)


@triton.jit
def awaited(at, mask, call, late_ptr, limit):
    """The same as float32."""
    return awaited_bits(at, mask, call, late_ptr, limit).to(tl.float32, bitcast=True)


@triton.jit
def total_of(
    part, row, call, e, mask, inboxes, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3 for columns e of one row."""
    for other in tl.static_range(N):
        if other == RANK:
            v = part
        else:
            at = place_of(inboxes[RANK], other, row, call, N, N_ROWS, WIDEST) + e
            v = awaited(at, mask, call, late_ptr, limit)
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
    release(PDL)
    row = tl.program_id(0)
    e = tl.arange(0, SIZE)
    mask = e < K
    inboxes = inboxes_at(bases_ptr, N)
    wait(PDL)
    call = tl.load(calls_ptr + row) + 1
    part = tl.load(part_ptr + row * K + e, mask, 0.0)
    give(part, row, call, e, mask, inboxes, RANK, N, N_ROWS, WIDEST)
    total = total_of(part, row, call, e, mask, inboxes, late_ptr, limit, RANK, N, N_ROWS, WIDEST)
    tl.store(out_ptr + row * K + e, total, mask)
    tl.store(calls_ptr + row, call)


@triton.jit(do_not_specialize=["limit"])
def sum_norm_kernel(
    x_ptr, part_ptr, weight_ptr, total_ptr, rows_ptr, scale_ptr, K, eps, bases_ptr, calls_ptr, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`norm_input_kernel` of x and the sum: the same operations in the same order once the sum is there."""
    release(PDL)
    row = tl.program_id(0)
    e = tl.arange(0, SIZE)
    mask = e < K
    weight = tl.load(weight_ptr + e, mask, 0.0)
    inboxes = inboxes_at(bases_ptr, N)
    wait(PDL)
    call = tl.load(calls_ptr + row) + 1
    part = tl.load(part_ptr + row * K + e, mask, 0.0)
    give(part, row, call, e, mask, inboxes, RANK, N, N_ROWS, WIDEST)
    x = tl.load(x_ptr + row * K + e, mask, 0.0)
    x += total_of(part, row, call, e, mask, inboxes, late_ptr, limit, RANK, N, N_ROWS, WIDEST)
    tl.store(total_ptr + row * K + e, x, mask)
    v = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
    write_row(v, row, rows_ptr, scale_ptr, False, WIDTH, SIZE)
    tl.store(calls_ptr + row, call)


def places(link: Link, limit: int) -> tuple[tuple, dict[str, int]]:
    """What all launches are given of the link: arguments and constants."""
    constants = {"RANK": link.rank, "N": link.size, "N_ROWS": ROWS, "WIDEST": COLUMNS}
    return (link.bases, link.calls, link.late, limit), constants


def sum_parts(part: Tensor, link: Link, limit: int = 0) -> Tensor:
    """limit: polls after which the sum is taken as it is and `link.late` set; 0: no end."""
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
