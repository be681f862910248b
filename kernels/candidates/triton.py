"""Keys, their way between ranks and their merge as kernels; `kernels.peer` has the protocol of the exchange."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.candidates import rows_a_channel
from ggufspec.kernels.overlap import begin, overlap, release, wait
from ggufspec.kernels.peer.link import Link
from ggufspec.kernels.peer.triton import awaited_bits, give, inboxes_at, places
from ggufspec.kernels.select.triton import NOTHING, id_of, logit_of, packed


@triton.jit
def keys_at(x_ptr, id_ptr, row, j, n_ids, first, x_row, mask):
    """Keys of the candidates j of a row; that of no token beyond n_ids and outside of the mask."""
    mask &= j < n_ids
    i = tl.load(id_ptr + row * n_ids + j, mask, 0)
    x = tl.load(x_ptr + row * x_row + i, mask, float("-inf"))
    return tl.where(mask, packed(x, i + first), NOTHING)


@triton.jit
def store_best(key, row, k, value_ptr, id_ptr, K: tl.constexpr):
    """The k largest of all keys, K being the next power of two: values and ids, falling."""
    if K == 1:
        best = tl.max(key, 0)
        j = 0
    else:
        best = tl.topk(key, K)
        j = tl.arange(0, K)
    x = logit_of(best)
    tl.store(value_ptr + row * k + j, x, j < k)
    tl.store(id_ptr + row * k + j, id_of(best), j < k)


@triton.jit
def keys_kernel(x_ptr, id_ptr, key_ptr, n_ids, first, k, x_row, K: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K)
    tl.store(key_ptr + row * k + j, keys_at(x_ptr, id_ptr, row, j, n_ids, first, x_row, j < k), j < k)


@triton.jit
def merge_kernel(key_ptr, value_ptr, id_ptr, k, N, K: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Program (row) of keys [N, T, k]; SIZE: N K, with N a power of two."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, SIZE)
    rank, j = t // K, t % K
    at = key_ptr + (rank * tl.num_programs(0) + row) * k + j
    store_best(tl.load(at, (rank < N) & (j < k), NOTHING), row, k, value_ptr, id_ptr, K)


@triton.jit(do_not_specialize=["n_each", "limit"])
def exchange_kernel(
    x_ptr, id_ptr, value_ptr, out_ptr, T, n_each, n_ids, first, k, x_row, bases_ptr, calls_ptr, late_ptr, limit,
    RANK: tl.constexpr, N: tl.constexpr, N_ROWS: tl.constexpr, WIDEST: tl.constexpr,
    K: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (channel): n_each rows. A row has 2 k words in the place: k lower halves of keys, then the upper ones."""
    release(PDL)
    channel = tl.program_id(0)
    t = tl.arange(0, SIZE)
    rank, j = t // K, t % K
    is_own = rank == RANK
    inboxes = inboxes_at(bases_ptr, N)
    wait(PDL)
    call = tl.load(calls_ptr + channel) + 1
    for i in range(n_each):
        row = (channel * n_each + i).to(tl.int64)
        mine = is_own & (j < k) & (row + t * 0 < T)
        key = keys_at(x_ptr, id_ptr, row, j, n_ids, first, x_row, mine)
        give(key.to(tl.int32), channel, call, 2 * i * k + j, mine, inboxes, RANK, N, N_ROWS, WIDEST)
        give((key >> 32).to(tl.int32), channel, call, (2 * i + 1) * k + j, mine, inboxes, RANK, N, N_ROWS, WIDEST)
    place = inboxes[RANK] + (((call & 1) * N + rank) * N_ROWS + channel) * WIDEST + j
    for i in range(n_each):
        row = (channel * n_each + i).to(tl.int64)
        there = (j < k) & (row + t * 0 < T)
        key = keys_at(x_ptr, id_ptr, row, j, n_ids, first, x_row, is_own & there)
        others = (rank != RANK) & (rank < N) & there
        low = awaited_bits(place + 2 * i * k, others, call, late_ptr, limit)
        high = awaited_bits(place + (2 * i + 1) * k, others, call, late_ptr, limit)
        key = tl.where(others, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF), key)
        if row < T:
            store_best(key, row, k, value_ptr, out_ptr, K)
    tl.store(calls_ptr + channel, call)


def in_rows(x: Tensor) -> Tensor:
    """x [T, n], n 0 where a rank has nothing, with the numbers of a row one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(size: int) -> int:
    return max(1, min(8, size // 128))


def keys(x: Tensor, ids: Tensor, first: int, k: int) -> Tensor:
    x = in_rows(x)
    T, n_ids = ids.shape
    out = torch.empty(T, k, dtype=torch.int64, device=x.device)
    K = triton.next_power_of_2(k)
    keys_kernel[(T,)](
        x, ids.contiguous(), out, n_ids, first, k, x.stride(0), K, num_warps=warps(K), **overlap(x)
    )  # fmt: skip
    return out


def merge(keys: Tensor) -> tuple[Tensor, Tensor]:
    N, T, k = keys.shape
    values, ids = results(T, k, keys)
    K = triton.next_power_of_2(k)
    size = triton.next_power_of_2(N) * K
    merge_kernel[(T,)](keys.contiguous(), values, ids, k, N, K, size, num_warps=warps(size), **overlap(keys))
    return values, ids


def exchange(x: Tensor, ids: Tensor, first: int, k: int, link: Link, limit: int = 0) -> tuple[Tensor, Tensor]:
    """limit: polls after which what is there is merged and `link.late` set; 0: no end."""
    x = in_rows(x)
    T, n_ids = ids.shape
    values, out = results(T, k, x)
    n_each, K = rows_a_channel(T), triton.next_power_of_2(k)
    size = triton.next_power_of_2(link.size) * K
    arguments, constants = places(link, limit)
    exchange_kernel[(triton.cdiv(T, n_each),)](
        x, ids.contiguous(), values, out, T, n_each, n_ids, first, k, x.stride(0), *arguments, **constants,
        K=K, SIZE=size, num_warps=warps(size), **overlap(x),
    )  # fmt: skip
    return values, out


def results(T: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(T, k, dtype=torch.float32, device=like.device)
    return values, torch.empty(T, k, dtype=torch.int64, device=like.device)
