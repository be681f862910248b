"""A narrow step of a gated DeltaNet layer as one Triton kernel: everything between its two projections.

A program holds value rows of one head's state in registers, all or half of them, read once and written once when
something was replayed. It works in three phases with a barrier between them:

1. convolution, norms and gates of all new rows at once, recorded in the window;
2. the delta rule, row by row, replayed rows first. A state row lies within one warp, so nothing waits for another;
3. gated norm of all new rows, written as the output projection reads them. When a head is split over programs, the
   last of them to arrive does this for all.

Multiply-adds are fused where `tl.fma` says so and nowhere else, and every sum has one order whatever the width, the
split or the number of replayed rows: grouping rows into steps cannot change a bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.gdn.state import GdnSpec, GdnState, GdnWeights
from ggufspec.kernels.matmul.values import FIXED_SCALE, fixed_half, row_place
from ggufspec.kernels.matmul.weight import Activation
from ggufspec.kernels.overlap import ENTRY_NUMBERS, begin, overlap, release, wait
from ggufspec.kernels.prepared.triton import Target

PIECE = 32  # keys of a state row that a register tile holds: eight lanes of four, so that a sum is three shuffles
WARPS = 8
STATE_ELEMENTS = 1 << 14  # of a program of so many warps at most: 64 registers a thread
# What the compiler may use, the least that it keeps nothing in memory with: room for the next kernel's programs, and
# three programs of four warps a multiprocessor.
REGISTERS, REGISTERS_OF_HALF = 160, 128
SPLIT_ROWS = 3  # from this width on a head is split when there are multiprocessors enough: the loop is long then


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def pieces(at, i, exists, D: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr):
    """N tiles of SIZE keys i side by side; `exists`: where the other dimensions of `at` are inside."""
    tiles = ()  # type: tuple
    for c in tl.static_range(N):
        if D == N * SIZE:
            tiles = tiles + (tl.load(at + c * SIZE),)
        else:
            tiles = tiles + (tl.load(at + c * SIZE, exists & (c * SIZE + i < D), 0.0),)
    return tiles


@triton.jit
def dot(A, x, N: tl.constexpr):
    """A [values, keys] times x [keys], both in pieces."""
    total = A[0] * x[0][None, :]
    for c in tl.static_range(1, N):
        total = tl.fma(A[c], x[c][None, :], total)
    return tl.sum(total, 1)


@triton.jit
def advanced(A, decay, delta, k, N: tl.constexpr):
    """decay A + delta k^T."""
    new = ()  # type: tuple
    for c in tl.static_range(N):
        new = new + (tl.fma(delta[:, None], k[c][None, :], A[c] * decay),)
    return new


@triton.jit
def prefetch(at):
    """Bring cache lines into the card's cache; their contents are not used, so they may still be about to change."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def convolved(
    u_ptr, before_ptr, record_ptr, taps_ptr, u_row, C, w, channel, mask, record, KERNEL: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of rows w [R, 1] at channel; `before` holds the KERNEL - 1 rows before row 0."""
    y = tl.zeros(mask.shape, tl.float32)
    x = y
    for j in tl.static_range(KERNEL):
        i = w + (j - (KERNEL - 1))
        at = tl.where(i >= 0, u_ptr, before_ptr) + (tl.where(i >= 0, i * u_row, (w + j) * C) + channel)
        x = tl.load(at, mask, 0.0)
        y = tl.fma(tl.load(taps_ptr + j * C + channel, mask, 0.0), x, y)
    tl.store(record_ptr + ((w + (KERNEL - 1)) * C + channel), x, mask & record)
    return y * sigmoid(y)


@triton.jit
def carry(before_ptr, record_ptr, C, channel, inside, KERNEL: tl.constexpr, ROWS: tl.constexpr):
    """The rows that precede this step's rows in the convolution, in front of the recorded ones."""
    r = tl.arange(0, ROWS)[:, None]
    mask = (r < KERNEL - 1) & inside
    tl.store(record_ptr + (r * C + channel), tl.load(before_ptr + (r * C + channel), mask, 0.0), mask)


@triton.jit
def values_of(v_at, g_at, beta_at, j, D: tl.constexpr, BLOCK: tl.constexpr):
    v = tl.load(v_at + j) if D == BLOCK else tl.load(v_at + j, j < D, 0.0)
    return v, tl.exp(tl.load(g_at)), tl.load(beta_at)


@triton.jit(do_not_specialize=["W", "alpha_row", "beta_row"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def step_kernel(
    u_ptr, z_ptr, alpha_ptr, beta_ptr, taps_ptr, dt_ptr, a_ptr, norm_ptr, state_ptr, window_u_ptr, window_k_ptr,
    window_v_ptr, window_g_ptr, window_beta_ptr, slot_ptr, n_rows_ptr, counts_ptr, arrived_ptr, scratch_ptr, o_ptr,
    rows_ptr, scale_ptr, eps, norm_eps, scale, W, N_K, N_V, n_slots, max_window, u_row, z_row, alpha_row, beta_row,
    counts_row,
    D: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, KERNEL: tl.constexpr, CARRIED: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value slice, value head, entry). u, z, alpha, beta: rows b * W + w, each with a row stride.

    taps [KERNEL, C]; scratch [entries, N_V, PARTS, W, 2, D]: q, k of a program's new rows; o [entries * W,
    N_V, D]; arrived [entries, N_V], zero between steps; rows float16 [entries * W, WIDTH]; others as in `GdnState`.
    An entry whose n_rows is 0 leaves zeros in `rows` and nothing else; with W = 0 n_rows is not asked.
    """
    release(PDL)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C = (2 * N_K + N_V) * D
    key_head = h % N_K
    e, j, i = tl.arange(0, BLOCK)[None, :], part * VALUES + tl.arange(0, VALUES), tl.arange(0, SIZE)
    own_v = j[None, :]
    v_channel = (2 * N_K + h) * D + own_v
    if PDL:
        for tap in tl.static_range(KERNEL):
            prefetch(taps_ptr + tap * C + tl.minimum(e, D - 1) // 32 * 32 + key_head * D)
            prefetch(taps_ptr + tap * C + tl.minimum(e, D - 1) // 32 * 32 + (N_K + key_head) * D)
            prefetch(taps_ptr + tap * C + tl.minimum(e, D - 1) // 32 * 32 + (2 * N_K + h) * D)
        # The slot may be another's still: nothing but the choice of lines depends on it here.
        near = tl.load(slot_ptr + b, cache_modifier=".cg")
        near = tl.minimum(tl.maximum(near, 0), n_slots - 1)
        line = tl.minimum(tl.arange(0, VALUES * BLOCK // 32) * 32, VALUES * D - 1)
        line = tl.where(tl.load(n_rows_ptr + b, cache_modifier=".cg") == 0, 0, line)  # padding: hardly any
        prefetch(state_ptr + ((near * N_V + h) * D + part * VALUES) * D + line)
    wait(PDL)
    slot = tl.load(slot_ptr + b).to(tl.int32)
    if (tl.load(n_rows_ptr + b) == 0) & (W > 0):
        if part == 0:
            for w in range(0, W):
                row = (b * W + w).to(tl.int64)
                tl.store(rows_ptr + row * WIDTH + row_place(h * D + e), tl.zeros(e.shape, tl.float16), e < D)
                if h == 0:
                    tl.store(scale_ptr + row, FIXED_SCALE)
                if PAD > 0:
                    if h == N_V - 1:
                        past = N_V * D + tl.arange(0, 256)[None, :]
                        zero = tl.zeros((1, 256), tl.float16)
                        tl.store(rows_ptr + row * WIDTH + row_place(past), zero, past < WIDTH)
        return
    at = state_ptr + ((slot * N_V + h).to(tl.int64) * D + j[:, None]) * D + i[None, :]
    A = pieces(at, i[None, :], (j < D)[:, None], D, N, SIZE)
    n = tl.load(counts_ptr + slot).to(tl.int32)
    half = tl.load(counts_ptr + counts_row + slot).to(tl.int32)
    old = half * n_slots + slot
    new = (1 - half) * n_slots + slot
    before_ptr = window_u_ptr + (old * (max_window + KERNEL - 1) + n).to(tl.int64) * C
    record_ptr = window_u_ptr + (new * (max_window + KERNEL - 1)).to(tl.int64) * C
    old, new = (old * max_window).to(tl.int64), (new * max_window).to(tl.int64)
    first_row = (b * W).to(tl.int64)
    own_ptr = scratch_ptr + (((b * N_V + h) * PARTS + part) * W).to(tl.int64) * (2 * D)

    # 1. new rows: each program for itself, the first head of a key head records what they share
    records = (h < N_K) & (part == 0)
    u_at = u_ptr + first_row * u_row
    alpha_at, beta_at = alpha_ptr + first_row * alpha_row + h, beta_ptr + first_row * beta_row + h
    new_k, new_v = window_k_ptr + (new * N_K + key_head) * D, window_v_ptr + (new * N_V + h) * D
    new_g, new_beta = window_g_ptr + (new * N_V + h), window_beta_ptr + (new * N_V + h)
    for first in range(0, W, TILE // 2):
        r = tl.arange(0, TILE)
        is_key = (r // (TILE // 2))[:, None]  # q of all rows, then k of all
        w = (first + r % (TILE // 2))[:, None]
        mask = (w < W) & (e < D)
        channel = (is_key * N_K + key_head) * D + e
        x = convolved(u_at, before_ptr, record_ptr, taps_ptr, u_row, C, w, channel, mask, records, KERNEL)
        x = x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
        tl.store(own_ptr + ((w * 2 + is_key) * D + e), x, mask)
        tl.store(new_k + (w * (N_K * D) + e), x, mask & (is_key == 1) & records)

        w = first + tl.arange(0, TILE // 2)
        inside = w < W
        column = w[:, None]
        mask = inside[:, None] & (own_v < D)
        x = convolved(u_at, before_ptr, record_ptr, taps_ptr, u_row, C, column, v_channel, mask, True, KERNEL)
        tl.store(new_v + (column * (N_V * D) + own_v), x, mask)
        x = tl.load(alpha_at + w * alpha_row, inside, 0.0) + tl.load(dt_ptr + h)
        g = softplus(x) * tl.load(a_ptr + h)
        gate = sigmoid(tl.load(beta_at + w * beta_row, inside, 0.0))
        tl.store(new_g + w * N_V, g, inside)  # programs of a head write the same
        tl.store(new_beta + w * N_V, gate, inside)
    tl.debug_barrier()

    # j, as the compiler must not know it (half is 0 or 1): it would lay threads along it and exchange what they store.
    # That these are multiples is not true; it only says what else could be stored at once, which the mask forbids.
    hidden_j = tl.multiple_of(j ^ (half >> 1), 4)

    # 2. the delta rule: replayed rows, then new ones. The next row is loaded ahead, so that a row waits for nothing but
    # the state; past the last row it is the last once more.
    old_k, old_v = window_k_ptr + (old * N_K + key_head) * D, window_v_ptr + (old * N_V + h) * D
    old_g, old_beta = window_g_ptr + (old * N_V + h), window_beta_ptr + (old * N_V + h)
    k = pieces(old_k + i, i, True, D, N, SIZE)
    v, decay, beta = values_of(old_v, old_g, old_beta, j, D, BLOCK)
    if CARRIED > 0:
        carry(before_ptr, record_ptr, C, v_channel, own_v < D, KERNEL, CARRIED)
        if records:
            carry(before_ptr, record_ptr, C, key_head * D + e, e < D, KERNEL, CARRIED)
            carry(before_ptr, record_ptr, C, (N_K + key_head) * D + e, e < D, KERNEL, CARRIED)
    for t in range(0, n):
        after = tl.minimum(t + 1, n - 1)
        k2 = pieces(old_k + (after * (N_K * D) + i), i, True, D, N, SIZE)
        at_v, at_g = after * (N_V * D), after * N_V
        v2, decay2, beta2 = values_of(old_v + at_v, old_g + at_g, old_beta + at_g, j, D, BLOCK)
        A = advanced(A, decay, beta * (v - decay * dot(A, k, N)), k, N)
        k, v, decay, beta = k2, v2, decay2, beta2
    if n > 0:
        for c in tl.static_range(N):
            tl.store(at + c * SIZE, A[c], (j < D)[:, None] & (c * SIZE + i < D)[None, :])
    q, k = pieces(own_ptr + i, i, True, D, N, SIZE), pieces(own_ptr + D + i, i, True, D, N, SIZE)
    v, decay, beta = values_of(new_v, new_g, new_beta, j, D, BLOCK)
    o_at = o_ptr + (first_row * N_V + h) * D + hidden_j[:, None] + i[None, :]
    for t in range(0, W):
        after = tl.minimum(t + 1, W - 1)
        q2 = pieces(own_ptr + (after * (2 * D) + i), i, True, D, N, SIZE)
        k2 = pieces(own_ptr + (after * (2 * D) + D + i), i, True, D, N, SIZE)
        at_v, at_g = after * (N_V * D), after * N_V
        v2, decay2, beta2 = values_of(new_v + at_v, new_g + at_g, new_beta + at_g, j, D, BLOCK)
        A = advanced(A, decay, beta * (v - decay * dot(A, k, N)), k, N)
        o = dot(A, q, N) * scale
        # Stored by the lanes that hold the first key of a state row, so that no barrier is met.
        mask = (j < D)[:, None] & (i == 0)[None, :]
        tl.store(o_at + t * (N_V * D), tl.broadcast_to(o[:, None], (VALUES, SIZE)), mask)
        q, k, v, decay, beta = q2, k2, v2, decay2, beta2
    tl.debug_barrier()

    # 3. the whole head's new rows to the output projection's input
    last = True
    if PARTS > 1:
        arrivals = tl.atomic_add(arrived_ptr + b * N_V + h, 1, sem="acq_rel", scope="gpu")
        last = arrivals == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(arrived_ptr + b * N_V + h, 0)
        for first in range(0, W, TILE):
            w = first + tl.arange(0, TILE)
            row = first_row + w
            column = row[:, None]
            mask = (w[:, None] < W) & (e < D)
            o = tl.load(o_ptr + (column * N_V + h) * D + e, mask, 0.0, cache_modifier=".cg")
            z = tl.load(z_ptr + column * z_row + h * D + e, mask, 0.0)
            weight = tl.load(norm_ptr + e, e < D, 0.0)
            y = o * tl.rsqrt(tl.sum(o * o, 1) / D + norm_eps)[:, None] * weight * (z * sigmoid(z))
            tl.store(rows_ptr + column * WIDTH + row_place(h * D + e), fixed_half(y), mask)
            if h == 0:
                tl.store(scale_ptr + row, tl.full((TILE,), FIXED_SCALE, tl.float32), w < W)
            if PAD > 0:  # zeros past the columns
                if h == N_V - 1:
                    past = N_V * D + tl.arange(0, 256)[None, :]
                    zero = tl.zeros((TILE, 256), tl.float16)
                    tl.store(rows_ptr + column * WIDTH + row_place(past), zero, (w[:, None] < W) & (past < WIDTH))


@functools.cache
def n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


class Division(NamedTuple):
    """Programs a head is split over, and warps of each. A result's bits do not depend on it."""

    parts: int
    warps: int = WARPS


def division_of(spec: GdnSpec, B: int, W: int, device: torch.device) -> Division:
    """One program of eight warps a head; more programs for long steps of few heads. Where there are more heads than
    multiprocessors, halves of four warps: three of them share a multiprocessor, of the others one is there at a time,
    and reading, working and writing overlap (24 streams: 57 us a layer instead of 72, where the states' bytes take 35).
    """
    block = triton.next_power_of_2(spec.d)
    parts = max(1, block * block // STATE_ELEMENTS)
    heads, most = spec.n_v * B, n_processors(device)
    if parts * heads > most > 0 and block // parts >= 2 * PIECE:
        return Division(2 * parts, WARPS // 2)
    while W >= SPLIT_ROWS and 2 * parts * heads <= most and block // parts >= 2 * PIECE:
        parts *= 2
    return Division(parts)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [B, W, n] with one stride for all rows, and that stride."""
    B, W, n = x.shape
    if x.stride(2) != 1 or (B > 1 and x.stride(0) != W * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


def launch(
    u: Tensor, z: Tensor, alpha: Tensor, beta: Tensor, weights: tuple[Tensor, ...], norm_eps: float, to: Target,
    state: GdnState, slots: Tensor, n_rows: Tensor, spec: GdnSpec, division: Division,
) -> None:  # fmt: skip
    """weights: taps, dt, a, norm."""
    parts, warps = division
    B, W, d = slots.shape[0], u.shape[1], spec.d
    (u, u_row), (z, z_row), (alpha, alpha_row), (beta, beta_row) = (rows_of(x) for x in (u, z, alpha, beta))
    block = triton.next_power_of_2(d)
    values, size = block // parts, min(PIECE, block)
    n_columns = spec.n_v * d
    scratch = torch.empty(B * spec.n_v * parts * max(1, W) * 2 * d, dtype=torch.float32, device=slots.device)
    o = torch.empty(B * W * n_columns, dtype=torch.float32, device=slots.device)
    carried = triton.next_power_of_2(spec.conv_kernel - 1) if spec.conv_kernel > 1 else 0
    step_kernel[(parts, spec.n_v, B)](
        u, z, alpha, beta, *weights, state.state, state.window_u, state.window_k, state.window_v, state.window_g,
        state.window_beta, slots, n_rows, state.counts, state.arrived, scratch, o, to.rows, to.scale, spec.eps,
        norm_eps, d**-0.5, W, spec.n_k, spec.n_v, state.n_slots, state.max_window, u_row, z_row, alpha_row, beta_row,
        state.counts.stride(0), d, block, values, block // size, size, warps, spec.conv_kernel, carried, to.width,
        to.width - n_columns, parts, num_warps=warps,
        maxnreg=REGISTERS if values * block * WARPS > STATE_ELEMENTS * warps // 2 else REGISTERS_OF_HALF,
        **overlap(slots, fuse=False),
    )  # fmt: skip


def step_prepared(
    u: Tensor, z: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, norm: Tensor, norm_eps: float,
    state: GdnState, slots: Tensor, n_rows: Tensor, spec: GdnSpec, division: Division | None = None,
) -> Activation:  # fmt: skip
    """As `plain.step_prepared`. division: chosen by size if not given."""
    B, W, _ = u.shape
    to = Target(B * W, spec.n_v * spec.d, u)
    division = division or division_of(spec, B, W, u.device)
    constants = weights.taps, weights.dt, weights.a, norm
    launch(u, z, alpha, beta, constants, norm_eps, to, state, slots, n_rows, spec, division)
    return to.activation


def replay(state: GdnState, slots: Tensor) -> None:
    """Accepted rows of the windows into the committed states, the last convolution inputs to the other half."""
    spec = state.spec
    none = state.state.new_empty(slots.shape[0], 0, spec.conv_dim)
    constants = (state.window_u,) * 4  # no row is computed with them
    division = division_of(spec, slots.shape[0], state.max_window, slots.device)
    to = Target(0, spec.n_v * spec.d, none)
    launch(none, none, none, none, constants, 0.0, to, state, slots, slots, spec, division)  # without rows for any


@triton.jit(do_not_specialize=["layer_row", "counts_row"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def committed_kernel(counts_ptr, slot_ptr, layer_row, counts_row, PDL: tl.constexpr):
    """Program (entry, layer)."""
    begin(PDL)
    at = counts_ptr + tl.program_id(1) * layer_row + tl.load(slot_ptr + tl.program_id(0))
    tl.store(at + counts_row, 1 - tl.load(at + counts_row))
    tl.store(at, 0)


def committed(counts: Tensor, slots: Tensor) -> None:
    """As `plain.committed`."""
    layers = counts if counts.ndim == 3 else counts.unsqueeze(1)
    committed_kernel[(slots.shape[0], layers.shape[1])](
        counts, slots, layers.stride(1), layers.stride(0), num_warps=1, **overlap(slots)
    )


@triton.jit(do_not_specialize_on_alignment=[*ENTRY_NUMBERS, "n_ptr"])
def accept_kernel(
    shared_ptr, slot_ptr, n_ptr, n_rows_ptr, n_layers, n_slots, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (entry): the slot's counts of all layers, shared [2, n_layers, n_slots]."""
    begin(PDL)
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    mask = (i < n_layers) & (tl.load(n_rows_ptr + b) > 0)
    at = shared_ptr + i * n_slots + tl.load(slot_ptr + b)
    tl.store(at + n_layers * n_slots, 1 - tl.load(at + n_layers * n_slots, mask, 0), mask)
    tl.store(at, tl.load(n_ptr + b), mask)


def accept(state: GdnState, slots: Tensor, n: Tensor, n_rows: Tensor) -> None:
    """As `gdn.accept`."""
    _, n_layers, n_slots = state.shared.shape
    accept_kernel[(slots.shape[0],)](
        state.shared, slots.contiguous(), n.contiguous(), n_rows.contiguous(), n_layers, n_slots,
        max(2, triton.next_power_of_2(n_layers)), num_warps=1, **overlap(slots),
    )  # fmt: skip
