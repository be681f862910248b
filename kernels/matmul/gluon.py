"""Quantized matmul for a few rows on CUDA, in Gluon: weights are the tensor cores' long side, tokens their columns.

One warp owns 16 * MT weight rows of one part of K; KW warps of a block split K and WM warps split rows. Each
super-block of 256 columns comes through shared memory by asynchronous copies, is turned into float16 pairs in the very
registers the tensor-core instruction reads (the arrays' order sees to that, see `repack`), and is multiplied with the
activations (m16n8k16, float32 sums). A quant becomes a float16 without conversion: its bits in a float16's mantissa
are a subnormal number, quant * 2^-24 (or 2^-20 four bits higher), and one packed fused multiply-add applies scale and
minimum. So a weight costs 1.3 instructions.

A token's sums over K run in one order at every width, so its result does not depend on the tokens beside it.

Source: the arithmetic is the block formats'; products are of float16 values, sums float32.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul.decode import IQ4_VALUES


def pair(value: float) -> int:
    """A float16 twice in one 32-bit word, as the signed number a kernel argument is."""
    half = struct.unpack("<h", struct.pack("<e", value))[0]
    return half << 16 | half & 0xFFFF


@constexpr_function
def _halvings(n):
    """Powers of two below n."""
    return [1 << i for i in range(n.bit_length() - 1)]


@constexpr_function
def tile_layout(KW, WM, MT, tail, regs, lanes):
    """[KW, 16 WM MT, *tail]: a lane's rows are its fragment's (lane div 4 and 8 further, for each of MT fragments).

    regs, lanes: the tail's bases held in registers and in the two low lane bits.
    """
    zero = [0] * len(tail)
    reg = [[0, 0, *b] for b in regs] + [[0, 8, *zero]] + [[0, 16 * WM * i, *zero] for i in _halvings(MT)]
    lane = [[0, 0, *b] for b in lanes] + [[0, 1, *zero], [0, 2, *zero], [0, 4, *zero]]
    warp = [[0, 16 * i, *zero] for i in _halvings(WM)] + [[i, 0, *zero] for i in _halvings(KW)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [KW, 16 * WM * MT, *tail])


@constexpr_function
def copy_layout(KW, WM, MT, n, vector):
    """[KW, 16 WM MT, n] for asynchronous copies of `vector` neighbouring elements a lane."""
    across = max(1, min(n // vector, 32))
    return gl.BlockedLayout([1, 1, vector], [1, 32 // across, across], [KW, WM, 1], [2, 1, 0])


@constexpr_function
def shared_layout(KW, M, n, swizzle):
    """[KW, M, n] words row by row; with `swizzle`, odd rows swap their 64-byte halves, against bank conflicts."""
    bases = [[0, 0, i] for i in _halvings(n)]
    bases += [[0, i, 16 if swizzle and i == 1 else 0] for i in _halvings(M)]
    bases += [[i, 0, 0] for i in _halvings(KW)]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def rows_layout(KW, N):
    """[KW, N, 256] float16 as eight pieces [KW, N, 32] of one step of K each, row by row."""
    bases = [[0, 0, i] for i in _halvings(32)] + [[0, i, 0] for i in _halvings(N)] + [[i, 0, 0] for i in _halvings(KW)]
    return gl.SharedLinearLayout(bases + [[0, 0, 32 * i] for i in _halvings(8)])


@constexpr_function
def constraints(n_out, n_in):
    return ",".join(["=r"] * n_out + ["r"] * n_in)


# Scale words to packed float16: scale, scale / 16, and the constant to add. -1024 and -1152 take the bits of 1024.0
# (and of the signed byte's 128) away again, exactly.
SIX_BIT = gl.constexpr("""{
.reg .b32 s, m, d, n;
and.b32 s, $3, 0x003f003f;
or.b32 s, s, 0x64006400;
shr.u32 m, $3, 6;
and.b32 m, m, 0x003f003f;
or.b32 m, m, 0x64006400;
prmt.b32 d, $4, $4, 0x1010;
prmt.b32 n, $4, $4, 0x3232;
add.rn.f16x2 s, s, $7;
fma.rn.f16x2 m, m, $5, $6;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $1, $0, $8;
mul.rn.f16x2 $2, m, n;
}""")
INT8 = gl.constexpr("""{
.reg .b32 s, u, d;
prmt.b32 d, $7, $7, 0x1010;
prmt.b32 s, $6, $8, 0x4140;
prmt.b32 u, $6, $8, 0x4342;
add.rn.f16x2 s, s, $9;
add.rn.f16x2 u, u, $9;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $3, u, d;
mul.rn.f16x2 $1, $0, $10;
mul.rn.f16x2 $4, $3, $10;
mul.rn.f16x2 $2, $0, $11;
mul.rn.f16x2 $5, $3, $11;
}""")
HALF = gl.constexpr("""{
mul.rn.f16x2 $0, $2, $3;
mul.rn.f16x2 $1, $2, $4;
}""")
HALF_MIN = gl.constexpr("""{
mul.rn.f16x2 $0, $2, $4;
mul.rn.f16x2 $1, $3, $5;
}""")


SIX_TABLE = gl.constexpr("""{
.reg .b32 s, d;
and.b32 s, $2, 0x003f003f;
or.b32 s, s, 0x64006400;
prmt.b32 d, $3, $3, 0x1010;
add.rn.f16x2 s, s, $4;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $1, $0, $5;
}""")
NIBBLES = gl.constexpr("""{
.reg .b32 t, m, s, u, p, r, d, n;
prmt.b32 d, $7, $7, 0x1010;
prmt.b32 n, $7, $7, 0x3232;
and.b32 t, $6, 0x0f0f0f0f;
shr.u32 m, $6, 4;
and.b32 m, m, 0x0f0f0f0f;
prmt.b32 s, t, $8, 0x4140;
prmt.b32 u, t, $8, 0x4342;
prmt.b32 p, m, $8, 0x4140;
prmt.b32 r, m, $8, 0x4342;
add.rn.f16x2 s, s, $9;
add.rn.f16x2 u, u, $9;
fma.rn.f16x2 p, p, $10, $11;
fma.rn.f16x2 r, r, $10, $11;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $3, u, d;
mul.rn.f16x2 $1, $0, $12;
mul.rn.f16x2 $4, $3, $12;
mul.rn.f16x2 $2, p, n;
mul.rn.f16x2 $5, r, n;
}""")

# Eight places in the table to eight bytes (value + 128): a byte's selector has three bits, so both halves of the table
# are looked up and the fourth bit picks
TABLE = gl.constexpr(
    "{\n.reg .b32 a, b, c, d, s, p, l, h, x, y, v;\n"
    + "".join(
        f"mov.b32 {name}, {sum((IQ4_VALUES[4 * k + j] + 128) << 8 * j for j in range(4)):#x};\n"
        for k, name in enumerate("abcd")
    )
    + """and.b32 s, $4, 0x77777777;
shr.u32 p, $4, 1;
and.b32 p, p, 0x44444444;
or.b32 p, p, 0x32103210;
prmt.b32 x, a, b, s;
prmt.b32 y, c, d, s;
prmt.b32 l, x, y, p;
shr.u32 s, s, 16;
shr.u32 p, p, 16;
prmt.b32 x, a, b, s;
prmt.b32 y, c, d, s;
prmt.b32 h, x, y, p;
prmt.b32 x, l, h, 0x5140;
prmt.b32 y, l, h, 0x7362;
prmt.b32 v, x, 0, 0x4140;
fma.rn.f16x2 $0, v, $12, $28;
prmt.b32 v, x, 0, 0x4342;
fma.rn.f16x2 $1, v, $12, $28;
prmt.b32 v, y, 0, 0x4140;
fma.rn.f16x2 $2, v, $12, $28;
prmt.b32 v, y, 0, 0x4342;
fma.rn.f16x2 $3, v, $12, $28;
}"""
)

# Four words of float16 pairs as they are, or of bfloat16 pairs widened and rounded to float16
FLOAT16 = gl.constexpr("{\nmov.b32 $0, $4;\nmov.b32 $1, $12;\nmov.b32 $2, $20;\nmov.b32 $3, $28;\n}")
BFLOAT16 = gl.constexpr(
    "{\n.reg .b32 v, x;\n"
    + "".join(
        f"shl.b32 v, ${4 + 8 * k}, 16;\nand.b32 x, ${4 + 8 * k}, 0xffff0000;\ncvt.rn.f16x2.f32 ${k}, x, v;\n"
        for k in range(4)
    )
    + "}"
)


@constexpr_function
def quant_ptx(low, high, tl):
    """One low word (two when quants have 8 bits) and, with `high`, its word of high bits, to eight float16.

    Operands in eights: low word(s), high word, scale, scale / 16, constant. tl: t mod 4, which says where in the
    high word the bits are.
    """
    if low == 8:
        lines = [".reg .b32 v;"]
        for k, from_word in enumerate((4, 4, 12, 12)):
            lines.append(f"prmt.b32 v, ${from_word}, 0, {'0x4240' if k % 2 == 0 else '0x4341'};")
            lines.append(f"fma.rn.f16x2 ${k}, v, $20, $28;")
        return "{\n" + "\n".join(lines) + "\n}"
    n = 1 if high else 0
    w, h, scale, sixteenth, add = 4, 12, 12 + 8 * n, 20 + 8 * n, 28 + 8 * n
    lines = [".reg .b32 v, x, y, z;", f"shr.u32 x, ${w}, 8;"]
    if low == 2:
        for k in range(4):
            if k % 2 == 0:  # pairs k and k + 1 to bits 0 and 4, their high bits to 2 and 6
                lines.append(f"shr.u32 x, ${w}, {8 * (tl % 2) + 2 * (k // 2)};")
                u = tl * 2 + k // 2
                at = u % 4 + 8 * (u // 4)
                if high:
                    lines.append(f"shl.b32 y, ${h}, {2 - at};" if at < 2 else f"shr.u32 y, ${h}, {at - 2};")
            lines.append(f"and.b32 v, x, {('0x00030003', '0x00300030')[k % 2]};")
            if high:
                lines += [f"and.b32 z, y, {('0x00040004', '0x00400040')[k % 2]};", "or.b32 v, v, z;"]
            lines.append(f"fma.rn.f16x2 ${k}, v, ${scale if k % 2 == 0 else sixteenth}, ${add};")
        return "{\n" + "\n".join(lines) + "\n}"
    for k in range(4):
        if high and k % 2 == 0:  # pairs k and k + 1 take their high bits from the word moved so: to bits 4 and 8
            if high == 1:
                u = tl * 2 + k // 2
                at = u % 4 + 8 * (u // 4)
            else:
                at = 8 * (tl % 2) + 2 * (k // 2)
            lines.append(f"shl.b32 y, ${h}, {4 - at};" if at < 4 else f"shr.u32 y, ${h}, {at - 4};")
        word = f"${w}" if k < 2 else "x"
        mask = "0x000f000f" if k % 2 == 0 else "0x00f000f0"
        lines.append(f"and.b32 v, {word}, {mask};")
        if high:
            ones = {1: ("0x00100010", "0x01000100"), 2: ("0x00300030", "0x03000300")}[high][k % 2]
            lines += [f"and.b32 z, y, {ones};", "or.b32 v, v, z;"]
        lines.append(f"fma.rn.f16x2 ${k}, v, ${scale if k % 2 == 0 else sixteenth}, ${add};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def expand(x, a: gl.constexpr, b: gl.constexpr):
    return gl.expand_dims(gl.expand_dims(x, a), b)


@gluon.jit
def halve(x, n: gl.constexpr):
    """[KW, M, 4, 2 n] to its even and odd parts [KW, M, 4, n]."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1], 4, n, 2]))


@gluon.jit
def eight_words(x):
    """[KW, M, 4, 8] to eight tensors [KW, M, 4, 1]."""
    even, odd = halve(x, 4)
    e0, e1 = halve(even, 2)
    o0, o1 = halve(odd, 2)
    w0, w4 = halve(e0, 1)
    w2, w6 = halve(e1, 1)
    w1, w5 = halve(o0, 1)
    w3, w7 = halve(o1, 1)
    return w0, w1, w2, w3, w4, w5, w6, w7


@gluon.jit
def tile_pointers(base, rows, L: gl.constexpr, KW: gl.constexpr, M: gl.constexpr, n: gl.constexpr):
    """Pointers [KW, M, n] to the first M rows in super-blocks 0..KW-1, and those blocks' numbers [KW, 1, 1]."""
    kw = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1, 2)
    m = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0, 2)
    j = expand(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0, 1)
    return base + ((kw * rows + m) * n + j), kw


@constexpr_function
def low_layout(LOW, KW, WM, MT):
    """[KW, M, 8 LOW] words, in the lane that multiplies them."""
    steps = [[16], [32], [64]][: {2: 0, 4: 1, 8: 2, 16: 3}[LOW]]
    return tile_layout(KW, WM, MT, [8 * LOW], [[1], [2], *steps], [[4], [8]])


@constexpr_function
def high_layout(HIGH, KW, WM, MT):
    """[KW, M, 8 HIGH] words, likewise."""
    return tile_layout(KW, WM, MT, [8], [[1]], [[2], [4]]) if HIGH == 1 else (
        tile_layout(KW, WM, MT, [16], [[1], [2]], [[4], [8]])
    )


@gluon.jit
def low_words(w, LOW: gl.constexpr):
    """A super-block's low words by t: eight tensors [KW, M, 4, 1]; four with 2 bits, 2 x 8 with 8, 4 x 8 with 16."""
    if LOW == 2:
        return high_words(w, 2)
    elif LOW == 4:
        w = gl.reshape(w, [w.shape[0], w.shape[1], 2, 4, 4])
        return eight_words(gl.reshape(gl.permute(w, (0, 1, 3, 2, 4)), [w.shape[0], w.shape[1], 4, 8]))
    elif LOW == 16:
        w = gl.reshape(w, [w.shape[0], w.shape[1], 8, 4, 4])
        even, odd = halve(gl.reshape(gl.permute(w, (0, 1, 3, 2, 4)), [w.shape[0], w.shape[1], 4, 32]), 16)
        w0, w2 = halve(even, 8)
        w1, w3 = halve(odd, 8)
        return eight_words(w0), eight_words(w1), eight_words(w2), eight_words(w3)
    else:
        w = gl.reshape(w, [w.shape[0], w.shape[1], 4, 4, 4])
        first, second = halve(gl.reshape(gl.permute(w, (0, 1, 3, 2, 4)), [w.shape[0], w.shape[1], 4, 16]), 8)
        return eight_words(first), eight_words(second)


@gluon.jit
def high_words(w, HIGH: gl.constexpr):
    """A super-block's words of high bits: two tensors [KW, M, 4, 1] of one bit a quant, four of two."""
    if HIGH == 1:
        return halve(gl.reshape(w, [w.shape[0], w.shape[1], 4, 2]), 1)
    else:
        even, odd = halve(gl.reshape(w, [w.shape[0], w.shape[1], 4, 4]), 2)
        w0, w2 = halve(even, 1)
        w1, w3 = halve(odd, 1)
        return w0, w1, w2, w3


@gluon.jit
def weights_at(t: gl.constexpr, words, highs, scales, zero, LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr):
    """Step t of a super-block as float16 [KW, M, 4, 8]: places 32 t + 8 c + 0..7."""
    s, s16, add = scales[t // 4] if SCALE == "int8" or SCALE == "nibbles" else scales[0]
    s, s16, add = spread(s, zero), spread(s16, zero), spread(add, zero)
    ptx: gl.constexpr = quant_ptx(LOW, HIGH, t % 4)
    if LOW == 16:
        a, b, c, d = words
        return gl.inline_asm_elementwise(
            BFLOAT16 if SCALE == "bf16" else FLOAT16, constraints(4, 32),
            [spread(a[t], zero), spread(b[t], zero), spread(c[t], zero), spread(d[t], zero)], gl.float16, True, 8,
        )  # fmt: skip
    elif LOW == 8:
        return gl.inline_asm_elementwise(
            ptx, constraints(4, 32), [spread(words[0][t], zero), spread(words[1][t], zero), s, add],
            gl.float16, True, 8,
        )  # fmt: skip
    elif SCALE == "half_table" or SCALE == "six_table":
        return gl.inline_asm_elementwise(
            TABLE, constraints(4, 32), [spread(words[t], zero), s, s16, add], gl.float16, True, 8
        )
    elif HIGH:
        return gl.inline_asm_elementwise(
            ptx, constraints(4, 40),
            [spread(words[t * LOW // 4], zero), spread(highs[t * HIGH // 4], zero), s, s16, add],
            gl.float16, True, 8,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            ptx, constraints(4, 32), [spread(words[t * LOW // 4], zero), s, s16, add], gl.float16, True, 8
        )


@gluon.jit
def decode_scales(own, other, min_scale, min_bias, SCALE: gl.constexpr, OFFSET: gl.constexpr,
                  KW: gl.constexpr, M: gl.constexpr, LC: gl.constexpr):  # fmt: skip
    """Scale words [KW, M, 4] to triples of float16 pairs: scale, scale / 16, constant; by 16-groups, t < 4 and on."""
    zero = gl.zeros([KW, M, 4], gl.int32, LC)
    lift: gl.constexpr = -0x80000000 + OFFSET * 0x10001 + 0x8000  # -OFFSET * 2^-24, twice
    sixteenth = zero + 0x2C002C00
    if SCALE == "six_bit":
        # d and dmin lie in the quad's four words, a nibble of each in either half
        c = expand(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LC))), 0, 1)
        nibble = (own & -0x0FFF1000).to(gl.uint32, bitcast=True) >> (12 - 4 * c).to(gl.uint32)
        d = gl.expand_dims(gl.reduce_or(nibble, 2), 2).to(gl.int32, bitcast=True)
        s, s16, add = gl.inline_asm_elementwise(
            SIX_BIT, constraints(3, 6),
            [own, d | zero, zero + min_scale, zero + min_bias, zero - 0x1BFF1C00, sixteenth],
            (gl.int32, gl.int32, gl.int32), True, 1,
        )  # fmt: skip
        return ((s, s16, add),)
    elif SCALE == "int8":
        d = (other.to(gl.int32) & 0xFFFF) | zero
        s, s16, add, u, u16, add_u = gl.inline_asm_elementwise(
            INT8, constraints(6, 6),
            [own, d, zero + 0x64646464, zero - 0x1B7F1B80, sixteenth, zero + lift],
            (gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
        )  # fmt: skip
        return (s, s16, add), (u, u16, add_u)
    elif SCALE == "nibbles":
        s, s16, add, u, u16, add_u = gl.inline_asm_elementwise(
            NIBBLES, constraints(6, 7),
            [own, other | zero, zero + 0x64646464, zero - 0x1BFF1C00, zero + min_scale, zero + min_bias, sixteenth],
            (gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
        )  # fmt: skip
        return (s, s16, add), (u, u16, add_u)
    elif SCALE == "six_table":
        c_t = expand(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LC))), 0, 1)
        piece = (own & 0xF000) >> (12 - 4 * c_t)
        d = gl.expand_dims(gl.reduce_or(piece.to(gl.uint32, bitcast=True), 2), 2).to(gl.int32, bitcast=True)
        s, add = gl.inline_asm_elementwise(
            SIX_TABLE, constraints(2, 4), [own, d | zero, zero - 0x1BDF1BE0, zero + lift], (gl.int32, gl.int32), True, 1
        )
        return ((s, s, add),)
    elif SCALE == "half" or SCALE == "half_table":
        s16, add = gl.inline_asm_elementwise(
            HALF, constraints(2, 3), [own, sixteenth, zero + lift], (gl.int32, gl.int32), True, 1
        )
        return ((own, s16, add),)
    elif SCALE == "none" or SCALE == "bf16":
        return ((own, own, own),)
    else:
        s16, add = gl.inline_asm_elementwise(
            HALF_MIN, constraints(2, 4), [own, other, sixteenth, zero + min_scale], (gl.int32, gl.int32), True, 1
        )
        return ((own, s16, add),)


@gluon.jit
def spread(x, zero):
    """[KW, M, 4] or [KW, M, 4, 1] words to [KW, M, 4, 8], the same register eight times."""
    x = gl.reshape(x, [x.shape[0], x.shape[1], 4, 1])
    return gl.convert_layout(x, zero.type.layout, assert_trivial=True) | zero


@gluon.jit
def fetch(copies, stage, tile, block, live, rows, S):
    """Start the copies of a tile's rows in super-blocks block..block + KW - 1 into a stage; zeros past the end."""
    for k in gl.static_range(len(copies)):
        shared, ptrs, kw = copies[k]
        offset = (block * rows + tile * shared.shape[2]) * shared.shape[3]
        async_copy.async_copy_global_to_shared(shared.index(stage), ptrs + offset, mask=(kw + block < S) & live)


@gluon.jit
def step(tile, block, KW: gl.constexpr, S):
    """The next unit: further along K, or the next tile's first."""
    wraps = block + KW >= S
    return gl.where(wraps, tile + 1, tile), gl.where(wraps, 0, block + KW)


@gluon.jit
def release_dependents():
    """Programmatic dependent launch: let the next kernel start its prologue."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_inputs():
    """Programmatic dependent launch: wait for the results of the kernels before."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit(do_not_specialize=["S", "T", "units", "n_units", "per_program", "min_scale", "min_bias"])
def narrow(
    low, high, scale, extra, x, x_scale, out, row_start, row_width, partial, arrived,
    S, rows, T, units, n_units, per_program, out_scale, min_scale, min_bias,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, OFFSET: gl.constexpr, N: gl.constexpr,
    KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, ST: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All weight rows times N tokens: each program works through an equal share of (row tile, part of K) units.

    Program (i, j): share i of the weights, tokens N j and on.

    low, high, scale, extra: a form's arrays (extra: `d` or `min`). x: float16 [T, S * 256] in the arrays' column
    order; x_scale [T]. out: float32, weight after weight [T, width]; row_start, row_width [rows]: the first row of a
    row's weight and that weight's number of rows (0: a padding row).

    A tile has M = 16 WM MT rows, a unit KW of its `units` runs of super-blocks; a program takes units
    [per_program * i, per_program * (i + 1)) of n_units in all, so its end can fall inside a tile. Such a tile's parts
    (at most PARTS) go through `partial`, and the program that arrives last (`arrived`, one counter a tile, zero before
    and after) adds them in the order of K. Nothing here depends on T, so neither does the order of a token's sums.
    PDL: launched before the kernels ahead have ended; the first stages' weights are read while waiting for them.
    """
    M: gl.constexpr = 16 * WM * MT
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KW, WM, 1], [1, 16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LE: gl.constexpr = tile_layout(KW, WM, MT, [4, 8], [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]])
    LC: gl.constexpr = gl.SliceLayout(3, LE)
    W: gl.constexpr = 8 * LOW
    H: gl.constexpr = 8 * HIGH if HIGH else 8
    program = gl.program_id(0)
    token = gl.program_id(1) * N
    start = program * per_program
    stop = gl.minimum(start + per_program, n_units)

    LCW: gl.constexpr = copy_layout(KW, WM, MT, W, 4)
    LCH: gl.constexpr = copy_layout(KW, WM, MT, H, 4)
    LCS: gl.constexpr = copy_layout(KW, WM, MT, 4, 4)
    LCD: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 32, 1], [KW, WM, 1], [1, 2, 0])
    LCX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [KW, WM, 1], [2, 1, 0])
    w_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, W], shared_layout(KW, M, W, W >= 32))
    copies = ((w_s,) + tile_pointers(low, rows, LCW, KW, M, W),)
    if LOW < 16:
        s_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 4], shared_layout(KW, M, 4, False))
        copies = copies + ((s_s,) + tile_pointers(scale, rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    if HIGH:
        h_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, H], shared_layout(KW, M, H, False))
        copies = copies + ((h_s,) + tile_pointers(high, rows, LCH, KW, M, H),)  # type: ignore[assignment]
    if SCALE == "int8" or SCALE == "nibbles":
        e_s = gl.allocate_shared_memory(extra.dtype.element_ty, [ST, KW, M, 1], shared_layout(KW, M, 1, False))
        copies = copies + ((e_s,) + tile_pointers(extra, rows, LCD, KW, M, 1),)  # type: ignore[assignment]
    if SCALE == "half_min":
        e_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 4], shared_layout(KW, M, 4, False))
        copies = copies + ((e_s,) + tile_pointers(extra, rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    x_s = gl.allocate_shared_memory(gl.float16, [ST, KW, N, 256], rows_layout(KW, N))
    kw_x = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, LCX))), 1, 2)
    n_x = expand(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LCX))), 0, 2)
    k_x = expand(gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, LCX))), 0, 1)
    x_ptrs = x + ((token + n_x) * (S * 256) + kw_x * 256 + k_x)

    tile = start // units
    block = (start - tile * units) * KW
    ahead_tile, ahead_block = tile, block
    for i in gl.static_range(ST - 1):
        fetch(copies, i, ahead_tile, ahead_block, start + i < stop, rows, S)
        async_copy.commit_group()
        ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)
    if PDL:
        release_dependents()
        wait_for_inputs()
    # the first stages' activations by plain loads: in the copies' groups, stage 0 would have to wait for them all
    inside = (token + n_x < T) & (k_x >= 0)
    ahead_tile, ahead_block = tile, block
    for i in gl.static_range(ST - 1):
        mask = inside & (kw_x + ahead_block < S) & (start + i < stop)
        x_s.index(i).store(gl.load(x_ptrs + ahead_block * 256, mask=mask, other=0.0))
        ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)

    zero = gl.zeros([KW, M, 4, 8], gl.int32, LE)
    acc = gl.zeros([KW, M, N], gl.float32, MMA)
    at = 0
    for unit in range(start, stop):
        async_copy.wait_group(ST - 2)
        # into the stage that the unit before this one has left
        free = gl.where(at == 0, ST - 1, at - 1)
        live = unit + (ST - 1) < stop
        fetch(copies, free, ahead_tile, ahead_block, live, rows, S)
        mask = inside & (kw_x + ahead_block < S) & live
        async_copy.async_copy_global_to_shared(x_s.index(free), x_ptrs + ahead_block * 256, mask=mask)
        async_copy.commit_group()
        ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)
        words = low_words(w_s.index(at).load(low_layout(LOW, KW, WM, MT)), LOW)
        highs = words
        if HIGH:
            highs = high_words(h_s.index(at).load(high_layout(HIGH, KW, WM, MT)), HIGH)
        own = s_s.index(at).load(LC) if LOW < 16 else gl.zeros([KW, M, 4], gl.int32, LC)
        if SCALE == "int8" or SCALE == "nibbles":
            other = gl.expand_dims(e_s.index(at).reshape([KW, M]).load(gl.SliceLayout(2, LC)), 2)
        elif SCALE == "half_min":
            other = e_s.index(at).load(LC)
        else:
            other = own
        x_tiles = x_s.index(at)._reinterpret(gl.float16, [8, KW, N, 32], shared_layout(KW, N, 32, False))
        scales = decode_scales(own, other, min_scale, min_bias, SCALE, OFFSET, KW, M, LC)
        for t in gl.static_range(8):
            b = x_tiles.index(t).permute([0, 2, 1]).load(LB)
            a = gl.reshape(weights_at(t, words, highs, scales, zero, LOW, HIGH, SCALE), [KW, M, 32])
            acc = mma_v2(gl.convert_layout(a, LA, assert_trivial=True), b, acc)
        at = gl.where(at == ST - 1, 0, at + 1)
        if (unit + 1 == stop) | (block + KW >= S):
            y = gl.sum(acc, 0)
            acc = gl.zeros([KW, M, N], gl.float32, MMA)
            LO: gl.constexpr = gl.SliceLayout(0, MMA)
            m = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, LO)), 1)
            n = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, LO)), 0)
            here = (token + n < T) & (m >= 0)
            first = tile * units // per_program
            n_parts = ((tile + 1) * units - 1) // per_program - first + 1
            last = n_parts == 1
            place = gl.program_id(1) * (rows // M) + tile
            slots = partial + place * (PARTS * M * N) + (n * M + m)
            # asked for now, to arrive while the parts are exchanged
            width = gl.load(row_width + tile * M + m)
            begin = gl.load(row_start + tile * M + m)
            factor = gl.load(x_scale + gl.minimum(token + n, T - 1)) * out_scale
            if n_parts > 1:
                gl.store(slots + (program - first) * (M * N), y, mask=here, cache_modifier=".cg")
                gl.thread_barrier()
                last = gl.atomic_add(arrived + place, 1) == n_parts - 1
                if last:
                    gl.store(arrived + place, 0)
                    y = gl.load(slots, mask=here, other=0.0, cache_modifier=".cg")
                    for k in gl.static_range(1, PARTS):
                        y += gl.load(slots + k * (M * N), mask=here & (k < n_parts), other=0.0, cache_modifier=".cg")
            if last:
                offsets = begin * (T - 1) + (tile * M + m) + (token + n) * width
                gl.store(out + offsets, y * factor, mask=here & (width > 0))
        tile, block = step(tile, block, KW, S)


@gluon.jit(do_not_specialize=["S", "first", "count", "min_scale", "min_bias"])
def unpack(
    low, high, scale, extra, out, S, rows, first, count, min_scale, min_bias,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, OFFSET: gl.constexpr,
    WM: gl.constexpr, MT: gl.constexpr,
):  # fmt: skip
    """Rows first.. of one super-block as the float16 values `narrow` multiplies, out [count, S * 256].

    Program (i, s): rows M i.. of the count, super-block s.
    """
    M: gl.constexpr = 16 * WM * MT
    LE: gl.constexpr = tile_layout(1, WM, MT, [4, 8], [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]])
    LC: gl.constexpr = gl.SliceLayout(3, LE)
    LW: gl.constexpr = low_layout(LOW, 1, WM, MT)
    block = gl.program_id(1)
    m0 = first + gl.program_id(0) * M
    limit = gl.minimum(first + count, rows)
    at = block * rows + m0
    w_ptrs, _ = tile_pointers(low, rows, LW, 1, M, 8 * LOW)
    m_w = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LW))), 0, 2)
    words = low_words(gl.load(w_ptrs + at * (8 * LOW), mask=m0 + m_w < limit, other=0), LOW)
    highs = words
    if HIGH:
        LH: gl.constexpr = high_layout(HIGH, 1, WM, MT)
        h_ptrs, _ = tile_pointers(high, rows, LH, 1, M, 8 * HIGH)
        m_h = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LH))), 0, 2)
        highs = high_words(gl.load(h_ptrs + at * (8 * HIGH), mask=m0 + m_h < limit, other=0), HIGH)
    m_c = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LC))), 0, 2)
    c_c = expand(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LC))), 0, 1)
    inside = m0 + m_c < limit
    own = gl.zeros([1, M, 4], gl.int32, LC)
    if LOW < 16:
        own = gl.load(scale + ((at + m_c) * 4 + c_c), mask=inside, other=0)
    other = own
    if SCALE == "int8" or SCALE == "nibbles":
        other = gl.load(extra + (at + m_c), mask=inside, other=0)
    elif SCALE == "half_min":
        other = gl.load(extra + ((at + m_c) * 4 + c_c), mask=inside, other=0)
    scales = decode_scales(own, other, min_scale, min_bias, SCALE, OFFSET, 1, M, LC)
    zero = gl.zeros([1, M, 4, 8], gl.int32, LE)
    m = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LE))))
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LE))))
    e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LE))))
    m = gl.expand_dims(expand(m, 0, 2), 3) + gl.program_id(0) * M
    ptrs = out + (m.to(gl.int64) * (S * 256) + block * 256 + gl.expand_dims(expand(c, 0, 1), 3) * 8)
    ptrs = ptrs + gl.expand_dims(expand(e, 0, 1), 2)
    for t in gl.static_range(8):
        gl.store(ptrs + 32 * t, weights_at(t, words, highs, scales, zero, LOW, HIGH, SCALE), mask=m < count)
