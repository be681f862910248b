"""Quantized matmul for a few rows on CUDA, in Gluon: weights are the tensor cores' long side, tokens their columns.

One warp owns 16 * MT weight rows of one part of K; KW warps of a block split K and WM warps split rows. Each
super-block of 256 columns comes through shared memory by asynchronous copies, is turned into float16 pairs in the very
registers the tensor-core instruction reads (the arrays' order sees to that, see `repack`), and is multiplied with the
activations (m16n8k16, float32 sums). A quant becomes a float16 without conversion: its bits in a float16's mantissa
are a subnormal number, quant * 2^-24 (or 2^-20 four bits higher), and one packed fused multiply-add applies scale and
minimum. So a weight costs 1.3 instructions.

Several products may follow one another in one launch, each waiting for the one before at a barrier of all programs:
the copies of a product's first weights start while the one before ends, so that memory never rests.

A token's sums over K run in one order at every width, so its result does not depend on the tokens beside it.

Source: the arithmetic is the block formats'; products are of float16 values, sums float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ggufspec.kernels.matmul.dialect import copy_async, reinterpret
from ggufspec.kernels.matmul.epilogue import finish, normed_factor
from ggufspec.kernels.matmul.forms import extra_words, form, has_extra, n_forms, with_high
from ggufspec.kernels.matmul.fragments import (
    copy_layout,
    decode_scales,
    expand,
    high_layout,
    high_words,
    low_layout,
    low_words,
    rows_layout,
    shared_layout,
    tile_layout,
    weights_at,
)  # fmt: skip
from ggufspec.kernels.matmul.grid import leave, meet, release_dependents, wait_for_inputs
from ggufspec.kernels.matmul.product import again, get, index_of, picked


@gluon.jit
def tile_pointers(base, rows, L: gl.constexpr, KW: gl.constexpr, M: gl.constexpr, n: gl.constexpr):
    """Pointers [KW, M, n] to the first M rows in super-blocks 0..KW-1."""
    kw = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1, 2)
    m = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0, 2)
    j = expand(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0, 1)
    return base + ((kw * rows + m) * n + j)


@gluon.jit
def fetch_array(shared, ptrs, L: gl.constexpr, stage, tile, block, live, rows, S):
    """Start the copies of one array of a tile's rows in super-blocks block.. into a stage; zeros past the end."""
    kw = expand(gl.arange(0, shared.shape[1], gl.SliceLayout(1, gl.SliceLayout(2, L))), 1, 2)
    offset = (block * rows + tile * shared.shape[2]) * shared.shape[3]
    copy_async(shared.index(stage), ptrs + offset, mask=(kw + block < S) & live)


@gluon.jit
def sources(P, FORMS: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr):
    """Where a product's weights are copied from: four arrays' pointers; those of arrays that no form has are low's."""
    M: gl.constexpr = 16 * WM * MT
    W: gl.constexpr = 8 * form(FORMS, 0, "LOW")
    rows = get(P, "rows")
    low = tile_pointers(get(P, "low"), rows, copy_layout(KW, WM, MT, W, 4), KW, M, W)
    scale, high, extra = low, low, low
    if W < 128:
        scale = tile_pointers(get(P, "scale"), rows, copy_layout(KW, WM, MT, 4, 4), KW, M, 4)
    if with_high(FORMS, 1) >= 0:
        high = tile_pointers(get(P, "high"), rows, copy_layout(KW, WM, MT, 8, 4), KW, M, 8)
    elif with_high(FORMS, 2) >= 0:
        high = tile_pointers(get(P, "high"), rows, copy_layout(KW, WM, MT, 16, 4), KW, M, 16)
    E: gl.constexpr = extra_words(FORMS)
    if E == 1:
        LCD: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 32, 1], [KW, WM, 1], [1, 2, 0])
        extra = tile_pointers(get(P, "extra"), rows, LCD, KW, M, 1)
    elif E == 4:
        extra = tile_pointers(get(P, "extra"), rows, copy_layout(KW, WM, MT, 4, 4), KW, M, 4)
    return low, scale, high, extra


@gluon.jit
def fetch_rest(ring, ptrs, stage, tile, block, live, rows, S, FORMS: gl.constexpr, i: gl.constexpr, KW: gl.constexpr,
               WM: gl.constexpr, MT: gl.constexpr):  # fmt: skip
    """The arrays that only the i-th form has."""
    HIGH: gl.constexpr = form(FORMS, i, "HIGH")
    E: gl.constexpr = extra_words(FORMS)
    if HIGH or has_extra(FORMS, i):
        if n_forms(FORMS) == 1 or live:
            if HIGH:
                fetch_array(ring[2], ptrs[2], copy_layout(KW, WM, MT, 8 * HIGH, 4), stage, tile, block, live, rows, S)
            if E == 1 and has_extra(FORMS, i):
                LCD: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 32, 1], [KW, WM, 1], [1, 2, 0])
                fetch_array(ring[3], ptrs[3], LCD, stage, tile, block, live, rows, S)
            elif E == 4 and has_extra(FORMS, i):
                fetch_array(ring[3], ptrs[3], copy_layout(KW, WM, MT, 4, 4), stage, tile, block, live, rows, S)


@gluon.jit
def fetch(ring, ptrs, kind, stage, tile, block, live, rows, S, FORMS: gl.constexpr, KW: gl.constexpr,
          WM: gl.constexpr, MT: gl.constexpr):  # fmt: skip
    """Start the copies of a tile's rows in super-blocks block..block + KW - 1 into a stage. kind: the weights' form."""
    W: gl.constexpr = 8 * form(FORMS, 0, "LOW")
    fetch_array(ring[0], ptrs[0], copy_layout(KW, WM, MT, W, 4), stage, tile, block, live, rows, S)
    if W < 128:
        fetch_array(ring[1], ptrs[1], copy_layout(KW, WM, MT, 4, 4), stage, tile, block, live, rows, S)
    for i in gl.static_range(n_forms(FORMS)):
        fetch_rest(ring, ptrs, stage, tile, block, live & (kind == i), rows, S, FORMS, i, KW, WM, MT)


@gluon.jit
def advance(tile, block, KW: gl.constexpr, S):
    """The next unit: further along K, or the next tile's first."""
    wraps = block + KW >= S
    return gl.where(wraps, tile + 1, tile), gl.where(wraps, 0, block + KW)


@gluon.jit
def share(P, M: gl.constexpr, PARTS: gl.constexpr):
    """The units [start, stop) of a product that this program takes."""
    program = gl.program_id(0)
    if PARTS > 1:
        stop = gl.minimum((program + 1) * get(P, "per_program"), get(P, "n_units"))
        start = gl.minimum(program * get(P, "per_program"), stop)
    else:
        start = program * (get(P, "rows") // M) // gl.num_programs(0) * get(P, "units")
        stop = (program + 1) * (get(P, "rows") // M) // gl.num_programs(0) * get(P, "units")
    return start, stop


@gluon.jit
def first_unit(P, M: gl.constexpr, PARTS: gl.constexpr, KW: gl.constexpr):
    """start, stop of this program's units, tile and first super-block of its first."""
    start, stop = share(P, M, PARTS)
    tile = start // get(P, "units")
    return start, stop, tile, (start - tile * get(P, "units")) * KW


@gluon.jit
def multiplied(acc, ring, x_s, at, min_scale, min_bias, FORMS: gl.constexpr, i: gl.constexpr, N: gl.constexpr,
               KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr):  # fmt: skip
    """acc [KW, M, N] plus a stage's weights, of the i-th form, times its activations."""
    LOW: gl.constexpr = form(FORMS, i, "LOW")
    HIGH: gl.constexpr = form(FORMS, i, "HIGH")
    SCALE: gl.constexpr = form(FORMS, i, "SCALE")
    OFFSET: gl.constexpr = form(FORMS, i, "OFFSET")
    M: gl.constexpr = 16 * WM * MT
    MMA: gl.constexpr = acc.type.layout
    LE: gl.constexpr = tile_layout(KW, WM, MT, [4, 8], [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]])
    LC: gl.constexpr = gl.SliceLayout(3, LE)
    zero = gl.zeros([KW, M, 4, 8], gl.int32, LE)
    words = low_words(ring[0].index(at).load(low_layout(LOW, KW, WM, MT)), LOW)
    highs = words
    if HIGH:
        highs = high_words(ring[2].index(at).load(high_layout(HIGH, KW, WM, MT)), HIGH)
    own = ring[1].index(at).load(LC) if LOW < 16 else gl.zeros([KW, M, 4], gl.int32, LC)
    if SCALE == "int8" or SCALE == "nibbles":
        other = gl.expand_dims(ring[3].index(at).reshape([KW, M]).load(gl.SliceLayout(2, LC)), 2)
    elif SCALE == "half_min":
        other = ring[3].index(at).load(LC)
    else:
        other = own
    x_tiles = reinterpret(x_s.index(at), gl.float16, [8, KW, N, 32], shared_layout(KW, N, 32, False))
    scales = decode_scales(own, other, min_scale, min_bias, SCALE, OFFSET, KW, M, LC)
    for t in gl.static_range(8):
        b = x_tiles.index(t).permute([0, 2, 1]).load(gl.DotOperandLayout(1, MMA, 8))
        a = gl.reshape(weights_at(t, words, highs, scales, zero, LOW, HIGH, SCALE), [KW, M, 32])
        acc = mma_v2(gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 8), assert_trivial=True), b, acc)
    return acc


@gluon.jit
def one_step(
    products, s, sync, met, T, token, at, ring, x_s, low_p, scale_p, high_p, extra_p,
    FORMS: gl.constexpr, ENDS: gl.constexpr, PARTS: gl.constexpr, SQUARES: gl.constexpr, N_STEPS: gl.constexpr,
    N: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """This program's share of product s, whose first ST - 1 copies are under way.

    at: the stage of its first unit. low_p..: what the copies ahead come from. Returns these for the next product, and
    how often the programs have met.
    """
    M: gl.constexpr = 16 * WM * MT
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KW, WM, 1], [1, 16, 8])
    LO: gl.constexpr = gl.SliceLayout(0, MMA)
    LN: gl.constexpr = gl.SliceLayout(0, LO)
    LCX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [KW, WM, 1], [2, 1, 0])
    kw_x = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, LCX))), 1, 2)
    n_x = expand(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LCX))), 0, 2)
    k_x = expand(gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, LCX))), 0, 1)
    inside = (token + n_x < T) & (k_x >= 0)
    P = picked(products, s, N_STEPS)
    S, rows, kind = get(P, "S"), get(P, "rows"), get(P, "form")
    min_scale, min_bias = get(P, "min_scale"), get(P, "min_bias")
    start, stop, tile, block = first_unit(P, M, PARTS, KW)

    if N_STEPS > 1:
        if get(P, "waits") > 0:
            met += 1
            meet(sync, met)
    n_row = token + gl.arange(0, N, LN)
    factor = gl.load(get(P, "x_scale") + gl.minimum(n_row, T - 1))
    if SQUARES:
        if get(P, "n_squares") > 0:
            normed = normed_factor(P, token, T, gl.program_id(0) == 0, N, SQUARES, KW * WM)
            factor *= gl.convert_layout(normed, LN)
    # the first stages' activations by plain loads: in the copies' groups, stage 0 would have to wait for them all
    x_ptrs = get(P, "x") + ((token + n_x) * (S * 256) + kw_x * 256 + k_x)
    ahead_tile, ahead_block = tile, block
    stage = at
    for i in gl.static_range(ST - 1):
        mask = inside & (kw_x + ahead_block < S) & (start + i < stop)
        x_s.index(stage).store(gl.load(x_ptrs + ahead_block * 256, mask=mask, other=0.0))
        ahead_tile, ahead_block = advance(ahead_tile, ahead_block, KW, S)
        stage = gl.where(stage == ST - 1, 0, stage + 1)

    end = stop
    x_block = ahead_block  # where the copies ahead stand in K: those of x stay with this product
    ahead_rows, ahead_S, ahead_kind, left = rows, S, kind, stop - start - (ST - 1)
    if N_STEPS > 1:
        # the copies ahead run into the next product's first units, so a product lasts as long as they reach
        end = gl.where(s == N_STEPS - 1, stop, gl.maximum(stop, start + (ST - 1)))
    acc = gl.zeros([KW, M, N], gl.float32, MMA)
    for unit in range(start, end):
        async_copy.wait_group(ST - 2)
        if N_STEPS > 1:
            if (unit + (ST - 1) == end) & (s < N_STEPS - 1):
                Q = picked(products, again(s) + 1, N_STEPS)
                low_p, scale_p, high_p, extra_p = sources(Q, FORMS, KW, WM, MT)
                next_start, next_stop, ahead_tile, ahead_block = first_unit(Q, M, PARTS, KW)
                left = next_stop - next_start
                ahead_rows, ahead_S, ahead_kind = get(Q, "rows"), get(Q, "S"), get(Q, "form")
        # into the stage that the unit before this one has left
        free = gl.where(at == 0, ST - 1, at - 1)
        fetch(
            ring, (low_p, scale_p, high_p, extra_p), ahead_kind, free, ahead_tile, ahead_block, left > 0,
            ahead_rows, ahead_S, FORMS, KW, WM, MT,
        )  # fmt: skip
        ahead_tile, ahead_block = advance(ahead_tile, ahead_block, KW, ahead_S)
        left -= 1
        mask = inside & (kw_x + x_block < S) & (unit + (ST - 1) < stop)
        copy_async(x_s.index(free), x_ptrs + x_block * 256, mask=mask)
        x_block = gl.where(x_block + KW >= S, 0, x_block + KW)
        async_copy.commit_group()
        if N_STEPS == 1 or unit < stop:
            if n_forms(FORMS) == 1:
                acc = multiplied(acc, ring, x_s, at, min_scale, min_bias, FORMS, 0, N, KW, WM, MT)
            else:
                if kind == 0:
                    acc = multiplied(acc, ring, x_s, at, min_scale, min_bias, FORMS, 0, N, KW, WM, MT)
                else:
                    acc = multiplied(acc, ring, x_s, at, min_scale, min_bias, FORMS, 1, N, KW, WM, MT)
            if (unit + 1 == stop) | (block + KW >= S):
                y = gl.sum(acc, 0)
                acc = gl.zeros([KW, M, N], gl.float32, MMA)
                finish(picked(products, again(s), N_STEPS), y, factor, tile, token, T, N, M, PARTS, ENDS)
            tile, block = advance(tile, block, KW, S)
        at = gl.where(at == ST - 1, 0, at + 1)
    return at, met, low_p, scale_p, high_p, extra_p


@gluon.jit(do_not_specialize=["T"])
def narrow(
    products, sync, T,
    FORMS: gl.constexpr, ENDS: gl.constexpr, PARTS: gl.constexpr, SQUARES: gl.constexpr, N_STEPS: gl.constexpr,
    N: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, ST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All weight rows of one or more products times N tokens: each program takes an equal share of every product.

    Program (i, j): share i of the weights, tokens N j and on; several products have one tile of tokens.

    products: N_STEPS of `product.Product`, hidden. FORMS: their weights' forms, at most two, of one LOW. ENDS: their
    endings. sync: two int32 zeros, zeros again afterwards.

    A tile has M = 16 WM MT rows, a unit KW of its `units` runs of super-blocks. PARTS = 1: a program takes whole tiles,
    as many as the others or one more. Else it takes units [per_program * i, per_program * (i + 1)) of n_units in all,
    so its end can fall inside a tile. Such a tile's parts (at most PARTS) go through `partial`, and the program that
    arrives last (`arrived`, one counter a tile, zero before and after) adds them in the order of K. Nothing here
    depends on T, so neither does the order of a token's sums.
    PDL: launched before the kernels ahead have ended; the first stages' weights are read while waiting for them.

    SQUARES > 0: products with partial sums of squares have rows yet to be normed, see `normed_factor`.
    """
    M: gl.constexpr = 16 * WM * MT
    W: gl.constexpr = 8 * form(FORMS, 0, "LOW")
    E: gl.constexpr = extra_words(FORMS)
    low_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, W], shared_layout(KW, M, W, W >= 32))
    scale_s, high_s, extra_s = low_s, low_s, low_s
    if W < 128:
        scale_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 4], shared_layout(KW, M, 4, False))
    if with_high(FORMS, 1) >= 0:
        high_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 8], shared_layout(KW, M, 8, False))
    elif with_high(FORMS, 2) >= 0:
        high_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 16], shared_layout(KW, M, 16, False))
    if E:
        kind: gl.constexpr = products[0][index_of("extra")].dtype.element_ty
        extra_s = gl.allocate_shared_memory(kind, [ST, KW, M, E], shared_layout(KW, M, E, False))
    ring = (low_s, scale_s, high_s, extra_s)
    x_s = gl.allocate_shared_memory(gl.float16, [ST, KW, N, 256], rows_layout(KW, N))

    P = products[0]
    token = gl.program_id(1) * N
    low_p, scale_p, high_p, extra_p = sources(P, FORMS, KW, WM, MT)
    start, stop, tile, block = first_unit(P, M, PARTS, KW)
    for i in gl.static_range(ST - 1):
        fetch(
            ring, (low_p, scale_p, high_p, extra_p), get(P, "form"), i, tile, block, start + i < stop,
            get(P, "rows"), get(P, "S"), FORMS, KW, WM, MT,
        )  # fmt: skip
        async_copy.commit_group()
        tile, block = advance(tile, block, KW, get(P, "S"))
    if PDL:
        release_dependents()
        wait_for_inputs()
    at, met, only = 0, 0, 0
    if N_STEPS == 1:
        one_step(
            products, only, sync, met, T, token, at, ring, x_s, low_p, scale_p, high_p, extra_p,
            FORMS, ENDS, PARTS, SQUARES, N_STEPS, N, KW, WM, MT, ST,
        )  # fmt: skip
    else:
        for s in range(N_STEPS):
            at, met, low_p, scale_p, high_p, extra_p = one_step(
                products, s, sync, met, T, token, at, ring, x_s, low_p, scale_p, high_p, extra_p,
                FORMS, ENDS, PARTS, SQUARES, N_STEPS, N, KW, WM, MT, ST,
            )  # fmt: skip
        leave(sync)


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
    w_ptrs = tile_pointers(low, rows, LW, 1, M, 8 * LOW)
    m_w = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LW))), 0, 2)
    words = low_words(gl.load(w_ptrs + at * (8 * LOW), mask=m0 + m_w < limit, other=0), LOW)
    highs = words
    if HIGH:
        LH: gl.constexpr = high_layout(HIGH, 1, WM, MT)
        h_ptrs = tile_pointers(high, rows, LH, 1, M, 8 * HIGH)
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
