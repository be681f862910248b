"""Token selection as Triton kernels, in two passes over the vocabulary.

Top-k packs a logit and its id into one integer whose order is: larger logit first, then lower id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

BLOCK = 4096  # logits a program of the first argmax pass takes
SORT = 1024  # packed logits a program of a top-k pass sorts
LARGEST_K = 256  # beyond it the library selects


@triton.jit
def block_max_kernel(
    x_ptr, bias_ptr, value_ptr, id_ptr, V, n_blocks, x_row,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + i, i < V, float("-inf"))
    if BIAS:
        x += tl.load(bias_ptr + row * V + i, i < V, 0.0)
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_ptr + row * n_blocks + block, value)
    tl.store(id_ptr + row * n_blocks + block, block * BLOCK + index)


@triton.jit
def first_max_kernel(value_ptr, id_ptr, out_ptr, n_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(value_ptr + row * n_blocks + i, i < n_blocks, float("-inf"))
    index = tl.argmax(x, 0, tie_break_left=True)
    tl.store(out_ptr + row, tl.load(id_ptr + row * n_blocks + index).to(tl.int64))


@triton.jit
def packed(x, i):
    """Order of (x, -i) as int64; -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - i.to(tl.int64))


@triton.jit
def pack_top_kernel(x_ptr, out_ptr, V, n_blocks, x_row, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The K best of each block, packed, descending."""
    begin(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + i, i < V, float("-inf"))
    keys = tl.where(i < V, packed(x, i), -0x7FFFFFFFFFFFFFFF)
    tl.store(out_ptr + (row * n_blocks + block) * K + tl.arange(0, K), tl.topk(keys, K))


@triton.jit
def merge_top_kernel(in_ptr, out_ptr, n, n_blocks, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(in_ptr + row * n + i, i < n, -0x7FFFFFFFFFFFFFFF)
    tl.store(out_ptr + (row * n_blocks + block) * K + tl.arange(0, K), tl.topk(keys, K))


@triton.jit
def unpack_kernel(in_ptr, value_ptr, id_ptr, k, k_in, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    key = tl.load(in_ptr + row * k_in + i, i < k, 0)
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    tl.store(value_ptr + row * k + i, bits.to(tl.float32, bitcast=True), i < k)
    tl.store(id_ptr + row * k + i, 0x7FFFFFFF - (key & 0x7FFFFFFF), i < k)


@triton.jit
def walk_kernel(
    ids_ptr, value_ptr, gate_ptr, pred_ptr, succ_ptr, token_ptr, share_ptr, n, K, R,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): the selector's walk. pred [B, 1 + (n - 1) K, R], succ [B, n, K, R]."""
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    in_c, in_r = c < K, r < R
    chosen = b * 0
    for i in range(n):
        row = b * n + i
        p = tl.load(pred_ptr + (b * (1 + (n - 1) * K) + chosen) * R + r, in_r, 0.0)
        p = p * tl.load(gate_ptr + row * R + r, in_r, 0.0)
        s = tl.load(succ_ptr + (row * K + c[:, None]) * R + r[None, :], in_c[:, None] & in_r[None, :], 0.0)
        score = tl.load(value_ptr + row * K + c, in_c, float("-inf")) + tl.sum(s * p[None, :], 1)
        best = tl.argmax(score, 0, tie_break_left=True)
        top = tl.max(score, 0)
        tl.store(share_ptr + row, 1.0 / tl.sum(tl.exp(score - top), 0))
        tl.store(token_ptr + row, tl.load(ids_ptr + row * K + best))
        chosen = 1 + i * K + best.to(tl.int64)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [.., V] as float32 [T, V] whose rows are contiguous, and their stride."""
    rows = x.float().reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def argmax(x: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, stride = as_rows(x)
    T, V = rows.shape
    n = triton.cdiv(V, BLOCK)
    values = torch.empty(T, n, dtype=torch.float32, device=x.device)
    ids = torch.empty(T, n, dtype=torch.int32, device=x.device)
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    addend = rows if bias is None else bias.float().contiguous()
    block_max_kernel[(n, T)](rows, addend, values, ids, V, n, stride, bias is not None, BLOCK, **overlap(rows))
    first_max_kernel[(T,)](values, ids, out, n, triton.next_power_of_2(n), num_warps=1, **overlap(values))
    return out


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, stride = as_rows(x)
    T, V = rows.shape
    K = max(2, triton.next_power_of_2(k))
    if K > LARGEST_K:
        ordered = rows.sort(dim=-1, descending=True, stable=True)
        shape = (*x.shape[:-1], k)
        return ordered.values[:, :k].reshape(shape), ordered.indices[:, :k].reshape(shape)
    n = triton.cdiv(V, SORT)
    keys = torch.empty(T, n * K, dtype=torch.int64, device=x.device)
    pack_top_kernel[(n, T)](rows, keys, V, n, stride, K, SORT, **overlap(rows))
    while n > 1:
        length = n * K
        n = triton.cdiv(length, SORT)
        merged = torch.empty(T, n * K, dtype=torch.int64, device=x.device)
        merge_top_kernel[(n, T)](keys, merged, length, n, K, SORT, **overlap(keys))
        keys = merged
    values = torch.empty(*x.shape[:-1], k, dtype=torch.float32, device=x.device)
    ids = torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device)
    unpack_kernel[(T,)](keys, values, ids, k, K, K, num_warps=1, **overlap(keys))
    return values, ids


def log_softmax(x: Tensor) -> Tensor:
    return x.float().log_softmax(-1)


def log_probability(x: Tensor, ids: Tensor) -> Tensor:
    total = x.float().logsumexp(-1, keepdim=True)
    return x.float().gather(-1, ids) - total


def walk(ids: Tensor, values: Tensor, gate: Tensor, pred: Tensor, succ: Tensor) -> tuple[Tensor, Tensor]:
    """`chains.walk` in one launch."""
    B, n, K = ids.shape
    R = gate.shape[-1]
    tokens = torch.empty(B, n, dtype=torch.int64, device=ids.device)
    shares = torch.empty(B, n, dtype=torch.float32, device=ids.device)
    walk_kernel[(B,)](
        ids.contiguous(), values.contiguous(), gate.contiguous(), pred.contiguous(), succ.contiguous(),
        tokens, shares, n, K, R, triton.next_power_of_2(K), triton.next_power_of_2(R), **overlap(tokens),
    )  # fmt: skip
    return tokens, shares
