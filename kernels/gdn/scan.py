"""The gated delta rule in chunks of 64 tokens as Triton kernels: `chunked` says what is computed.

kernel          program                       reads -> writes
system_kernel   (chunk, value head, entry)    k, v, G, beta -> U, Y
scan_kernel     (value slice, head, entry)    U, Y, k, G, state -> delta, the state before each chunk, state
output_kernel   (chunk, value head, entry)    q, k, G, delta, states -> o

Only the scan walks chunks one after the other, with two products a chunk; its work is cut along the state's value
rows, which do not depend on each other. Key heads are read where they lie by each of their value heads.

Products have nearly float32's accuracy at the speed of float16: a factor is a sum of two float16, and of the four
products of parts the smallest is left out. Factors that a later kernel multiplies stand in memory as such pairs.

Shapes; *pair* means float16 with a first dimension of 2, the value rounded and what rounding left. q, k pairs
[B, W, n_k, d], normalized; v pair [B, W, n_v, d]; G (sums of log decay within a chunk) and beta [B, n_v, n * 64],
whose decay and beta are zero past a sequence's rows; U [B, n_v, n, 64, d]; Y, delta pairs likewise; states pair
[B, n_v, n, d, d], keys first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.gdn.state import GdnSpec, GdnState
from ggufspec.kernels.overlap import begin, overlap

CHUNK = 64
BLOCK = 16  # of the triangular system solved row by row


@dataclass(frozen=True)
class Config:
    """Launch choices: value rows of the state a scan program holds, value columns of an output product at a time."""

    system_warps: int = 4
    scan_values: int = 64
    scan_warps: int = 8
    scan_stages: int = 2
    output_values: int = 64
    output_warps: int = 4


HOPPER = Config()
USUAL = Config(scan_values=32, scan_warps=4, scan_stages=1)  # less shared memory, factors in registers


def config_for(device: torch.device) -> Config:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return HOPPER
    return USUAL


@triton.jit
def split(x):
    """float32 as the sum of two float16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def dot(a, a_rest, b, b_rest, acc):
    """acc + (a + a_rest) (b + b_rest), small terms first."""
    acc = tl.dot(a_rest, b, acc)
    acc = tl.dot(a, b_rest, acc)
    return tl.dot(a, b, acc)


@triton.jit
def load_pair(at, part, mask):
    """Both parts of a pair whose second stands `part` elements after the first."""
    return tl.load(at, mask, 0.0), tl.load(at + part, mask, 0.0)


@triton.jit
def store_pair(at, part, x, mask):
    high, rest = split(x)
    tl.store(at, high, mask)
    tl.store(at + part, rest, mask)


@triton.jit
def head_rows(base, row, i, W, HEADS, D: tl.constexpr):
    """Pointers [rows, columns] into one head of [W, HEADS, D], and which of them exist."""
    return base + row.to(tl.int64)[:, None] * (HEADS * D) + i[None, :], (row < W)[:, None] & (i < D)[None, :]


@triton.jit
def with_pairs(X, L, size, T: tl.constexpr):
    """From the inverses of diagonal blocks of `size` to those of blocks twice as large: with inverses A and B on the
    diagonal and C below it, the inverse of the pair has -B C A there."""
    t = tl.arange(0, T)
    i, j = t[:, None], t[None, :]
    below = tl.where((i // size != j // size) & (i // (2 * size) == j // (2 * size)), L, 0.0)
    x, x_rest = split(X)
    b, b_rest = split(below)
    zero = tl.zeros((T, T), tl.float32)
    y, y_rest = split(dot(x, x_rest, b, b_rest, zero))
    return X - dot(y, y_rest, x, x_rest, zero)


@triton.jit
def inverse_of(L, T: tl.constexpr, SMALL: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [T, T], T = 4 SMALL: diagonal blocks row by row, all at once."""
    N: tl.constexpr = T // SMALL
    b, c = tl.arange(0, N)[:, None, None, None], tl.arange(0, N)[None, None, :, None]
    negative = -tl.sum(tl.where(b == c, tl.reshape(L, [N, SMALL, N, SMALL]), 0.0), 2)  # [N, SMALL, SMALL]
    r = tl.arange(0, SMALL)
    X = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, negative * 0.0)
    for k in range(1, SMALL):
        mine = (r == k)[None, :, None]
        row = tl.sum(tl.where(mine, negative, 0.0), 1)  # -L[k, :], zero from k on
        solved = tl.sum(row[:, :, None] * X, 1)
        X = tl.where(mine, X + solved[:, None, :], X)
    X = tl.reshape(tl.where(b == c, X[:, :, None, :], 0.0), [T, T])
    return with_pairs(with_pairs(X, L, SMALL, T), L, 2 * SMALL, T)


@triton.jit(do_not_specialize=["W", "n_chunks"])
def system_kernel(
    k_ptr, v_ptr, G_ptr, beta_ptr, U_ptr, Y_ptr, W, N_K, N_V, n_chunks, k_part, v_part, Y_part,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The chunk's triangular system, solved for both right sides."""
    begin(PDL)
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, i = tl.arange(0, T), tl.arange(0, BLOCK_D)
    k_at, mask = head_rows(k_ptr + (b * W * N_K + h % N_K) * D, c * T + t, i, W, N_K, D)
    k, k_rest = load_pair(k_at, k_part, mask)
    chunk = (b * N_V + h) * n_chunks + c
    G = tl.load(G_ptr + chunk * T + t)
    beta = tl.load(beta_ptr + chunk * T + t)
    decay = tl.exp(tl.where(t[:, None] > t[None, :], G[:, None] - G[None, :], float("-inf")))
    kk = dot(k, k_rest, tl.trans(k), tl.trans(k_rest), tl.zeros((T, T), tl.float32))
    X = inverse_of(beta[:, None] * kk * decay, T, SMALL) * beta[None, :]
    v_at, _ = head_rows(v_ptr + (b * W * N_V + h) * D, c * T + t, i, W, N_V, D)
    v, v_rest = load_pair(v_at, v_part, mask)
    x, x_rest = split(X)
    out = chunk * (T * D) + t[:, None] * D + i[None, :]
    inside = (t >= 0)[:, None] & (i < D)[None, :]
    tl.store(U_ptr + out, dot(x, x_rest, v, v_rest, tl.zeros((T, BLOCK_D), tl.float32)), inside)
    x, x_rest = split(X * tl.exp(G)[None, :])
    store_pair(Y_ptr + out, Y_part, dot(x, x_rest, k, k_rest, tl.zeros((T, BLOCK_D), tl.float32)), inside)


@triton.jit(do_not_specialize=["W", "n_chunks"])
def scan_kernel(
    k_ptr, G_ptr, U_ptr, Y_ptr, delta_ptr, states_ptr, state_ptr, slot_ptr,
    W, N_K, N_V, n_chunks, k_part, Y_part, states_part,
    D: tl.constexpr, BLOCK_D: tl.constexpr, VALUES: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """S [key, value], some value columns of one head's state, over all chunks."""
    begin(PDL)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, i, j = tl.arange(0, T), tl.arange(0, BLOCK_D), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    slot = tl.load(slot_ptr + b)
    S_at = state_ptr + ((slot * N_V + h) * D + j[None, :]) * D + i[:, None]
    S_mask = (i < D)[:, None] & (j < D)[None, :]
    in_value = (t >= 0)[:, None] & (j < D)[None, :]
    S = tl.load(S_at, S_mask, 0.0)
    key_head = k_ptr + (b * W * N_K + h % N_K) * D
    for c in tl.range(0, n_chunks, num_stages=STAGES):
        chunk = (b * N_V + h) * n_chunks + c
        s, s_rest = split(S)
        states_at = states_ptr + chunk * (D * D) + i[:, None] * D + j[None, :]
        tl.store(states_at, s, S_mask)
        tl.store(states_at + states_part, s_rest, S_mask)
        rows = chunk * (T * D) + t[:, None] * D
        y, y_rest = load_pair(Y_ptr + rows + i[None, :], Y_part, (t >= 0)[:, None] & (i < D)[None, :])
        delta = tl.load(U_ptr + rows + j[None, :], in_value, 0.0)
        delta -= dot(y, y_rest, s, s_rest, tl.zeros((T, VALUES), tl.float32))
        store_pair(delta_ptr + rows + j[None, :], Y_part, delta, in_value)
        G = tl.load(G_ptr + chunk * T + t)
        last = tl.load(G_ptr + chunk * T + (T - 1))
        k_at, k_mask = head_rows(key_head, c * T + t, i, W, N_K, D)
        k, k_rest = load_pair(k_at, k_part, k_mask)
        grown, grown_rest = split(delta * tl.exp(last - G)[:, None])
        S = dot(tl.trans(k), tl.trans(k_rest), grown, grown_rest, S * tl.exp(last))
    tl.store(S_at, S, S_mask)


@triton.jit(do_not_specialize=["W", "n_chunks"])
def output_kernel(
    q_ptr, k_ptr, G_ptr, delta_ptr, states_ptr, out_ptr, scale, W, N_K, N_V, n_chunks, k_part, Y_part, states_part,
    D: tl.constexpr, BLOCK_D: tl.constexpr, VALUES: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """o of one chunk: from the state before it, and from the chunk's own rows."""
    begin(PDL)
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, i = tl.arange(0, T), tl.arange(0, BLOCK_D)
    key_head = (b * W * N_K + h % N_K) * D
    q_at, mask = head_rows(q_ptr + key_head, c * T + t, i, W, N_K, D)
    k_at, _ = head_rows(k_ptr + key_head, c * T + t, i, W, N_K, D)
    q, q_rest = load_pair(q_at, k_part, mask)
    k, k_rest = load_pair(k_at, k_part, mask)
    chunk = (b * N_V + h) * n_chunks + c
    G = tl.load(G_ptr + chunk * T + t)
    decay = tl.exp(tl.where(t[:, None] >= t[None, :], G[:, None] - G[None, :], float("-inf")))
    P = dot(q, q_rest, tl.trans(k), tl.trans(k_rest), tl.zeros((T, T), tl.float32)) * decay
    p, p_rest = split(P)
    grown = tl.exp(G)[:, None]
    for part in range(0, BLOCK_D, VALUES):
        j = part + tl.arange(0, VALUES)
        in_value = (j < D)[None, :]
        S_at = states_ptr + chunk * (D * D) + i[:, None] * D + j[None, :]
        s, s_rest = load_pair(S_at, states_part, (i < D)[:, None] & in_value)
        o = grown * dot(q, q_rest, s, s_rest, tl.zeros((T, VALUES), tl.float32))
        delta_at = delta_ptr + chunk * (T * D) + t[:, None] * D + j[None, :]
        d, d_rest = load_pair(delta_at, Y_part, (t >= 0)[:, None] & in_value)
        o = dot(p, p_rest, d, d_rest, o)
        o_at, o_mask = head_rows(out_ptr + (b * W * N_V + h) * D, c * T + t, j, W, N_V, D)
        tl.store(o_at, o * scale, o_mask)


def scan(
    q: Tensor, k: Tensor, v: Tensor, G: Tensor, beta: Tensor, state: GdnState, slots: Tensor, spec: GdnSpec,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """o [B, W, n_v, d] of rows that follow the slots' states; the states move past them. q, k, v are pairs."""
    config = config or config_for(v.device)
    _, B, W, n_v, d = v.shape
    n = triton.cdiv(W, CHUNK)
    block = max(16, triton.next_power_of_2(d))

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=v.device)

    U = empty(B, n_v, n, CHUNK, d, dtype=torch.float32)
    Y, delta = empty(2, *U.shape), empty(2, *U.shape)
    states = empty(2, B, n_v, n, d, d)
    out = empty(B, W, n_v, d, dtype=torch.float32)
    sizes, k_part, Y_part, states_part = (W, spec.n_k, n_v, n), k[0].numel(), U.numel(), states[0].numel()
    how = overlap(v)
    system_kernel[(n, n_v, B)](
        k, v, G, beta, U, Y, *sizes, k_part, v[0].numel(), Y_part, d, block, CHUNK, BLOCK,
        num_warps=config.system_warps, num_stages=1, **how,
    )  # fmt: skip
    values = min(config.scan_values, block)
    scan_kernel[(triton.cdiv(d, values), n_v, B)](
        k, G, U, Y, delta, states, state.state, slots, *sizes, k_part, Y_part, states_part,
        d, block, values, CHUNK, config.scan_stages, num_warps=config.scan_warps, **how,
    )  # fmt: skip
    output_kernel[(n, n_v, B)](
        q, k, G, delta, states, out, d**-0.5, *sizes, k_part, Y_part, states_part,
        d, block, min(config.output_values, block), CHUNK, num_warps=config.output_warps, num_stages=1, **how,
    )  # fmt: skip
    return out
