"""Attention over the packed cache as Triton kernels.

Narrow batches: keys are split into fixed chunks of cells, one program a chunk, key head and tile of rows; a second
kernel combines the chunks in order. The chunk depends on the size of the cache alone, the tile of rows is always 16
high, and cells that a row does not see add exact zeros, so a row's bits do not depend on the rows beside it.
Prompt chunks: one program walks all cells of a tile of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.kv.triton import (
    IQ4_NL,
    PLAIN,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    as_halves,
    hadamard,
    iq4_table,
    kind_of,
)
from ggufspec.kernels.overlap import begin, overlap

NARROW_ROWS = 17  # wider batches take the prompt kernel
NARROW_TILE = 16  # (row, query head) pairs a program of the narrow kernel takes
WIDE_TILE = 64
MAX_SPLITS = 64
COMBINE = 16  # chunks that the second kernel adds at a time


@triton.jit
def load_tile(
    row_ptr, half_ptr, table_ptr, stride, half_stride, cell, mask,
    KIND: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Cache rows at cells [N] to values [N, BLOCK] of TYPE. row_ptr, half_ptr: one head of cell 0 of the slot."""
    e = tl.arange(0, BLOCK)[None, :]
    inside = mask[:, None] & (e < HD)
    cell = cell.to(tl.int64)[:, None]
    if KIND == PLAIN:
        return tl.load(row_ptr + cell * stride + e, inside, 0.0).to(TYPE)
    else:
        n_blocks: tl.constexpr = HD // 32
        bytes_ptr = row_ptr + cell * stride
        halves_ptr = half_ptr + cell * half_stride
        if KIND == Q8_0:
            codes = tl.load(bytes_ptr + e, inside, 0).to(tl.int8, bitcast=True).to(tl.float32)
            after: tl.constexpr = n_blocks * 32
        else:
            packed = tl.load(bytes_ptr + (e // 32) * 16 + e % 16, inside, 0).to(tl.int32)
            code = (packed >> ((e % 32) // 16 * 4)) & 15
            if KIND == Q5_0 or KIND == Q5_1:
                high = tl.load(bytes_ptr + n_blocks * 16 + e // 8, inside, 0).to(tl.int32)
                code = code | (((high >> (e % 8)) & 1) << 4)
                after: tl.constexpr = n_blocks * 20  # type: ignore[no-redef]
            else:
                after: tl.constexpr = n_blocks * 16  # type: ignore[no-redef]
            if KIND == IQ4_NL:
                codes = tl.load(table_ptr + code)
            else:
                codes = code.to(tl.float32)
            if KIND == Q4_0:
                codes -= 8.0
            if KIND == Q5_0:
                codes -= 16.0
        x = codes * tl.load(halves_ptr + after // 2 + e // 32, inside, 0.0).to(tl.float32)
        if KIND == Q4_1 or KIND == Q5_1:
            x += tl.load(halves_ptr + after // 2 + n_blocks + e // 32, inside, 0.0).to(tl.float32)
        return x.to(TYPE)


@triton.jit
def product(a, b, SPLIT: tl.constexpr):
    """a (float32) times b in float32. SPLIT: a as the sum of two numbers of b's type, as bfloat16 alone is coarse."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    high = a.to(b.dtype)
    out = tl.dot(high, b)
    if SPLIT:
        out += tl.dot((a - high.to(tl.float32)).to(b.dtype), b)
    return out


@triton.jit(do_not_specialize=["W"])
def attend_kernel(
    q_ptr, k_ptr, k_half_ptr, v_ptr, v_half_ptr, table_ptr, slot_ptr, n_past_ptr, n_rows_ptr, sinks_ptr,
    out_ptr, top_ptr, total_ptr,
    W, H, N_KV, G, n_cells, scale, k_stride, k_halves, v_stride, v_halves, window, n_splits, chunk, tiles,
    HD_K: tl.constexpr, HD_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    SPLIT_K: tl.constexpr, SPLIT_V: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr,
    SINKS: tl.constexpr, NARROW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, key head and tile, entry). Narrow: pieces of each (row, head): out [B, W, H, n_splits, HD_V],
    top and total [B, W, H, n_splits]. Wide: one chunk, out [B, W, H, HD_V] finished but for the rotation."""
    begin(PDL)
    split, b = tl.program_id(0), tl.program_id(2)
    group, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    n_past = tl.load(n_past_ptr + b)
    n_stored = n_past + tl.load(n_rows_ptr + b)
    used = tl.minimum(n_stored, n_cells)
    first = n_past  # position of the tile's first row, and of its last
    last = n_past + W - 1
    if not NARROW:
        first = n_past + (tile * M) // G
        last = tl.minimum(last, n_past + (tile * M + M - 1) // G)
    low = split.to(tl.int64) * chunk
    end = tl.minimum(low + chunk, used)
    if not RING:
        if CAUSAL:
            end = tl.minimum(end, last + 1)
        if window > 0:
            lowest = tl.maximum(first - window + 1, 0)
            low = tl.maximum(low, lowest // N * N)
    index = tile * M + tl.arange(0, M)  # (row, query head of the group)
    row, head = index // G, group * G + index % G
    valid = row < W
    position = n_past + row
    pair = ((b * W + row) * H + head).to(tl.int64)
    if NARROW:
        if low >= end:
            return
    e = tl.arange(0, BLOCK_K)
    q = tl.load(q_ptr + pair[:, None] * HD_K + e[None, :], valid[:, None] & (e < HD_K)[None, :], 0.0) * scale
    slot = tl.load(slot_ptr + b)
    head_of_slot = slot * n_cells * N_KV + group
    k_ptr += head_of_slot * k_stride
    v_ptr += head_of_slot * v_stride
    k_half_ptr += head_of_slot * k_halves
    v_half_ptr += head_of_slot * v_halves
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_V), tl.float32)
    for start in range(low, end, N):
        cell = start + tl.arange(0, N)
        inside = cell < used
        if RING:
            behind = n_stored - 1 - cell
            held = tl.where(behind >= 0, n_stored - 1 - behind % n_cells, cell - n_cells)
            held = tl.where(n_stored <= n_cells, cell, held)
        else:
            held = cell
        k = load_tile(k_ptr, k_half_ptr, table_ptr, k_stride * N_KV, k_halves * N_KV, cell, inside,
                      KIND_K, HD_K, BLOCK_K, TYPE_K)  # fmt: skip
        scores = product(q, tl.trans(k), SPLIT_K)
        distance = position[:, None] - held[None, :]
        seen = inside[None, :] & valid[:, None] & (held >= 0)[None, :]
        if CAUSAL:
            seen = seen & (distance >= 0)
        if window > 0:
            seen = seen & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(v_ptr, v_half_ptr, table_ptr, v_stride * N_KV, v_halves * N_KV, cell, inside,
                      KIND_V, HD_V, BLOCK_V, TYPE_V)  # fmt: skip
        acc = acc * shrink[:, None] + product(p, v, SPLIT_V)
        top = higher
    ev = tl.arange(0, BLOCK_V)
    mask = valid[:, None] & (ev < HD_V)[None, :]
    if NARROW:
        at = pair * n_splits + split
        tl.store(top_ptr + at, top, valid)
        tl.store(total_ptr + at, total, valid)
        tl.store(out_ptr + at[:, None] * HD_V + ev[None, :], acc, mask)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head, valid, 0.0)
            higher = tl.maximum(top, sink)
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.exp(sink - higher)
            acc = acc * shrink[:, None]
        acc = tl.where(total[:, None] > 0, acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
        tl.store(out_ptr + pair[:, None] * HD_V + ev[None, :], acc, mask)


@triton.jit(do_not_specialize=["W"])
def combine_kernel(
    part_ptr, top_ptr, total_ptr, sinks_ptr, gate_ptr, n_past_ptr, n_rows_ptr, out_ptr,
    W, H, n_cells, window, n_splits, chunk, gate_row, gate_head,
    HD_V: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, RING: tl.constexpr,
    SINKS: tl.constexpr, GATE: tl.constexpr, SPIN: tl.constexpr, LOG: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): the chunks' pieces in order, then the Hadamard rotation back and the output gate."""
    begin(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    b = row // W
    n_past = tl.load(n_past_ptr + b)
    used = tl.minimum(n_past + tl.load(n_rows_ptr + b), n_cells)
    low = n_past * 0
    if not RING:
        used = tl.minimum(used, n_past + W)
        if window > 0:
            low = tl.maximum(n_past - window + 1, 0) // N * N // chunk
    high = (used + chunk - 1) // chunk
    pair = (row * H + head).to(tl.int64)
    all_splits = tl.arange(0, SPLITS)
    written = (all_splits >= low) & (all_splits < high)
    tops = tl.load(top_ptr + pair * n_splits + all_splits, written, float("-inf"))
    top = tl.max(tops, 0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    e = tl.arange(0, BLOCK_V)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(low // STEP * STEP, high, STEP):
        s = start + tl.arange(0, STEP)
        inside = (s >= low) & (s < high)
        at = pair * n_splits + s
        weight = tl.exp(tl.load(top_ptr + at, inside, float("-inf")) - safe)
        total += tl.sum(weight * tl.load(total_ptr + at, inside, 0.0), 0)
        part = tl.load(part_ptr + at[:, None] * HD_V + e[None, :], inside[:, None] & (e < HD_V)[None, :], 0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    if SINKS:
        total += tl.exp(sink - safe)
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    if SPIN > 0:
        out = hadamard(out, BLOCK_V, SPIN, LOG)
    if GATE:
        z = tl.load(gate_ptr + row.to(tl.int64) * gate_row + head * gate_head + e, e < HD_V, 0.0)
        out = out * tl.div_rn(1.0, 1.0 + tl.exp(-z))
    tl.store(out_ptr + pair * HD_V + e, out, e < HD_V)


@triton.jit
def spin_kernel(x_ptr, out_ptr, HD, BLOCK: tl.constexpr, SPIN: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr):
    """The Hadamard rotation of one head vector."""
    begin(PDL)
    e = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * HD + e
    tl.store(out_ptr + at, hadamard(tl.load(x_ptr + at, e < HD, 0.0), BLOCK, SPIN, LOG), e < HD)


def spin(x: Tensor, n: int) -> Tensor:
    """x [.., hd] rotated by the Hadamard matrix of size n, 0: as it is."""
    if n == 0:
        return x
    out = torch.empty_like(x)
    hd = x.shape[-1]
    block = triton.next_power_of_2(hd)
    spin_kernel[(x.numel() // hd,)](x, out, hd, block, n, n.bit_length() - 1, num_warps=1, **overlap(x))
    return out


def chunk_of(n_cells: int) -> int:
    """Cells a program of the narrow kernel walks: a function of the cache alone."""
    chunk = 256
    while n_cells > chunk * MAX_SPLITS:
        chunk *= 2
    return chunk


def compute_type(type_name: str) -> tuple[tl.dtype, bool]:
    """The type that cache values are multiplied in, and whether the other factor needs splitting."""
    if type_name == "f32" or (type_name == "bf16" and triton.knobs.runtime.interpret):
        return tl.float32, False  # the interpreter has no products of bfloat16
    return (tl.bfloat16, True) if type_name == "bf16" else (tl.float16, False)


def attend(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec,
    gate: Tensor | None = None, q_rotated: bool = False,
) -> Tensor:  # fmt: skip
    B, W, H, hd_k = q.shape
    q = q.float().contiguous()
    if not q_rotated:
        q = spin(q, kv.rotation_k)
    narrow = W <= NARROW_ROWS
    G = H // kv.n_kv
    M = NARROW_TILE if narrow else WIDE_TILE
    tiles = triton.cdiv(W * G, M)
    chunk = chunk_of(kv.n_cells) if narrow else kv.n_cells
    n_splits = triton.cdiv(kv.n_cells, chunk)
    (type_k, split_k), (type_v, split_v) = compute_type(kv.type_k), compute_type(kv.type_v)
    kh, vh = as_halves(kv.k), as_halves(kv.v)
    block_k, block_v = (max(16, triton.next_power_of_2(hd)) for hd in (hd_k, kv.hd_v))
    N = 32 if max(block_k, block_v) > 128 or tl.float32 in (type_k, type_v) else 64
    out = torch.empty(B, W, H, kv.hd_v, dtype=torch.float32, device=q.device)
    parts, tops, totals = out, out, out
    if narrow:
        parts = torch.empty(B, W, H, n_splits, kv.hd_v, dtype=torch.float32, device=q.device)
        tops = torch.empty(2, B, W, H, n_splits, dtype=torch.float32, device=q.device)
        tops, totals = tops[0], tops[1]
    sinks = q if spec.sinks is None else spec.sinks
    attend_kernel[(n_splits, kv.n_kv * tiles, B)](
        q, kv.k, kh, kv.v, vh, iq4_table(q.device), slots, n_past, n_rows, sinks, parts, tops, totals,
        W, H, kv.n_kv, G, kv.n_cells, spec.scale, kv.k.shape[-1], kh.shape[-1], kv.v.shape[-1], vh.shape[-1],
        spec.window, n_splits, chunk, tiles,
        hd_k, kv.hd_v, block_k, block_v, kind_of(kv.type_k), kind_of(kv.type_v), type_k, type_v, split_k, split_v,
        spec.causal, kv.ring, spec.sinks is not None, narrow, M, N, num_warps=4, num_stages=2, **overlap(q),
    )  # fmt: skip
    if not narrow:
        out = spin(out, kv.rotation_v)
        return out if gate is None else out * torch.sigmoid(gate)
    gate_row = gate_head = 0
    if gate is not None:
        if gate.stride(3) != 1 or (B > 1 and gate.stride(0) != W * gate.stride(1)):
            gate = gate.contiguous()
        gate_row, gate_head = gate.stride(1), gate.stride(2)
    combine_kernel[(B * W, H)](
        parts, tops, totals, sinks, q if gate is None else gate, n_past, n_rows, out,
        W, H, kv.n_cells, spec.window, n_splits, chunk, gate_row, gate_head,
        kv.hd_v, block_v, triton.next_power_of_2(n_splits), COMBINE, kv.ring,
        spec.sinks is not None, gate is not None,
        kv.rotation_v, kv.rotation_v.bit_length() - 1 if kv.rotation_v else 0, N, num_warps=2, **overlap(parts),
    )  # fmt: skip
    return out
