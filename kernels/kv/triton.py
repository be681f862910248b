"""Storing keys and values as one Triton kernel: norm, rotary embedding, Hadamard rotation, quantization, scatter.

One program takes one head of one row: a query head (written to a new tensor), a key head or a value head (written
to the cache). Products are not contracted into fused multiply-adds, so that codes round as on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.kv.blocks import BLOCKS, IQ4_NL_VALUES
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.overlap import ENTRY_NUMBERS, begin, overlap
from ggufspec.kernels.rope.plain import RopeSpec
from ggufspec.kernels.rope.triton import partner_of, turned

PLAIN = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q5_0 = tl.constexpr(4)
Q5_1 = tl.constexpr(5)
IQ4_NL = tl.constexpr(6)
KINDS = {"q8_0": 1, "q4_0": 2, "q4_1": 3, "q5_0": 4, "q5_1": 5, "iq4_nl": 6}  # others: plain

_tables: dict[torch.device, Tensor] = {}


def iq4_table(device: torch.device) -> Tensor:
    """The 16 values of iq4_nl, float32 on the device."""
    if device not in _tables:
        _tables[device] = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32).to(device)
    return _tables[device]


def kind_of(type_name: str) -> int:
    return KINDS.get(type_name, 0)


def as_halves(x: Tensor) -> Tensor:
    """Packed rows seen as float16, for their scales; plain rows as they are."""
    return x.view(torch.float16) if x.dtype == torch.uint8 else x


@triton.jit
def butterfly(x, TOTAL: tl.constexpr, HALF: tl.constexpr):
    """x [TOTAL]: sums and differences of elements HALF apart in runs of 2 HALF."""
    a, b = tl.split(tl.permute(tl.reshape(x, (TOTAL // (2 * HALF), 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (TOTAL,))


@triton.jit
def hadamard(x, TOTAL: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """Rotate every run of N = 2^LOG elements of x [TOTAL]."""
    for s in tl.static_range(LOG):
        x = butterfly(x, TOTAL, 2**s)
    return x * (1.0 / tl.sqrt(N * 1.0))


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def inverse(x):
    return tl.where(x == 0.0, 0.0, tl.div_rn(1.0, tl.where(x == 0.0, 1.0, x)))


@triton.jit
def signed_extreme(x, NB: tl.constexpr):
    """[NB, 32] to [NB]: the value of the largest magnitude, the first on ties."""
    index = tl.argmax(tl.abs(x), 1, tie_break_left=True)
    lane = tl.arange(0, 32)[None, :]
    return tl.sum(tl.where(lane == index[:, None], x, 0.0), 1)


@triton.jit
def iq4_nl_codes(x, table_ptr):
    """Index of the nearest table value; the upper one when equally near."""
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(1, 16):
        low, high = tl.load(table_ptr + i - 1), tl.load(table_ptr + i)
        code += tl.where(x - low < high - x, 0, 1)
    return code


@triton.jit
def block_codes(x, table_ptr, KIND: tl.constexpr, NB: tl.constexpr):
    """x [NB, 32] to (codes int32 [NB, 32], d [NB], m [NB]), as `blocks` encodes."""
    m = tl.zeros((NB,), tl.float32)
    if KIND == Q8_0:
        amax = tl.max(tl.abs(x), 1)
        d = tl.div_rn(amax, 127.0)
        scale = tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, tl.where(amax == 0.0, 1.0, amax)))
        codes = round_even(x * scale[:, None]).to(tl.int32)
    elif KIND == Q4_0 or KIND == Q5_0:
        n: tl.constexpr = 8.0 if KIND == Q4_0 else 16.0
        d = tl.div_rn(signed_extreme(x, NB), -n)
        codes = tl.minimum((x * inverse(d)[:, None] + (n + 0.5)).to(tl.int32), 2 * n - 1).to(tl.int32)
    elif KIND == Q4_1 or KIND == Q5_1:
        top: tl.constexpr = 15.0 if KIND == Q4_1 else 31.0
        m = tl.min(x, 1)
        d = tl.div_rn(tl.max(x, 1) - m, top)
        codes = tl.minimum(((x - m[:, None]) * inverse(d)[:, None] + 0.5).to(tl.int32), top).to(tl.int32)
    else:
        extreme = signed_extreme(x, NB)
        zero = tl.abs(extreme) < 1e-15
        codes = iq4_nl_codes(x * inverse(tl.div_rn(extreme, -127.0))[:, None], table_ptr)
        q = tl.load(table_ptr + codes)
        qx, qq = tl.sum(x * x * q * x, 1), tl.sum(x * x * q * q, 1)
        d = tl.where(zero, 0.0, tl.div_rn(qx, tl.where(zero, 1.0, qq)))
        codes = tl.where(zero[:, None], 0, codes)
    return codes, d, m


@triton.jit
def store_row(
    x, row_ptr, half_ptr, table_ptr, KIND: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Write x [BLOCK] (HD of them valid) as one cache row. row_ptr, half_ptr: the row as bytes and as halves, or
    both as its plain type."""
    if KIND == PLAIN:
        e = tl.arange(0, BLOCK)
        tl.store(row_ptr + e, x.to(row_ptr.dtype.element_ty), e < HD)
    else:
        n_blocks: tl.constexpr = HD // 32
        codes, d, m = block_codes(tl.reshape(x, (NB, 32)), table_ptr, KIND, NB)
        block = tl.arange(0, NB)
        mask = (block < n_blocks)[:, None]
        if KIND == Q8_0:
            at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
            tl.store(row_ptr + at, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask)
            after: tl.constexpr = n_blocks * 32
        else:
            low, high = tl.split(tl.permute(tl.reshape(codes, (NB, 2, 16)), (0, 2, 1)))
            at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(row_ptr + at, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask)
            if KIND == Q5_0 or KIND == Q5_1:
                bit = tl.reshape((codes >> 4) & 1, (NB, 4, 8)) << tl.arange(0, 8)[None, None, :]
                at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
                tl.store(row_ptr + n_blocks * 16 + at, tl.sum(bit, 2).to(tl.uint8), mask)
                after: tl.constexpr = n_blocks * 20  # type: ignore[no-redef]
            else:
                after: tl.constexpr = n_blocks * 16  # type: ignore[no-redef]
        tl.store(half_ptr + after // 2 + block, d.to(tl.float16), block < n_blocks)
        if KIND == Q4_1 or KIND == Q5_1:
            tl.store(half_ptr + after // 2 + n_blocks + block, m.to(tl.float16), block < n_blocks)


@triton.jit
def load_head(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, eps,
    HD: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """One head vector [BLOCK], normed and rotated by position as asked for."""
    e = tl.arange(0, BLOCK)
    mask = e < HD
    x = tl.load(x_ptr + e, mask, 0.0)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / HD + eps)
        x = x * scale * tl.load(weight_ptr + e, mask, 0.0)
    if N_ROT > 0:
        p = partner_of(e, N_ROT, NEOX)
        partner = tl.load(x_ptr + p, mask, 0.0)
        if NORM:
            partner = partner * scale * tl.load(weight_ptr + p, mask, 0.0)
        x = turned(x, partner, e, cos_ptr, sin_ptr, N_ROT, NEOX)
    return x


@triton.jit(do_not_specialize=["W"], do_not_specialize_on_alignment=ENTRY_NUMBERS)
def store_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, table_ptr,
    k_cache_ptr, k_half_ptr, v_cache_ptr, v_half_ptr,
    eps, W, H, N_KV, n_cells, q_row, q_head, k_row, v_row, k_bytes, k_halves, v_bytes, v_halves,
    HD_K: tl.constexpr, HD_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    NORM: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr, KIND_K: tl.constexpr, KIND_V: tl.constexpr,
    SPIN_K: tl.constexpr, LOG_K: tl.constexpr, SPIN_V: tl.constexpr, LOG_V: tl.constexpr,
    RING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head): heads 0..H are queries, then N_KV keys, then N_KV values. SPIN_*: size of the Hadamard
    rotation, 2^LOG_*, 0 for none. *_row, q_head: strides of the inputs; *_bytes, *_halves: cache row strides."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = row * (N_ROT // 2)
    if head < H:
        x = load_head(
            q_ptr + row * q_row + head * q_head, q_weight_ptr, cos_ptr + table, sin_ptr + table, eps,
            HD_K, BLOCK_K, NORM, N_ROT, NEOX,
        )  # fmt: skip
        if SPIN_K > 0:
            x = hadamard(x, BLOCK_K, SPIN_K, LOG_K)
        e = tl.arange(0, BLOCK_K)
        tl.store(q_out_ptr + (row * H + head) * HD_K + e, x, e < HD_K)
    else:
        position = tl.load(position_ptr + row)
        if RING:
            cell = tl.where(position < 0, -1, position % n_cells)
        else:
            cell = tl.where(position < n_cells, position, -1)
        if cell >= 0:
            at = tl.load(slot_ptr + row // W) * n_cells + cell
            if head < H + N_KV:
                key = load_head(
                    k_ptr + row * k_row + (head - H) * HD_K, k_weight_ptr, cos_ptr + table, sin_ptr + table, eps,
                    HD_K, BLOCK_K, NORM, N_ROT, NEOX,
                )  # fmt: skip
                if SPIN_K > 0:
                    key = hadamard(key, BLOCK_K, SPIN_K, LOG_K)
                at = at * N_KV + head - H
                store_row(key, k_cache_ptr + at * k_bytes, k_half_ptr + at * k_halves, table_ptr, KIND_K, HD_K, BLOCK_K,
                          BLOCK_K // 32)  # fmt: skip
            else:
                e = tl.arange(0, BLOCK_V)
                value = tl.load(v_ptr + row * v_row + (head - H - N_KV) * HD_V + e, e < HD_V, 0.0)
                if SPIN_V > 0:
                    value = hadamard(value, BLOCK_V, SPIN_V, LOG_V)
                at = at * N_KV + head - H - N_KV
                store_row(value, v_cache_ptr + at * v_bytes, v_half_ptr + at * v_halves, table_ptr, KIND_V, HD_V,
                          BLOCK_V, BLOCK_V // 32)  # fmt: skip


def heads_contiguous(x: Tensor) -> Tensor:
    """x [B, W, H, hd] such that all rows have one stride and heads follow one another."""
    B, W, H, hd = x.shape
    good = x.stride(3) == 1 and x.stride(2) == hd and (B == 1 or x.stride(0) == W * x.stride(1))
    return x if good else x.contiguous()


def launch(
    kv: KV, q: Tensor | None, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor, float] | None, rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> Tensor | None:  # fmt: skip
    B, W, n_kv, hd_k = k.shape
    k, v = heads_contiguous(k.float()), heads_contiguous(v.float())
    H, out, q_row, q_head = 0, None, 0, 0
    if q is not None:
        q = q.float()
        if q.stride(3) != 1 or (B > 1 and q.stride(0) != W * q.stride(1)):
            q = q.contiguous()
        H, q_row, q_head = q.shape[2], q.stride(1), q.stride(2)
        out = torch.empty(B, W, H, hd_k, dtype=torch.float32, device=k.device)
    kh, vh = as_halves(kv.k), as_halves(kv.v)
    cos, sin, n_rot, neox = k, k, 0, True
    if rope is not None:
        cos, sin, n_rot, neox = rope[0].contiguous(), rope[1].contiguous(), rope[2].n_rot, rope[2].pairing == "neox"
    q_weight, k_weight, eps = (k, k, 0.0) if norms is None else norms
    store_kernel[(B * W, H + 2 * n_kv)](
        k if q is None else q, k, v, k if out is None else out, q_weight, k_weight, cos, sin, slots,
        positions.contiguous(), iq4_table(k.device), kv.k, kh, kv.v, vh,
        eps, W, H, n_kv, kv.n_cells, q_row, q_head, k.stride(1), v.stride(1),
        kv.k.shape[-1], kh.shape[-1], kv.v.shape[-1], vh.shape[-1],
        hd_k, kv.hd_v, max(32, triton.next_power_of_2(hd_k)), max(32, triton.next_power_of_2(kv.hd_v)),
        norms is not None, n_rot, neox, kind_of(kv.type_k), kind_of(kv.type_v),
        kv.rotation_k, kv.rotation_k.bit_length() - 1 if kv.rotation_k else 0,
        kv.rotation_v, kv.rotation_v.bit_length() - 1 if kv.rotation_v else 0, kv.ring,
        num_warps=1, **overlap(k, fuse=False),
    )  # fmt: skip
    return out


def store(kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    launch(kv, None, k, v, slots, positions, None, None)


def norm_rope_store(
    kv: KV, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor, float] | None, rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> Tensor:  # fmt: skip
    out = launch(kv, q, k, v, slots, positions, norms, rope)
    assert out is not None
    return out


def store_raw(
    kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> None:  # fmt: skip
    launch(kv, None, k, v, slots, positions, None if norm is None else (norm[0], *norm), rope)


assert set(KINDS) == set(BLOCKS)
