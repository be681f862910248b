"""Attention of prompt chunks: one program walks all cells of a tile of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.attention.shape import old
from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.attention.tiles import compute_type, load_tile, product, visible
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.kv.triton import as_halves, iq4_table, kind_of
from ggufspec.kernels.overlap import begin, overlap

TILE, WARPS, STAGES = 64, 4, 2  # (row, query head) pairs a program takes, its warps, its loop's stages
OLD_TILE = 16  # pairs and cells where a program has 64 KB of shared memory


@triton.jit(do_not_specialize=["W"])
def prompt_kernel(
    q_ptr, k_ptr, k_half_ptr, v_ptr, v_half_ptr, table_ptr, slot_ptr, n_past_ptr, n_rows_ptr, sinks_ptr, out_ptr,
    W, n_cells, scale, window,
    N_KV: tl.constexpr, G: tl.constexpr, HD_K: tl.constexpr, HD_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ROW_K: tl.constexpr, HALF_K: tl.constexpr, ROW_V: tl.constexpr, HALF_V: tl.constexpr,
    KIND_K: tl.constexpr, KIND_V: tl.constexpr, TYPE_K: tl.constexpr, TYPE_V: tl.constexpr,
    SPLIT_K: tl.constexpr, SPLIT_V: tl.constexpr, CAUSAL: tl.constexpr, RING: tl.constexpr,
    SINKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of M pairs, key head, entry): out [B, W, H, HD_V], finished but for the rotation."""
    begin(PDL)
    tile, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_past = tl.load(n_past_ptr + b).to(tl.int32)
    n_stored = n_past + tl.load(n_rows_ptr + b).to(tl.int32)
    used = tl.minimum(n_stored, n_cells)
    low, end = n_past * 0, used
    if not RING:
        if CAUSAL:
            end = tl.minimum(end, n_past + tl.minimum(W - 1, (tile * M + M - 1) // G) + 1)
        if window > 0:
            low = tl.maximum(n_past + (tile * M) // G - window + 1, 0) // N * N
    index = tile * M + tl.arange(0, M)  # (row, query head of the group)
    row, head = index // G, group * G + index % G
    valid = row < W
    position = n_past + row
    pair = ((b * W + row) * (N_KV * G) + head).to(tl.int64)
    e, ev = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q = tl.load(q_ptr + pair[:, None] * HD_K + e[None, :], valid[:, None] & (e < HD_K)[None, :], 0.0) * scale
    head_of_slot = tl.load(slot_ptr + b) * n_cells * N_KV + group
    k_ptr += head_of_slot * ROW_K
    v_ptr += head_of_slot * ROW_V
    k_half_ptr += head_of_slot * HALF_K
    v_half_ptr += head_of_slot * HALF_V
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BLOCK_V), tl.float32)
    for start in range(low.to(tl.int64), end.to(tl.int64), N):
        k = load_tile(k_ptr, k_half_ptr, table_ptr, start, used, N_KV * ROW_K, N_KV * HALF_K,
                      KIND_K, HD_K, BLOCK_K, N, TYPE_K, ASM)  # fmt: skip
        cell = (start + tl.arange(0, N)).to(tl.int32)[None, :]
        seen = visible(cell, position[:, None], valid[:, None], n_stored, used, n_cells, window, CAUSAL, True, RING)
        scores = tl.where(seen, product(q, tl.trans(k), SPLIT_K), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(v_ptr, v_half_ptr, table_ptr, start, used, N_KV * ROW_V, N_KV * HALF_V,
                      KIND_V, HD_V, BLOCK_V, N, TYPE_V, ASM)  # fmt: skip
        acc = acc * shrink[:, None] + product(p, v, SPLIT_V)
        top = higher
    if SINKS:
        sink = tl.load(sinks_ptr + head, valid, 0.0)
        higher = tl.maximum(top, sink)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.exp(sink - higher)
        acc = acc * shrink[:, None]
    acc = tl.where(total[:, None] > 0, acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    tl.store(out_ptr + pair[:, None] * HD_V + ev[None, :], acc, valid[:, None] & (ev < HD_V)[None, :])


def attend(q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec) -> Tensor:
    """q [B, W, H, hd], rotated as the cache is, contiguous float32, to [B, W, H, hd_v], rotated as its values."""
    B, W, H, hd_k = q.shape
    G = H // kv.n_kv
    (type_k, split_k), (type_v, split_v) = compute_type(kv.type_k), compute_type(kv.type_v)
    kh, vh = as_halves(kv.k), as_halves(kv.v)
    block_k, block_v = (max(32, triton.next_power_of_2(hd)) for hd in (hd_k, kv.hd_v))
    N = 32 if max(block_k, block_v) > 128 or tl.float32 in (type_k, type_v) else 64
    tile, N = (OLD_TILE, OLD_TILE) if old(kv.device) else (TILE, N)
    out = torch.empty(B, W, H, kv.hd_v, dtype=torch.float32, device=q.device)
    prompt_kernel[(triton.cdiv(W * G, tile), kv.n_kv, B)](
        q, kv.k, kh, kv.v, vh, iq4_table(q.device), slots, n_past, n_rows,
        q if spec.sinks is None else spec.sinks, out,
        W, kv.n_cells, spec.scale, spec.window,
        kv.n_kv, G, hd_k, kv.hd_v, block_k, block_v,
        kv.k.shape[-1], kh.shape[-1], kv.v.shape[-1], vh.shape[-1],
        kind_of(kv.type_k), kind_of(kv.type_v), type_k, type_v, split_k, split_v,
        spec.causal, kv.ring, spec.sinks is not None, tile, N, not triton.knobs.runtime.interpret,
        num_warps=WARPS, num_stages=STAGES, **overlap(q),
    )  # fmt: skip
    return out
