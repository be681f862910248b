"""Gated DeltaNet as Triton kernels: convolution and gates, the recurrence with replay, and prompt chunks.

The recurrence walks replayed and new rows in one loop with one body, in which products are not contracted: grouping
rows into steps cannot change a bit. A program holds some value rows of one head's state in registers; the state is
read once, and written once when something was replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.gdn.state import GdnSpec, GdnState, GdnWeights
from ggufspec.kernels.norm.triton import sigmoid_of
from ggufspec.kernels.overlap import begin, overlap

VALUES = 32  # value rows of the state a program holds
CHUNK = 64


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize=["W"])
def inputs_kernel(
    u_ptr, alpha_ptr, beta_ptr, conv_ptr, dt_ptr, a_ptr, tail_ptr, window_ptr, slot_ptr, counts_ptr, n_rows_ptr,
    u_out_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_out_ptr,
    eps, W, N_K, N_V, n_slots, max_window, u_row, alpha_row, beta_row, counts_row,
    D: tl.constexpr, BLOCK: tl.constexpr, KERNEL: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, entry): convolution and SiLU of one head of one row; q and k normalized, gates of v.

    RECORD: u, k, v, g and beta go to the half of the window that is not being replayed (pointers are the window's
    parts); otherwise k, v, g, beta are [B, W, ..], and rows past n_rows get g = beta = 0. q is [B, W, n_k, d].
    """
    begin(PDL)
    w, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C = (2 * N_K + N_V) * D
    slot = tl.load(slot_ptr + b)
    n = tl.load(counts_ptr + slot)
    half = tl.load(counts_ptr + counts_row + slot)
    e = tl.arange(0, BLOCK)
    mask = e < D
    channel = head * D + e
    replayed = (half * n_slots + slot) * max_window * C
    y = tl.zeros((BLOCK,), tl.float32)
    current = y
    for j in tl.static_range(KERNEL):
        i = w + j  # 0 .. KERNEL - 2 precede this step's rows: the last of tail and replayed window
        before = i < KERNEL - 1
        t = n + i
        from_tail = before & (t < KERNEL - 1)
        from_window = before & (t >= KERNEL - 1)
        x = tl.load(tail_ptr + (slot * (KERNEL - 1) + t) * C + channel, mask & from_tail, 0.0)
        x += tl.load(window_ptr + replayed + (t - (KERNEL - 1)) * C + channel, mask & from_window, 0.0)
        x += tl.load(u_ptr + (b * W + i - (KERNEL - 1)).to(tl.int64) * u_row + channel, mask & (i >= KERNEL - 1), 0.0)
        y += tl.load(conv_ptr + channel * KERNEL + j, mask, 0.0) * x
        current = x
    y = y * sigmoid_of(y)
    row = (b * W + w).to(tl.int64)
    if RECORD:
        out = ((1 - half) * n_slots + slot) * max_window + w
        tl.store(u_out_ptr + out * C + channel, current, mask)
    else:
        out = row
    if head < 2 * N_K:
        y = y * tl.rsqrt(tl.sum(y * y, 0) + eps)
        if head < N_K:
            tl.store(q_ptr + (row * N_K + head) * D + e, y, mask)
        else:
            tl.store(k_ptr + (out * N_K + head - N_K) * D + e, y, mask)
    else:
        h = head - 2 * N_K
        tl.store(v_ptr + (out * N_V + h) * D + e, y, mask)
        g = softplus(tl.load(alpha_ptr + row * alpha_row + h) + tl.load(dt_ptr + h)) * tl.load(a_ptr + h)
        gate = sigmoid_of(tl.load(beta_ptr + row * beta_row + h))
        if not RECORD:
            valid = w < tl.load(n_rows_ptr + b)
            g = tl.where(valid, g, 0.0)
            gate = tl.where(valid, gate, 0.0)
        tl.store(g_ptr + out * N_V + h, g)
        tl.store(beta_out_ptr + out * N_V + h, gate)


@triton.jit
def token(
    t, n, old, new, q_row, h, key_head, i, j, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, W, N_K, N_V,
    D: tl.constexpr,
):  # fmt: skip
    """What the recurrence takes of row t: a replayed one below n, then the W new ones; zeros past them."""
    fresh, inside = t >= n, t < n + W
    row = tl.where(fresh, new + t - n, old + t)
    q_at = ((q_row + tl.maximum(t - n, 0)) * N_K + key_head) * D
    k = tl.load(k_ptr + (row * N_K + key_head) * D + i, (i < D) & inside, 0.0)
    q = tl.load(q_ptr + q_at + i, (i < D) & fresh & inside, 0.0)
    v = tl.load(v_ptr + (row * N_V + h) * D + j, (j < D) & inside, 0.0)
    g = tl.load(g_ptr + row * N_V + h, inside, 0.0)
    beta = tl.load(beta_ptr + row * N_V + h, inside, 0.0)
    return q, k, v, g, beta


@triton.jit(do_not_specialize=["W"])
def recurrence_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, tail_ptr, state_ptr, out_ptr, slot_ptr, counts_ptr,
    scale, W, N_K, N_V, n_slots, max_window, C, counts_row,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value slice, value head, entry): replayed rows into the state, then the W new rows without storing.

    k, v, g, beta, u: the window's parts, whose other half holds the new rows; q [B, W, n_k, d]. Each program also
    moves its share of channels of the convolution tail past the replayed rows.
    """
    begin(PDL)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slot_ptr + b)
    n = tl.load(counts_ptr + slot)
    half = tl.load(counts_ptr + counts_row + slot)
    old = (half * n_slots + slot) * max_window
    new = ((1 - half) * n_slots + slot) * max_window
    key_head = h % N_K
    i = tl.arange(0, BLOCK)
    j = part * ROWS + tl.arange(0, ROWS)
    in_key, in_value = i < D, j < D
    mask = in_value[:, None] & in_key[None, :]
    at = state_ptr + ((slot * N_V + h) * D + j[:, None]) * D + i[None, :]
    A = tl.load(at, mask, 0.0)
    q, k, v, g, beta = token(n * 0, n, old, new, b * W, h, key_head, i, j, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
                             W, N_K, N_V, D)  # fmt: skip
    for t in range(0, n + W):
        fresh = t >= n
        q2, k2, v2, g2, beta2 = token(t + 1, n, old, new, b * W, h, key_head, i, j, q_ptr, k_ptr, v_ptr, g_ptr,
                                      beta_ptr, W, N_K, N_V, D)  # fmt: skip
        A = A * tl.exp(g)
        delta = beta * (v - tl.sum(A * k[None, :], 1))
        o = tl.sum(A * q[None, :], 1) + delta * tl.sum(k * q, 0)
        A = A + delta[:, None] * k[None, :]
        o_at = ((b * W + t - n) * N_V + h) * D + j
        tl.store(out_ptr + o_at, o * scale, in_value & fresh)
        tl.store(at, A, mask & (t == n - 1))
        q, k, v, g, beta = q2, k2, v2, g2, beta2  # loaded ahead: the next row waits for nothing but A
    if n > 0:
        program = h * tl.num_programs(0) + part
        channel = program * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < C
        for r in tl.static_range(KERNEL - 1):
            t = n + r  # reads are always ahead of the writes
            x = tl.load(tail_ptr + (slot * (KERNEL - 1) + t) * C + channel, inside & (t < KERNEL - 1), 0.0)
            x += tl.load(u_ptr + (old + t - (KERNEL - 1)) * C + channel, inside & (t >= KERNEL - 1), 0.0)
            tl.store(tail_ptr + (slot * (KERNEL - 1) + r) * C + channel, x, inside)


@triton.jit
def inverse_kernel(system_ptr, out_ptr, N: tl.constexpr):
    """(I + L)^-1 of one strictly lower triangular L [N, N], row by row."""
    base = tl.program_id(0).to(tl.int64) * N * N
    r = tl.arange(0, N)
    at = r[:, None] * N + r[None, :]
    negative = -tl.load(system_ptr + base + at)
    X = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, N):
        mine = (r == i)[:, None]
        row = tl.sum(tl.where(mine, negative, 0.0), 0)  # -L[i, :], zero from i on
        solved = tl.sum(row[:, None] * X, 0)
        X = tl.where(mine, X + solved[None, :], X)
    tl.store(out_ptr + base + at, X)


@triton.jit
def scan_kernel(
    U_ptr, Y_ptr, mixed_ptr, q_ptr, k_ptr, last_ptr, state_ptr, out_ptr, n_chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (value slice, sequence and head): the state [ROWS, D] over all chunks.

    U, Y, q (grown), k (to the chunk's end) [S, n, T, D], mixed [S, n, T, T], last [S, n], state [S, D, D] in place,
    out [S, n, T, D].
    """
    part, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    j = part * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, T)
    wide = (i < D)[None, :]
    narrow = (j < D)[None, :]
    at = state_ptr + (s * D + j[:, None]) * D + i[None, :]
    mask = (j < D)[:, None] & wide
    A = tl.load(at, mask, 0.0)
    for c in range(n_chunks):
        chunk = s * n_chunks + c
        rows = chunk * T * D + t[:, None] * D
        Y = tl.load(Y_ptr + rows + i[None, :], wide, 0.0)
        AT = tl.trans(A)
        delta = tl.load(U_ptr + rows + j[None, :], narrow, 0.0)
        delta -= tl.dot(Y, AT, input_precision=PRECISION)
        q = tl.load(q_ptr + rows + i[None, :], wide, 0.0)
        mixed = tl.load(mixed_ptr + chunk * T * T + t[:, None] * T + t[None, :])
        o = tl.dot(q, AT, input_precision=PRECISION) + tl.dot(mixed, delta, input_precision=PRECISION)
        tl.store(out_ptr + rows + j[None, :], o, narrow)
        k = tl.load(k_ptr + rows + i[None, :], wide, 0.0)
        A = A * tl.load(last_ptr + chunk) + tl.dot(tl.trans(delta), k, input_precision=PRECISION)
    tl.store(at, A, mask)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, n] with one stride for all rows, and that stride."""
    B, W, n = x.shape
    if x.stride(2) != 1 or (B > 1 and x.stride(0) != W * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


def launch_inputs(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, n_rows: Tensor,
    spec: GdnSpec, outs: tuple[Tensor, ...], record: bool,
) -> None:  # fmt: skip
    B, W, _ = u.shape
    (u, u_row), (alpha, alpha_row), (beta, beta_row) = rows_of(u), rows_of(alpha), rows_of(beta)
    inputs_kernel[(W, 2 * spec.n_k + spec.n_v, B)](
        u, alpha, beta, weights.conv, weights.dt, weights.a, state.tail, state.window_u, slots, state.counts, n_rows,
        *outs, spec.eps, W, spec.n_k, spec.n_v, state.n_slots, state.max_window, u_row, alpha_row, beta_row,
        state.counts.stride(0), spec.d, triton.next_power_of_2(spec.d), spec.conv_kernel, record,
        num_warps=1, **overlap(u, fuse=False),
    )  # fmt: skip


def launch_recurrence(q: Tensor, out: Tensor, W: int, state: GdnState, slots: Tensor, spec: GdnSpec) -> None:
    values = min(VALUES, triton.next_power_of_2(spec.d))
    parts = triton.cdiv(spec.d, values)
    channels = triton.next_power_of_2(triton.cdiv(spec.conv_dim, parts * spec.n_v))
    recurrence_kernel[(parts, spec.n_v, slots.shape[0])](
        q, state.window_k, state.window_v, state.window_g, state.window_beta, state.window_u, state.tail, state.state,
        out, slots, state.counts, spec.d**-0.5, W, spec.n_k, spec.n_v, state.n_slots, state.max_window, spec.conv_dim,
        state.counts.stride(0), spec.d, triton.next_power_of_2(spec.d), values, spec.conv_kernel, channels,
        num_warps=4, **overlap(q, fuse=False),
    )  # fmt: skip


def step(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, spec: GdnSpec
) -> Tensor:
    B, W, _ = u.shape
    q = torch.empty(B, W, spec.n_k, spec.d, dtype=torch.float32, device=u.device)
    out = torch.empty(B, W, spec.n_v, spec.d, dtype=torch.float32, device=u.device)
    recorded = (state.window_u, q, state.window_k, state.window_v, state.window_g, state.window_beta)
    launch_inputs(u, alpha, beta, weights, state, slots, slots, spec, recorded, True)
    launch_recurrence(q, out, W, state, slots, spec)
    return out


def replay(state: GdnState, slots: Tensor) -> None:
    """Accepted rows of the window into the committed state and tail. `counts` stays as it is."""
    launch_recurrence(state.state, state.state, 0, state, slots, state.spec)


def precision(device: torch.device) -> str:
    """Products of nearly float32 accuracy on tensor cores where there are any."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        return "tf32x3"
    return "ieee"


def scan(
    U: Tensor, Y: Tensor, mixed: Tensor, q: Tensor, k: Tensor, last: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `scan_kernel`; U, Y, q, k [B, n_v, n, T, d], state [B, n_v, d, d] to (out like U, the new state)."""
    B, n_v, n, T, d = U.shape
    state, out = state.contiguous().clone(), torch.empty_like(q)
    values = min(VALUES, triton.next_power_of_2(d))
    U, Y, mixed, q, k, last = (x.contiguous() for x in (U, Y, mixed, q, k, last))
    scan_kernel[(triton.cdiv(d, values), B * n_v)](
        U, Y, mixed, q, k, last, state, out, n,
        d, triton.next_power_of_2(d), values, T, precision(U.device), num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out, state


def inverse(system: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular L [.., 64, 64]."""
    system = system.contiguous()
    out = torch.empty_like(system)
    n = system.shape[-1]
    inverse_kernel[(system.numel() // (n * n),)](system, out, n, num_warps=4, enable_fp_fusion=True)
    return out


def chunk_inputs(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, n_rows: Tensor,
    spec: GdnSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the chunked form takes: q, k [B, W, n_k, d], v [B, W, n_v, d], g, beta [B, W, n_v]; nothing pending."""
    B, W, _ = u.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(B, W, *shape, dtype=torch.float32, device=u.device)

    q, k, v = empty(spec.n_k, spec.d), empty(spec.n_k, spec.d), empty(spec.n_v, spec.d)
    g, gate = empty(spec.n_v), empty(spec.n_v)
    launch_inputs(u, alpha, beta, weights, state, slots, n_rows, spec, (q, q, k, v, g, gate), False)
    return q, k, v, g, gate
