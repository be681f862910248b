"""One unit of a narrow product: its place in the arrays, its way through shared memory, and its multiplication.

A unit is a tile's weight rows by KW super-blocks of 256 columns. See `gluon.narrow`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ggufspec.kernels.matmul.dialect import copy_async, reinterpret
from ggufspec.kernels.matmul.fragments import (
    decode_scales,
    expand,
    high_layout,
    high_words,
    low_layout,
    low_words,
    quad_layout,
    shared_layout,
    weights_at,
)  # fmt: skip


@gluon.jit
def tile_pointers(base, rows, L: gl.constexpr, KW: gl.constexpr, M: gl.constexpr, n: gl.constexpr):
    """Pointers [KW, M, n] to the first M rows in super-blocks 0..KW-1, and those blocks' numbers [KW, 1, 1]."""
    kw = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1, 2)
    m = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0, 2)
    j = expand(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0, 1)
    return base + ((kw * rows + m) * n + j), kw


@gluon.jit
def ring(kind: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, ST: gl.constexpr):
    """ST buffers of one shape. Apart, so that reads of one and copies into another need no barrier between them."""
    buffers = ()
    for _ in gl.static_range(ST):
        buffers = buffers + (gl.allocate_shared_memory(kind, shape, layout),)  # type: ignore[assignment]
    return buffers


@gluon.jit
def fetch(copies, stage: gl.constexpr, row, block, KW: gl.constexpr, S):
    """Start the copies of super-blocks block..block + KW - 1, array rows row.., into a stage; zeros past the end."""
    for k in gl.static_range(len(copies)):
        buffers, ptrs, kw = copies[k]
        to = buffers[stage]
        pieces = ptrs + row.to(gl.int64) * to.shape[2]
        if KW == 1:
            copy_async(to, pieces)
        else:
            copy_async(to, pieces, mask=kw + block < S)


@gluon.jit
def step(row, block, KW: gl.constexpr, M: gl.constexpr, S, rows, units):
    """The next unit's place in the arrays: further along K, or the next tile's first."""
    wraps = block + KW >= S
    return row + gl.where(wraps, M - (units - 1) * (KW * rows), KW * rows), gl.where(wraps, 0, block + KW)


@gluon.jit
def read_unit(
    low, high, scale, extra, LC: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr,
    KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr,
):  # fmt: skip
    """A stage's words, words of high bits, scale words and what else the scales need, in registers."""
    M: gl.constexpr = 16 * WM * MT
    words = low_words(low.load(low_layout(LOW, KW, WM, MT)), LOW)
    highs = words
    if HIGH:
        highs = high_words(high.load(high_layout(HIGH, KW, WM, MT)), HIGH)
    own = scale.load(LC) if LOW < 16 else gl.zeros([KW, M, 4], gl.int32, LC)
    other = own
    if SCALE == "int8" or SCALE == "nibbles":
        other = gl.expand_dims(extra.reshape([KW, M]).load(gl.SliceLayout(2, LC)), 2)
    elif SCALE == "half_min":
        other = extra.load(LC)
    elif SCALE == "six_bit" or SCALE == "six_table":
        other = scale.load(quad_layout(KW, WM, MT))
    return words, highs, own, other


@gluon.jit
def multiply_unit(
    acc, read, x, zero, min_scale, min_bias, MMA: gl.constexpr, LC: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """acc [KW, M, N] and the product of a unit's weights, as `read_unit` left them, with its activations x."""
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    KW: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    words, highs, own, other = read
    x_tiles = reinterpret(x, gl.float16, [8, KW, N, 32], shared_layout(KW, N, 32, False))
    scales = decode_scales(own, other, min_scale, min_bias, SCALE, OFFSET, KW, M, LC)
    for t in gl.static_range(8):
        b = x_tiles.index(t).permute([0, 2, 1]).load(LB)
        a = gl.reshape(weights_at(t, words, highs, scales, zero, LOW, HIGH, SCALE), [KW, M, 32])
        acc = mma_v2(gl.convert_layout(a, LA, assert_trivial=True), b, acc)
    return acc


@gluon.jit
def multiply_together(
    acc, read, scales, x, zero, half: gl.constexpr, MMA: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """The same for acc [M, N] and half a unit, by Hopper's instruction of four warps, which share what it reads of x.

    x: four steps [N, 32] of K, as `store_steps` leaves them. The last step's instructions may still read it on return.
    """
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    words, highs, own, other = read
    x = reinterpret(x, gl.float16, [4, N, 32], gl.NVMMASharedLayout(64, 16, 2))
    for t in gl.static_range(4):
        a = weights_at(4 * half + t, words, highs, scales, zero, LOW, HIGH, SCALE)
        a = gl.permute(gl.reshape(a, [M, 4, 4, 2]), (0, 2, 1, 3))
        a = gl.convert_layout(gl.reshape(a, [M, 32]), LA)
        acc = warpgroup_mma(a, x.index(t).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
    return acc


@gluon.jit
def store_steps(to, x):
    """Steps [4, N, 32] to shared memory, place 8 c + 2 i + h of 32 to 8 i + 2 c + h: what a lane holds of the weights
    are then columns of one instruction. The four lanes that hold a row's 32 places write whole pieces together."""
    N: gl.constexpr = to.shape[1]
    to.store(gl.reshape(gl.permute(gl.reshape(x, [4, N, 4, 4, 2]), (0, 1, 3, 2, 4)), [4, N, 32]))
