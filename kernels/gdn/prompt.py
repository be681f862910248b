"""Prompt chunks of a gated DeltaNet layer on CUDA: five launches, whatever the width.

Convolution and gates of 64 rows of one head a program, the chunked rule of `scan`, and the convolution's tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.gdn.scan import CHUNK, scan, store_pair
from ggufspec.kernels.gdn.state import GdnSpec, GdnState, GdnWeights
from ggufspec.kernels.norm.triton import sigmoid_of
from ggufspec.kernels.overlap import ENTRY_NUMBERS, begin, overlap

ROWS = 16  # of a chunk that a program of the inputs holds at a time


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def tail_of(window_ptr, counts_ptr, slot, n_slots, counts_row, window_row, channel):
    """Pointers to the slot's last committed convolution inputs, oldest first; nothing is pending."""
    half = tl.load(counts_ptr + counts_row + slot)
    return window_ptr + (half * n_slots + slot) * window_row + channel


@triton.jit(do_not_specialize=["W", "n_chunks", "alpha_row", "beta_row"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def prompt_inputs_kernel(
    u_ptr, alpha_ptr, beta_ptr, conv_ptr, dt_ptr, a_ptr, window_ptr, counts_ptr, slot_ptr, n_rows_ptr,
    q_ptr, k_ptr, v_ptr, G_ptr, gate_ptr,
    eps, W, N_K, N_V, u_row, alpha_row, beta_row, n_chunks, n_slots, counts_row, window_row, k_part, v_part,
    D: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, KERNEL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head, entry): convolution and SiLU of T rows of a head; q and k normalized, gates of v.

    Gates of rows past n_rows are zero, which leaves a state as it is.
    """
    begin(PDL)
    c, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C = (2 * N_K + N_V) * D
    slot = tl.load(slot_ptr + b)
    e = tl.arange(0, BLOCK)
    in_head = e < D
    channel = head * D + e
    tail = tail_of(window_ptr, counts_ptr, slot, n_slots, counts_row, window_row, channel)
    if head < N_K:
        out_ptr = q_ptr + (b * W * N_K + head) * D
        out_row = N_K * D
        part = k_part
    elif head < 2 * N_K:
        out_ptr = k_ptr + (b * W * N_K + head - N_K) * D
        out_row = N_K * D
        part = k_part
    else:
        out_ptr = v_ptr + (b * W * N_V + head - 2 * N_K) * D
        out_row = N_V * D
        part = v_part
    for start in range(0, T, ROWS):
        row = c * T + start + tl.arange(0, ROWS)
        exists = (row < W)[:, None] & in_head[None, :]
        y = tl.zeros((ROWS, BLOCK), tl.float32)
        for j in tl.static_range(KERNEL):
            before = row + (j - (KERNEL - 1))  # negative: in the tail
            now = u_ptr + (b * W + before)[:, None] * u_row + channel[None, :]
            x = tl.load(now, exists & (before >= 0)[:, None], 0.0)
            if (c == 0) & (start == 0):
                old = tail[None, :] + (row + j)[:, None] * C
                x += tl.load(old, exists & (before < 0)[:, None], 0.0)
            y += tl.load(conv_ptr + channel * KERNEL + j, in_head, 0.0)[None, :] * x
        y = y * sigmoid_of(y)
        if head < 2 * N_K:
            y = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        store_pair(out_ptr + row.to(tl.int64)[:, None] * out_row + e[None, :], part, y, exists)
    if head >= 2 * N_K:
        h = head - 2 * N_K
        t = tl.arange(0, T)
        valid = c * T + t < tl.load(n_rows_ptr + b)
        place = b * W + c * T + t
        steer = tl.load(alpha_ptr + place * alpha_row + h, valid, 0.0) + tl.load(dt_ptr + h)
        g = tl.where(valid, softplus(steer) * tl.load(a_ptr + h), 0.0)
        gate = sigmoid_of(tl.load(beta_ptr + place * beta_row + h, valid, 0.0))
        own = ((b * N_V + h) * n_chunks + c) * T + t
        tl.store(G_ptr + own, tl.cumsum(g, 0))
        tl.store(gate_ptr + own, tl.where(valid, gate, 0.0))


@triton.jit(do_not_specialize=["W"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def tail_kernel(
    u_ptr, window_ptr, counts_ptr, slot_ptr, n_rows_ptr, W, C, u_row, n_slots, counts_row, window_row,
    KERNEL: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (channels, entry): the slot's last KERNEL - 1 convolution inputs after n_rows rows of u."""
    begin(PDL)
    b = tl.program_id(1).to(tl.int64)
    slot, n = tl.load(slot_ptr + b), tl.load(n_rows_ptr + b)
    channel = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = channel < C
    tail = tail_of(window_ptr, counts_ptr, slot, n_slots, counts_row, window_row, channel)
    for r in tl.static_range(KERNEL - 1):
        s = n + r  # reads are always ahead of the writes
        x = tl.load(tail + s * C, inside & (s < KERNEL - 1), 0.0)
        x += tl.load(u_ptr + (b * W + s - (KERNEL - 1)) * u_row + channel, inside & (s >= KERNEL - 1), 0.0)
        tl.store(tail + r * C, x, inside)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, n] with one stride for all rows, and that stride."""
    B, W, _ = x.shape
    if x.stride(2) != 1 or (B > 1 and x.stride(0) != W * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


def places(state: GdnState) -> tuple[int, int, int]:
    """Slots, the stride between the two rows of counts, and elements of one half of a slot's window of inputs."""
    return state.n_slots, state.counts.stride(0), state.window_u.shape[2] * state.window_u.shape[3]


def inputs(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, n_rows: Tensor,
    spec: GdnSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What `scan` takes: pairs q, k, v, then sums of g and beta by chunk. Nothing is pending."""
    B, W, _ = u.shape
    n = triton.cdiv(W, CHUNK)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=u.device)

    q, k = (empty(2, B, W, spec.n_k, spec.d, dtype=torch.float16) for _ in range(2))
    v = empty(2, B, W, spec.n_v, spec.d, dtype=torch.float16)
    G, gate = (empty(B, spec.n_v, n * CHUNK, dtype=torch.float32) for _ in range(2))
    (u, u_row), (alpha, alpha_row), (beta, beta_row) = rows_of(u), rows_of(alpha), rows_of(beta)
    prompt_inputs_kernel[(n, 2 * spec.n_k + spec.n_v, B)](
        u, alpha, beta, weights.conv, weights.dt, weights.a, state.window_u, state.counts, slots, n_rows,
        q, k, v, G, gate,
        spec.eps, W, spec.n_k, spec.n_v, u_row, alpha_row, beta_row, n, *places(state),
        k[0].numel(), v[0].numel(), spec.d, triton.next_power_of_2(spec.d), CHUNK, ROWS, spec.conv_kernel,
        num_warps=4, **overlap(u),
    )  # fmt: skip
    return q, k, v, G, gate


def move_tail(u: Tensor, state: GdnState, slots: Tensor, n_rows: Tensor, spec: GdnSpec) -> None:
    B, W, C = u.shape
    u, u_row = rows_of(u)
    tail_kernel[(triton.cdiv(C, 256), B)](
        u, state.window_u, state.counts, slots, n_rows, W, C, u_row, *places(state), spec.conv_kernel, 256,
        num_warps=2, **overlap(u),
    )  # fmt: skip


def chunk(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, n_rows: Tensor,
    spec: GdnSpec,
) -> Tensor:  # fmt: skip
    """Rows of each slot as one sequence into its state; the slots' windows have been replayed."""
    q, k, v, G, gate = inputs(u, alpha, beta, weights, state, slots, n_rows, spec)
    move_tail(u, state, slots, n_rows, spec)
    return scan(q, k, v, G, gate, state, slots, spec)
