"""Tiles of a packed cache as Triton blocks, and products with them."""

from __future__ import annotations

import triton
import triton.language as tl

from ggufspec.kernels.kv.triton import IQ4_NL, PLAIN, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

# Four signed bytes to float16: a byte n with its top bit flipped becomes the low bits of 1024 + 128 + n, then 1152 is
# subtracted, exactly. A third of the instructions that converting one by one takes.
BYTES = tl.constexpr("""{
.reg .b32 x, m; xor.b32 x, $2, 0x80808080; mov.b32 m, 0x64806480;
prmt.b32 $0, x, 0x64646464, 0x4140; prmt.b32 $1, x, 0x64646464, 0x4342;
sub.f16x2 $0, $0, m; sub.f16x2 $1, $1, m;
}""")
# The same of two bytes in each of two halves, the low ones apart from the high ones.
PAIRS = tl.constexpr("""{
.reg .b32 x, m; shr.b32 x, $2, 8; mov.b32 m, 0x64806480;
lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a; lop3.b32 $1, x, 0x00ff00ff, 0x64806480, 0x6a;
sub.f16x2 $0, $0, m; sub.f16x2 $1, $1, m;
}""")


@triton.jit
def spread(x, N: tl.constexpr, NB: tl.constexpr, SIZE: tl.constexpr):
    """One number a block, [N, NB], to one an element, [N, NB * SIZE]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (N, NB, SIZE)), (N, NB * SIZE))


@triton.jit
def load_pairs(
    half_ptr, start, used,
    HALVES: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`load_tile` of q8_0 as float16, elements with even and with odd numbers apart: [N, BLOCK / 2] each.

    TURNED: [BLOCK / 2, N]; two cells lie side by side in a register, as a product that sums over cells needs them.
    """
    ALONG: tl.constexpr = 1 if TURNED else 0  # where cells lie
    n = tl.expand_dims(tl.arange(0, N), 1 - ALONG)
    e, block = tl.expand_dims(tl.arange(0, BLOCK // 2), ALONG), tl.expand_dims(tl.arange(0, BLOCK // 32), ALONG)
    held = n < (used - start).to(tl.int32)
    rows = half_ptr + start * HALVES + n * HALVES
    codes = tl.load(rows + e, held if HD == BLOCK else held & (e < HD // 2), 0.0).to(tl.int16, bitcast=True)
    d = tl.load(rows + (HD // 2 + block), held if HD == BLOCK else held & (block < HD // 32), 0.0)
    even, odd = apart(codes, ASM)
    if TURNED:
        d = tl.reshape(tl.broadcast_to(d[:, None, :], (BLOCK // 32, 16, N)), (BLOCK // 2, N))
    else:
        d = spread(d, N, BLOCK // 32, 16)
    return even * d, odd * d


@triton.jit
def load_plain_turned(row_ptr, start, used, CELL: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr,
                      N: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """`load_tile` of a float cache, as [BLOCK, N]."""
    n, e = tl.arange(0, N)[None, :], tl.arange(0, BLOCK)[:, None]
    held = n < (used - start).to(tl.int32)
    inside = held if HD == BLOCK else held & (e < HD)
    return tl.load(row_ptr + start * CELL + n * CELL + e, inside, 0.0).to(TYPE)


@triton.jit
def power(x, ASM: tl.constexpr):
    """2 to the x, 0 where that is subnormal."""
    if ASM:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def apart(codes, ASM: tl.constexpr):
    """Two signed bytes each (int16): the low ones and the high ones as float16."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even, odd = ((codes << 8) >> 8).to(tl.float16), (codes >> 8).to(tl.float16)
    return even, odd


@triton.jit
def load_tile(
    row_ptr, half_ptr, table_ptr, start, used,
    CELL: tl.constexpr, HALVES: tl.constexpr, KIND: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One head's rows of cells start .. start + N, as [N, BLOCK] of TYPE; zeros from `used` on and past HD.

    start: int64. row_ptr, half_ptr: the head in cell 0 of the slot, as elements (bytes of a quantized row) and as
    halves. CELL, HALVES: distance of cells in them; constants, as the width of loads follows from what divides them.
    ASM: convert with PTX (not in the interpreter).
    """
    n, e = tl.arange(0, N)[:, None], tl.arange(0, BLOCK)[None, :]
    held = n < (used - start).to(tl.int32)
    inside = held if HD == BLOCK else held & (e < HD)
    rows = row_ptr + start * CELL + n * CELL
    if KIND == PLAIN:
        return tl.load(rows + e, inside, 0.0).to(TYPE)
    else:
        n_blocks: tl.constexpr = HD // 32
        block = tl.arange(0, BLOCK // 32)[None, :]
        there = held if HD == BLOCK else held & (block < n_blocks)
        halves = half_ptr + start * HALVES + n * HALVES + block
        if KIND == Q8_0:
            codes = tl.load(rows + e, inside, 0)
            if ASM:
                codes = tl.inline_asm_elementwise(BYTES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
            else:
                codes = codes.to(tl.int8, bitcast=True).to(TYPE)
            after: tl.constexpr = n_blocks * 32
        else:
            packed = tl.load(rows + (e // 32) * 16 + e % 16, inside, 0).to(tl.int32)
            code = (packed >> ((e % 32) // 16 * 4)) & 15
            if KIND == Q5_0 or KIND == Q5_1:
                high = tl.load(rows + n_blocks * 16 + e // 8, inside, 0).to(tl.int32)
                code = code | (((high >> (e % 8)) & 1) << 4)
                after: tl.constexpr = n_blocks * 20  # type: ignore[no-redef]
            else:
                after: tl.constexpr = n_blocks * 16  # type: ignore[no-redef]
            if KIND == IQ4_NL:
                codes = tl.load(table_ptr + code).to(TYPE)
            elif KIND == Q4_0:
                codes = (code - 8).to(TYPE)
            elif KIND == Q5_0:
                codes = (code - 16).to(TYPE)
            else:
                codes = code.to(TYPE)
        d = tl.load(halves + after // 2, there, 0.0)
        if KIND == Q4_1 or KIND == Q5_1:
            m = tl.load(halves + (after // 2 + n_blocks), there, 0.0)
            x = codes.to(tl.float32) * spread(d.to(tl.float32), N, BLOCK // 32, 32)
            return (x + spread(m.to(tl.float32), N, BLOCK // 32, 32)).to(TYPE)
        # codes are exact in either type and the product is rounded once
        return codes * spread(d.to(TYPE), N, BLOCK // 32, 32)


@triton.jit
def visible(
    cell, position, valid, n_stored, used, n_cells, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Which cells the rows at positions see, none where not valid: cell [N, 1], the others [1, M], or the other way.

    RING: cells hold the newest n_cells of n_stored positions. WINDOW: `window` may be above 0.
    """
    held = cell
    if RING:
        behind = n_stored - 1 - cell
        held = tl.where(behind >= 0, n_stored - 1 - behind % n_cells, cell - n_cells)
        held = tl.where(n_stored <= n_cells, cell, held)
    distance = position - held
    seen = valid & ((cell < used) & (held >= 0))
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & ((distance < window) | (window <= 0))
    return seen


@triton.jit
def product(a, b, SPLIT: tl.constexpr):
    """a times b in float32, where one is float32 and the other of the cells' type. SPLIT: the float32 one as the sum
    of two numbers of that type, as bfloat16 alone is coarse."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, input_precision="ieee")
    if a.dtype == tl.float32:
        high = a.to(b.dtype)
        out = tl.dot(high, b)
        if SPLIT:
            out += tl.dot((a - high.to(tl.float32)).to(b.dtype), b)
        return out
    high = b.to(a.dtype)
    out = tl.dot(a, high)
    if SPLIT:
        out += tl.dot(a, (b - high.to(tl.float32)).to(a.dtype))
    return out


def compute_type(type_name: str) -> tuple[tl.dtype, bool]:
    """The type that cache values are multiplied in, and whether the other factor needs splitting."""
    if type_name == "f32" or (type_name == "bf16" and triton.knobs.runtime.interpret):
        return tl.float32, False  # the interpreter has no products of bfloat16
    return (tl.bfloat16, True) if type_name == "bf16" else (tl.float16, False)
