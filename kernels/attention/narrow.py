"""Attention of narrow batches (decode, verify, draft block): the cells in splits, then their combination.

A split is one stretch of cells, a program's work. How long splits are follows from a row's own position: as short as
gives the row no more than `most_splits`, so that at any depth about as many programs of equal length start as a card
runs at once. Cells are the tensor cores' long side, (row, query head) pairs their columns, padded to 8, 16 or 32:
what a cell costs, the conversion of its bytes, is done once for a tile's columns, and few columns cost little. Scores
of cells a row does not see are -inf and add exact zeros, sums over cells are matrix products whose order does not
depend on how many columns a tile has, and splits are added by their number: a row's bits depend on nothing but its
own past. Where rows of one step have splits of two lengths, cells are walked once for each.

Exponentials are powers of two (scores and `top` are in units of log 2): the hardware's own instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.attention import shape
from ggufspec.kernels.attention.shape import CHUNK
from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.attention.tiles import (
    compute_type,
    load_pairs,
    load_plain_turned,
    load_tile,
    power,
    product,
    visible,
)
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.kv.triton import PLAIN, Q8_0, as_halves, hadamard, iq4_table, kind_of
from ggufspec.kernels.matmul.repack import BLOCK, n_super_blocks
from ggufspec.kernels.matmul.values import FIXED_SCALE, fixed_half, row_place
from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.overlap import ENTRY_NUMBERS, begin, overlap

LOG2E = tl.constexpr(1.4426950408889634)  # of a score: exponentials are powers of two
DIMS = 64  # value dimensions a program of the second kernel takes; rotations of values are of this size
LAST_WARPS = 4  # of it: more find no room beside the first one's programs


@triton.jit
def split_cells(position, n_cells, MOST: tl.constexpr):
    """Cells of each split of rows at positions."""
    return (tl.minimum(tl.maximum(position, 0), n_cells - 1) // (CHUNK * MOST) + 1) * CHUNK


@triton.jit
def live(
    n_past_ptr, n_rows_ptr, b, W, n_cells, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Of entry b: (n_past, stored positions, used cells, first cell to read, cell to stop at)."""
    n_past = tl.load(n_past_ptr + b).to(tl.int32)
    n_stored = n_past + tl.load(n_rows_ptr + b).to(tl.int32)
    used = tl.minimum(n_stored, n_cells)
    low, end = n_past * 0, used
    if not RING:
        if CAUSAL:
            end = tl.minimum(end, n_past + W)
        if WINDOW:
            low = tl.maximum(n_past - window + 1, 0) // N * N
    return n_past, n_stored, used, low, end


@triton.jit
def live_splits(low, end, size, MOST: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr):
    """Of rows with splits of `size` cells: (first split, split to stop at)."""
    if CAUSAL and not RING:
        end = tl.minimum(end, size * MOST)  # cells past that belong to rows of longer splits
    return low // size, tl.where(end > low, (end - 1) // size + 1, 0)


@triton.jit(do_not_specialize=["W", "n_splits"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def split_kernel(
    q_ptr, k_ptr, k_half_ptr, v_ptr, v_half_ptr, table_ptr, slot_ptr, n_past_ptr, n_rows_ptr,
    part_ptr, top_ptr, total_ptr,
    W, n_cells, scale, window, n_splits,
    N_KV: tl.constexpr, G: tl.constexpr, HD_K: tl.constexpr, HD_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ROW_K: tl.constexpr, HALF_K: tl.constexpr, ROW_V: tl.constexpr, HALF_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    SPLIT_K: tl.constexpr, SPLIT_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    RING: tl.constexpr, MOST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head and tile of M pairs, place among the programs of the splits, entry): of each pair's splits
    the largest score, the sum of exponentials and the weighted values. part [B, W, H, n_splits, HD_V], top and total
    [B, W, H, n_splits]; splits that hold nothing to read are not written."""
    begin(PDL)
    group, tile, b = tl.program_id(0) % N_KV, tl.program_id(0) // N_KV, tl.program_id(2)
    index = tile * M + tl.arange(0, M)  # (row, query head of the group)
    row, head = index // G, group * G + index % G
    valid = row < W
    pair = ((b * W + row) * (N_KV * G) + head).to(tl.int64)
    PAIRED_K: tl.constexpr = KIND_K == Q8_0
    PAIRED: tl.constexpr = KIND_V == Q8_0
    STRIDE: tl.constexpr = 2 if PAIRED_K else 1
    e, ev = tl.arange(0, BLOCK_K // STRIDE), tl.arange(0, BLOCK_V)
    slot = tl.load(slot_ptr + b)  # these and the counts below travel together
    q_ptr += pair[None, :] * HD_K + STRIDE * e[:, None]
    there = valid[None, :] & (STRIDE * e < HD_K)[:, None]
    q, q_odd = tl.load(q_ptr, there, 0.0), 0.0
    if PAIRED_K:
        q_odd = tl.load(q_ptr + 1, there, 0.0)
    n_past, n_stored, used, low, end = live(n_past_ptr, n_rows_ptr, b, W, n_cells, window, CAUSAL, WINDOW, RING, N)
    short = split_cells(n_past + tile * M // G, n_cells, MOST)
    long = split_cells(n_past + tl.minimum((tile * M + M - 1) // G, W - 1), n_cells, MOST)
    first, stop = live_splits(low, end, short, MOST, CAUSAL, RING)
    first_long, stop_long = live_splits(low, end, long, MOST, CAUSAL, RING)
    n_short = stop - first
    turns = tl.where(short == long, n_short, n_short + stop_long - first_long)
    if (tl.program_id(1) >= turns) | (slot < 0):  # no slot is: asked here, its load is not put off until it is needed
        return
    position = n_past + row
    q *= scale
    q_odd *= scale
    head_of_slot = slot * n_cells * N_KV + group
    k_ptr += head_of_slot * ROW_K
    v_ptr += head_of_slot * ROW_V
    k_half_ptr += head_of_slot * HALF_K
    v_half_ptr += head_of_slot * HALF_V
    ones = tl.full((64, N), 1.0, TYPE_V)  # as many rows as Hopper's instruction takes; the sums' rows are equal
    for turn in range(tl.program_id(1), turns, tl.num_programs(1)):
        size = tl.where(turn < n_short, short, long)
        split = tl.where(turn < n_short, first + turn, first_long + turn - n_short)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((64, M), tl.float32)
        acc = tl.zeros((BLOCK_V // 2 if PAIRED else BLOCK_V, M), tl.float32)
        odd = acc
        begins, ends = tl.maximum(split * size, low), tl.minimum((split + 1) * size, end)
        for start in range(begins.to(tl.int64), ends.to(tl.int64), N):
            if PAIRED_K:
                k, k_odd = load_pairs(k_half_ptr, start, used, N_KV * HALF_K, HD_K, BLOCK_K, N, False, ASM)
                scores = product(k, q, SPLIT_K) + product(k_odd, q_odd, SPLIT_K)
            else:
                k = load_tile(k_ptr, k_half_ptr, table_ptr, start, used, N_KV * ROW_K, N_KV * HALF_K,
                              KIND_K, HD_K, BLOCK_K, N, TYPE_K, ASM)  # fmt: skip
                scores = product(k, q, SPLIT_K)
            cell = (start + tl.arange(0, N)).to(tl.int32)[:, None]
            seen = visible(cell, position[None, :], valid[None, :], n_stored, used, n_cells, window,
                           CAUSAL, WINDOW, RING)  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            p = power(scores - safe[None, :], ASM)
            shrink = power(top - safe, ASM)[None, :]
            total = total * shrink + product(ones, p, SPLIT_V)
            if PAIRED:
                v, w = load_pairs(v_half_ptr, start, used, N_KV * HALF_V, HD_V, BLOCK_V, N, True, ASM)
                odd = odd * shrink + product(w, p, SPLIT_V)
            elif KIND_V == PLAIN:
                v = load_plain_turned(v_ptr, start, used, N_KV * ROW_V, HD_V, BLOCK_V, N, TYPE_V)
            else:
                v = tl.trans(load_tile(v_ptr, v_half_ptr, table_ptr, start, used, N_KV * ROW_V, N_KV * HALF_V,
                                       KIND_V, HD_V, BLOCK_V, N, TYPE_V, ASM))  # fmt: skip
            acc = acc * shrink + product(v, p, SPLIT_V)
            top = higher
        own = valid & (split_cells(position, n_cells, MOST) == size)
        at = pair * n_splits + split
        tl.store(top_ptr + at, top, own)
        tl.store(total_ptr + at, tl.max(total, 0), own)
        if PAIRED:
            acc = tl.reshape(tl.permute(tl.join(acc, odd), (0, 2, 1)), (BLOCK_V, M))
        tl.store(part_ptr + at[None, :] * HD_V + ev[:, None], acc, own[None, :] & (ev < HD_V)[:, None])


@triton.jit(do_not_specialize=["W", "n_splits"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def combine_kernel(
    part_ptr, top_ptr, total_ptr, sinks_ptr, gate_ptr, n_past_ptr, n_rows_ptr, out_ptr, scale_ptr,
    W, H, n_cells, window, n_splits, gate_row, gate_head, width,
    HD_V: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, PIECES: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, RING: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr, SPIN: tl.constexpr,
    LOG: tl.constexpr, N: tl.constexpr, PREPARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, D value dimensions): the splits' pieces at once, the Hadamard rotation back, the output
    gate. out [B, W, H, HD_V], or PREPARED: a matmul's input, rows of `width` halves, and its scale."""
    begin(PDL)
    row, head, e = tl.program_id(0), tl.program_id(1), tl.program_id(2) * D + tl.arange(0, D)
    mask = e < HD_V
    z = tl.zeros((D,), tl.float32)
    if GATE:
        z = tl.load(gate_ptr + row.to(tl.int64) * gate_row + head * gate_head + e, mask, 0.0)
    n_past, _, _, low, end = live(n_past_ptr, n_rows_ptr, row // W, W, n_cells, window, CAUSAL, WINDOW, RING, N)
    size = split_cells(n_past + row % W, n_cells, MOST)
    first, stop = live_splits(low, end, size, MOST, CAUSAL, RING)
    pair = (row * H + head).to(tl.int64)
    s = tl.arange(0, PIECES)
    inside = (s >= first) & (s < stop)
    at = pair * n_splits + s
    tops = tl.load(top_ptr + at, inside, float("-inf"))
    totals = tl.load(total_ptr + at, inside, 0.0)
    part = tl.load(part_ptr + at[:, None] * HD_V + e[None, :], inside[:, None] & mask[None, :], 0.0)
    top = tl.max(tops, 0)
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * totals, 0)
    acc = tl.sum(weight[:, None] * part, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    if SPIN > 0:
        out = hadamard(out, D, SPIN, LOG)
    if GATE:
        out = out * tl.div_rn(1.0, 1.0 + tl.exp(-z))
    if PREPARED:
        out_ptr += row.to(tl.int64) * width
        tl.store(out_ptr + row_place(head * HD_V + e), fixed_half(out), mask)
        if (head == 0) & (tl.program_id(2) == 0):
            tl.store(scale_ptr + row, FIXED_SCALE)
            past = H * HD_V + tl.arange(0, 256)  # columns that fill up the last super-block
            tl.store(out_ptr + row_place(past), tl.zeros((256,), tl.float16), past < width)
    else:
        tl.store(out_ptr + pair * HD_V + e, out, mask)


def pieces(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q [B, W, H, hd], rotated as the cache is, contiguous float32: what `split_kernel` writes."""
    B, W, H, hd_k = q.shape
    n_kv, hd_v = kv.n_kv, kv.hd_v
    G = H // n_kv
    (type_k, split_k), (type_v, split_v) = compute_type(kv.type_k), compute_type(kv.type_v)
    M = shape.columns(kv, W * G)
    tiles = triton.cdiv(W * G, M)
    most = shape.most_splits(n_kv)
    n_splits = shape.count_splits(kv.n_cells, most, int(kv.ring or not spec.causal))
    programs = max(1, min(n_splits, shape.PROGRAMS // (n_kv * tiles * B)))
    kh, vh = as_halves(kv.k), as_halves(kv.v)
    parts = torch.empty(B, W, H, n_splits, hd_v, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, B, W, H, n_splits, dtype=torch.float32, device=q.device).unbind(0)
    split_kernel[(n_kv * tiles, programs, B)](
        q, kv.k, kh, kv.v, vh, iq4_table(q.device), slots, n_past, n_rows, parts, tops, totals,
        W, kv.n_cells, spec.scale * LOG2E.value, spec.window, n_splits,
        n_kv, G, hd_k, hd_v, max(32, triton.next_power_of_2(hd_k)), max(32, triton.next_power_of_2(hd_v)),
        kv.k.shape[-1], kh.shape[-1], kv.v.shape[-1], vh.shape[-1],
        kind_of(kv.type_k), kind_of(kv.type_v), type_k, type_v, split_k, split_v, spec.causal, spec.window > 0, kv.ring,
        most, M, shape.cells_at_once(kv), not triton.knobs.runtime.interpret,
        num_warps=shape.warps(kv), num_stages=shape.stages(kv), maxnreg=shape.registers(kv), **overlap(q),
    )  # fmt: skip
    return parts, tops, totals


def combine(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec, gate: Tensor | None,
    out: Tensor, scale: Tensor | None,
) -> None:  # fmt: skip
    """Attention of q into out [B, W, H, hd_v], or with a scale [B * W] into rows [B * W, width] of a matmul."""
    B, W, H, _ = q.shape
    hd_v = kv.hd_v
    parts, tops, totals = pieces(q, kv, slots, n_past, n_rows, spec)
    gate_row = gate_head = 0
    if gate is not None:
        if gate.stride(3) != 1 or (B > 1 and gate.stride(0) != W * gate.stride(1)):
            gate = gate.contiguous()
        gate_row, gate_head = gate.stride(1), gate.stride(2)
    most = shape.most_splits(kv.n_kv)
    D = DIMS if hd_v % DIMS == 0 else triton.next_power_of_2(hd_v)
    combine_kernel[(B * W, H, triton.cdiv(hd_v, D))](
        parts, tops, totals, q if spec.sinks is None else spec.sinks, q if gate is None else gate, n_past, n_rows,
        out, out if scale is None else scale,
        W, H, kv.n_cells, spec.window, parts.shape[3], gate_row, gate_head, out.shape[-1],
        hd_v, D, most, triton.next_power_of_2(most + 1), spec.causal, spec.window > 0, kv.ring,
        spec.sinks is not None, gate is not None,
        kv.rotation_v, kv.rotation_v.bit_length() - 1 if kv.rotation_v else 0, shape.cells_at_once(kv),
        scale is not None, num_warps=LAST_WARPS, **overlap(q),
    )  # fmt: skip


def attend(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec, gate: Tensor | None
) -> Tensor:
    """q [B, W, H, hd], rotated as the cache is, contiguous float32, to [B, W, H, hd_v]."""
    out = torch.empty(*q.shape[:3], kv.hd_v, dtype=torch.float32, device=q.device)
    combine(q, kv, slots, n_past, n_rows, spec, gate, out, None)
    return out


def attend_prepared(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec, gate: Tensor | None
) -> Activation:
    """The same to a matmul's input [B * W, H * hd_v]."""
    B, W, H, _ = q.shape
    rows = torch.empty(B * W, n_super_blocks(H * kv.hd_v) * BLOCK, dtype=torch.float16, device=q.device)
    scale = torch.empty(B * W, dtype=torch.float32, device=q.device)
    combine(q, kv, slots, n_past, n_rows, spec, gate, rows, scale)
    return Activation(rows, H * kv.hd_v, scale)
