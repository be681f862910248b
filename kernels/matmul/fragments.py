"""Where the kernels' arrays stand in registers and shared memory, and how they become a tensor core's operand.

Every tensor begins [KW, M]: the warps' parts of K, and a tile's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul.ptx import (
    BFLOAT16,
    FLOAT16,
    HALF,
    HALF_MIN,
    INT8,
    JOIN,
    NIBBLES,
    SIX_BIT,
    SIX_TABLE,
    TABLE,
    constraints,
    quant_ptx,
)  # fmt: skip


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
    """[KW, 16 WM MT, n] for asynchronous copies of `vector` neighbouring elements a lane.

    A warp's copies are one contiguous piece where it is large enough: their addresses then differ by constants that
    fit the instruction.
    """
    across = max(1, min(n // vector, 32))
    if 16 * MT * n < 32 * vector:
        return gl.BlockedLayout([1, 1, vector], [1, 32 // across, across], [KW, WM, 1], [2, 1, 0])
    places = [[0, p // n, p % n] for p in _halvings(16 * MT * n)]
    k = vector.bit_length() - 1
    warp = [[0, 16 * MT * i, 0] for i in _halvings(WM)] + [[i, 0, 0] for i in _halvings(KW)]
    return gl.DistributedLinearLayout(
        places[:k] + places[k + 5 :], places[k : k + 5], warp, [], [KW, 16 * WM * MT, n]
    )


@constexpr_function
def rows_copy_layout(KW, WM, N):
    """[KW, N, 256] float16 likewise: a lane's copies are neighbours in one row, where there are enough lanes."""
    width = max(8, min(256, 256 * WM // N))  # columns that WM warps take at a time of all N rows
    places = [[0, 0, i] for i in (8 * j for j in _halvings(width // 8))] + [[0, i, 0] for i in _halvings(N)]
    rest = [[0, 0, i] for i in (width * j for j in _halvings(256 // width))]
    n = 5 + WM.bit_length() - 1
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + places[n:] + rest
    lanes = (places + [[0, 0, 0]] * n)[:n]
    warp = lanes[5:] + [[i, 0, 0] for i in _halvings(KW)]
    return gl.DistributedLinearLayout(regs, lanes[:5], warp, [], [KW, N, 256])


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
def steps_layout(N):
    """[4, N, 32] float16 as Hopper's instruction reads four steps of K: rows of 64 bytes, whose pieces of 16 change
    places from two rows to the next, against bank conflicts."""
    bases = [[0, 0, i] for i in _halvings(32)] + [[0, 1, 0], [0, 2, 8], [0, 4, 16]]
    bases += [[0, i, 0] for i in _halvings(N) if i > 4] + [[i, 0, 0] for i in _halvings(4)]
    return gl.SharedLinearLayout(bases, alignment=512)


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


@constexpr_function
def quad_layout(KW, WM, MT):
    """[KW, M, 4] scale words, all four of a row in every lane of the quad that has the row."""
    return tile_layout(KW, WM, MT, [4], [[1], [2]], [[0], [0]])


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
def joined(words, zero):
    """A row's scale words [KW, M, 4], as in `quad_layout`, to what `JOIN` makes of them, in the layout of zero."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    first, second = gl.inline_asm_elementwise(
        JOIN, constraints(2, 4), [w0, w1, w2, w3], (gl.int32, gl.int32), True, 1
    )
    L: gl.constexpr = gl.SliceLayout(2, zero.type.layout)
    first = gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 2)
    second = gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 2)
    return first | zero, second | zero


@gluon.jit
def decode_scales(own, other, min_scale, min_bias, SCALE: gl.constexpr, OFFSET: gl.constexpr,
                  KW: gl.constexpr, M: gl.constexpr, LC: gl.constexpr):  # fmt: skip
    """Scale words [KW, M, 4] to triples of float16 pairs: scale, scale / 16, constant; by 16-groups, t < 4 and on.

    other: what else a form needs: d [KW, M, 1], minima like own, or (six-bit scales) own again in `quad_layout`.
    """
    zero = gl.zeros([KW, M, 4], gl.int32, LC)
    lift: gl.constexpr = -0x80000000 + OFFSET * 0x10001 + 0x8000  # -OFFSET * 2^-24, twice
    sixteenth = zero + 0x2C002C00
    if SCALE == "six_bit":
        first, second = joined(other, zero)
        s, s16, add = gl.inline_asm_elementwise(
            SIX_BIT, constraints(3, 7),
            [own, first, second, zero + min_scale, zero + min_bias, zero - 0x1BFF1C00, sixteenth],
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
        first, second = joined(other, zero)
        s, add = gl.inline_asm_elementwise(
            SIX_TABLE, constraints(2, 5), [own, first, second, zero - 0x1BDF1BE0, zero + lift],
            (gl.int32, gl.int32), True, 1,
        )  # fmt: skip
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
