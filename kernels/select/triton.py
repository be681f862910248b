"""Token selection as Triton kernels, in two passes over the vocabulary.

Top-k packs a logit and its id into one integer whose order is: larger logit first, then lower id. For a small k the
first pass only finds every run's best: the k runs with the largest hold all of the k best, for each of the k runs has
one that is no worse than the k-th largest of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul import PackedWeight, WeightGroup, matmul
from ggufspec.kernels.matmul.cuda import NARROW_TOKENS
from ggufspec.kernels.matmul.triton import gather, source_of, value
from ggufspec.kernels.overlap import begin, overlap
from ggufspec.kernels.prepared.triton import Target, whole_row, write_row

BLOCK = 2048  # logits a program of the first argmax pass takes
RUNS = 2048  # logits a program of the first top-k pass takes
SMALL_K = 64  # up to it by runs
SORT = 1024  # packed logits a program of a top-k pass sorts, beyond
LARGEST_K = 256  # beyond it the library selects
NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # packed, below all others


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
def logit_of(key):
    """x of `packed`, float32; -0 has become 0."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """i of `packed`, int64."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def run_max_kernel(x_ptr, out_ptr, V, n_runs, x_row, RUN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest of each run of RUN logits, packed with the number of the run."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
    i = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(x_ptr + row * x_row + i, i < V, float("-inf"))
    tl.store(out_ptr + row * n_runs + run, packed(tl.max(x, 1), run), run < n_runs)


@triton.jit
def top_of_runs_kernel(
    x_ptr, run_ptr, value_ptr, id_ptr, k, V, n_runs, x_row,
    K: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the K best runs, then the k best logits in them, descending."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, RUNS)
    runs = tl.topk(tl.load(run_ptr + row * n_runs + r, r < n_runs, NOTHING), K)
    first = id_of(runs) * RUN
    i = tl.reshape(first[:, None] + tl.arange(0, RUN)[None, :], (K * RUN,))
    x = tl.load(x_ptr + row * x_row + i, i < V, float("-inf"))
    key = tl.topk(tl.where(i < V, packed(x, i), NOTHING), K)
    x = logit_of(key)
    j = tl.arange(0, K)
    tl.store(value_ptr + row * k + j, x, j < k)
    tl.store(id_ptr + row * k + j, id_of(key), j < k)


@triton.jit
def pack_top_kernel(x_ptr, out_ptr, V, n_blocks, x_row, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The K best of each block, packed, descending."""
    begin(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + i, i < V, float("-inf"))
    keys = tl.where(i < V, packed(x, i), NOTHING)
    tl.store(out_ptr + (row * n_blocks + block) * K + tl.arange(0, K), tl.topk(keys, K))


@triton.jit
def merge_top_kernel(in_ptr, out_ptr, n, n_blocks, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(in_ptr + row * n + i, i < n, NOTHING)
    tl.store(out_ptr + (row * n_blocks + block) * K + tl.arange(0, K), tl.topk(keys, K))


@triton.jit
def unpack_kernel(in_ptr, value_ptr, id_ptr, k, k_in, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    key = tl.load(in_ptr + row * k_in + i, i < k, 0)
    x = logit_of(key)
    tl.store(value_ptr + row * k + i, x, i < k)
    tl.store(id_ptr + row * k + i, id_of(key), i < k)


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
    at = c[:, None] * R + r[None, :]
    inside = in_c[:, None] & in_r[None, :]
    row = b * n
    gate = tl.load(gate_ptr + row * R + r, in_r, 0.0)
    succ = tl.load(succ_ptr + row * K * R + at, inside, 0.0)
    value = tl.load(value_ptr + row * K + c, in_c, float("-inf"))
    chosen = b * 0
    for i in range(n):
        row = b * n + i
        p = tl.load(pred_ptr + (b * (1 + (n - 1) * K) + chosen) * R + r, in_r, 0.0) * gate
        # the next row's, which do not depend on what is chosen here, while that is on its way
        more, following = i + 1 < n, row + 1
        next_gate = tl.load(gate_ptr + following * R + r, in_r & more, 0.0)
        next_succ = tl.load(succ_ptr + following * K * R + at, inside & more, 0.0)
        next_value = tl.load(value_ptr + following * K + c, in_c & more, float("-inf"))
        score = value + tl.sum(succ * p[None, :], 1)
        best = tl.argmax(score, 0, tie_break_left=True)
        top = tl.max(score, 0)
        tl.store(share_ptr + row, 1.0 / tl.sum(tl.exp(score - top), 0))
        tl.store(token_ptr + row, tl.load(ids_ptr + row * K + best))
        chosen = 1 + i * K + best.to(tl.int64)
        gate, succ, value = next_gate, next_succ, next_value


@triton.jit
def markov_row_kernel(
    value_ptr, id_ptr, last_ptr, token_ptr, embedded_ptr, rows_ptr, scale_ptr, low, high, scale, extra,
    n_blocks, n, i, R, rows, row_bytes, unit,
    FIRST: tl.constexpr, LAST: tl.constexpr, FIXED: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): the token before row i of n, and its row of the Markov table into a matmul's input.

    The token is `last` (FIRST), else the best of the n_blocks found for row i - 1; LAST: the token alone.
    """
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    if FIRST:
        token = tl.load(last_ptr + b)
    else:
        k = tl.arange(0, BLOCK)
        best = tl.argmax(tl.load(value_ptr + b * n_blocks + k, k < n_blocks, float("-inf")), 0, tie_break_left=True)
        token = tl.load(id_ptr + b * n_blocks + best).to(tl.int64)
        tl.store(token_ptr + b * n + (i - 1), token)
    if not LAST:
        e = tl.arange(0, SIZE)
        v = value(
            low, high, scale, extra, token, e // 256, e % 256, e < R, rows, row_bytes, unit,
            LOW, HIGH, SCALE, OFFSET, TYPE,
        )  # fmt: skip
        v = tl.where(e < R, v, 0.0)
        tl.store(embedded_ptr + (b * n + i) * R + e, v, e < R)
        write_row(v, b, rows_ptr, scale_ptr, FIXED, WIDTH, SIZE)


@triton.jit
def selector_rows_kernel(
    ids_ptr, last_ptr, pred_ptr, succ_ptr, p_low, p_high, p_scale, p_extra, s_low, s_high, s_scale, s_extra,
    n, K, R, p_rows, s_rows, row_bytes, p_unit, s_unit,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, sequence): the n K candidates' successor rows, then the predecessor rows of `walk_kernel`."""
    begin(PDL)
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e = tl.arange(0, SIZE)
    block, inside, mask = e // 256, e % 256, e < R
    if t < n * K:
        token = tl.load(ids_ptr + b * n * K + t)
        v = value(s_low, s_high, s_scale, s_extra, token, block, inside, mask, s_rows, row_bytes, s_unit,
                  LOW, HIGH, SCALE, OFFSET, TYPE)  # fmt: skip
        tl.store(succ_ptr + (b * n * K + t) * R + e, v, mask)
    else:
        t -= n * K
        if t == 0:
            token = tl.load(last_ptr + b)
        else:
            token = tl.load(ids_ptr + b * n * K + t - 1)
        v = value(p_low, p_high, p_scale, p_extra, token, block, inside, mask, p_rows, row_bytes, p_unit,
                  LOW, HIGH, SCALE, OFFSET, TYPE)  # fmt: skip
        tl.store(pred_ptr + (b * (1 + (n - 1) * K) + t) * R + e, v, mask)


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


def run_length(V: int, K: int) -> int:
    """The power of two that makes K runs about as long as there are runs."""
    run = 2
    while K * run * run < V and run < RUNS:
        run *= 2
    return run


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, stride = as_rows(x)
    T, V = rows.shape
    K = max(2, triton.next_power_of_2(k))
    if K > LARGEST_K:
        ordered = rows.sort(dim=-1, descending=True, stable=True)
        shape = (*x.shape[:-1], k)
        return ordered.values[:, :k].reshape(shape), ordered.indices[:, :k].reshape(shape)
    values = torch.empty(*x.shape[:-1], k, dtype=torch.float32, device=x.device)
    ids = torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device)
    if K <= SMALL_K:
        run = run_length(V, K)
        n = triton.cdiv(V, run)
        best = torch.empty(T, n, dtype=torch.int64, device=x.device)
        run_max_kernel[(triton.cdiv(n * run, RUNS), T)](rows, best, V, n, stride, run, RUNS, **overlap(rows))
        n_held = max(K, triton.next_power_of_2(n))
        top_of_runs_kernel[(T,)](
            rows, best, values, ids, k, V, n, stride, K, run, n_held,
            num_warps=max(1, min(16, max(n_held, K * run) // 256)), **overlap(rows),
        )  # fmt: skip
        return values, ids
    n = triton.cdiv(V, SORT)
    keys = torch.empty(T, n * K, dtype=torch.int64, device=x.device)
    pack_top_kernel[(n, T)](rows, keys, V, n, stride, K, SORT, **overlap(rows))
    while n > 1:
        length = n * K
        n = triton.cdiv(length, SORT)
        merged = torch.empty(T, n * K, dtype=torch.int64, device=x.device)
        merge_top_kernel[(n, T)](keys, merged, length, n, K, SORT, **overlap(keys))
        keys = merged
    unpack_kernel[(T,)](keys, values, ids, k, K, K, num_warps=1, **overlap(keys))
    return values, ids


def markov_tokens(logits: Tensor, last: Tensor, table: PackedWeight, project: WeightGroup) -> tuple[Tensor, Tensor]:
    """`chains.markov_walk`: three launches a row."""
    B, n, V = logits.shape
    R, source, device = table.shape[1], source_of(table), logits.device
    tokens = torch.empty(B, n, dtype=torch.int64, device=device)
    embedded = torch.empty(B, n, R, dtype=torch.float32, device=device)
    n_blocks = triton.cdiv(V, BLOCK)
    values = torch.empty(B, n_blocks, dtype=torch.float32, device=device)
    ids = torch.empty(B, n_blocks, dtype=torch.int32, device=device)
    to, last = Target(B, R, logits), last.contiguous()
    for i in range(n + 1):
        markov_row_kernel[(B,)](
            values, ids, last, tokens, embedded, to.rows, to.scale, *source.arrays,
            n_blocks, n, i, R, source.rows, source.row_bytes, source.unit,
            FIRST=i == 0, LAST=i == n, FIXED=B > NARROW_TOKENS, **source.constants,
            BLOCK=triton.next_power_of_2(n_blocks), **whole_row(to.width), **overlap(logits, fuse=False),
        )  # fmt: skip
        if i < n:
            (bias,) = matmul(to.activation, project)
            rows, stride = as_rows(logits[:, i])
            block_max_kernel[(n_blocks, B)](rows, bias, values, ids, V, n_blocks, stride, True, BLOCK, **overlap(rows))
    return tokens, embedded


def selector_rows(
    ids: Tensor, last: Tensor, predecessor: PackedWeight, successor: PackedWeight
) -> tuple[Tensor, Tensor]:
    B, n, K = ids.shape
    R = predecessor.shape[1]
    p, s = source_of(predecessor), source_of(successor)
    pred = torch.empty(B, 1 + (n - 1) * K, R, dtype=torch.float32, device=ids.device)
    succ = torch.empty(B, n, K, R, dtype=torch.float32, device=ids.device)
    if p.constants != s.constants or p.row_bytes != s.row_bytes:  # kept in two forms
        before = torch.cat((last[:, None], ids[:, :-1].reshape(B, -1)), 1)
        return gather(predecessor, before.flatten()).view(pred.shape), gather(successor, ids.flatten()).view(succ.shape)
    selector_rows_kernel[(n * K + pred.shape[1], B)](
        ids.contiguous(), last.contiguous(), pred, succ, *p.arrays, *s.arrays,
        n, K, R, p.rows, s.rows, p.row_bytes, p.unit, s.unit, **p.constants,
        SIZE=triton.next_power_of_2(R), num_warps=2, **overlap(pred, fuse=False),
    )  # fmt: skip
    return pred, succ


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
