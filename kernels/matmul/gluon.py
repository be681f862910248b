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
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul.dialect import copy_async, reinterpret
from ggufspec.kernels.matmul.epilogue import finish, normed_factor
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


@gluon.jit
def tile_pointers(base, rows, L: gl.constexpr, KW: gl.constexpr, M: gl.constexpr, n: gl.constexpr):
    """Pointers [KW, M, n] to the first M rows in super-blocks 0..KW-1, and those blocks' numbers [KW, 1, 1]."""
    kw = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1, 2)
    m = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0, 2)
    j = expand(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0, 1)
    return base + ((kw * rows + m) * n + j), kw


@gluon.jit
def fetch(copies, stage, tile, block, live, rows, S):
    """Start the copies of a tile's rows in super-blocks block..block + KW - 1 into a stage; zeros past the end."""
    for k in gl.static_range(len(copies)):
        shared, ptrs, kw = copies[k]
        offset = (block * rows + tile * shared.shape[2]) * shared.shape[3]
        copy_async(shared.index(stage), ptrs + offset, mask=(kw + block < S) & live)


@gluon.jit
def step(tile, block, KW: gl.constexpr, S):
    """The next unit: further along K, or the next tile's first."""
    wraps = block + KW >= S
    return gl.where(wraps, tile + 1, tile), gl.where(wraps, 0, block + KW)


FACTS = ("LOW", "HIGH", "SCALE", "OFFSET", "END", "PARTS", "SQUARES", "WAITS")  # of a step, words of its line


@constexpr_function
def facts(STEPS):
    """A dictionary of each line: the steps' constants travel as one text, as kernels take no tuples of words."""
    lines = [dict(zip(FACTS, line.split())) for line in STEPS.splitlines()]
    return [{k: int(v) if v.lstrip("-").isdigit() else v for k, v in line.items()} for line in lines]


@constexpr_function
def fact(STEPS, p, name):
    return facts(STEPS)[p][name]


@constexpr_function
def count(STEPS):
    return len(facts(STEPS))


@constexpr_function
def extra_words(STEPS):
    """Numbers a row and super-block has in the fourth array, of the forms that have it; 0: none has."""
    scales = {step["SCALE"] for step in facts(STEPS)} & {"int8", "nibbles", "half_min"}
    found = {4 if scale == "half_min" else 1 for scale in scales}
    assert len(found) < 2, "products of one launch need one kind of fourth array"
    return found.pop() if found else 0


@constexpr_function
def with_extra(STEPS):
    """The first step whose form has a fourth array."""
    return next(i for i, step in enumerate(facts(STEPS)) if step["SCALE"] in ("int8", "nibbles", "half_min"))


@constexpr_function
def has_high(STEPS, n):
    return any(step["HIGH"] == n for step in facts(STEPS))


@constexpr_function
def n_meetings(STEPS, p):
    """How many steps up to the p-th wait."""
    return sum(step["WAITS"] for step in facts(STEPS)[: p + 1])


@gluon.jit
def copies_of(P, low_s, scale_s, high1_s, high2_s, extra_s, LOW: gl.constexpr, HIGH: gl.constexpr,
              SCALE: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr):  # fmt: skip
    """What `fetch` copies of a product's weights: shared stages, pointers, numbers of super-blocks."""
    M: gl.constexpr = 16 * WM * MT
    W: gl.constexpr = 8 * LOW
    LCS: gl.constexpr = copy_layout(KW, WM, MT, 4, 4)
    copies = ((low_s,) + tile_pointers(P.low, P.rows, copy_layout(KW, WM, MT, W, 4), KW, M, W),)
    if LOW < 16:
        copies = copies + ((scale_s,) + tile_pointers(P.scale, P.rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    if HIGH:
        H: gl.constexpr = 8 * HIGH
        high_s = high1_s if HIGH == 1 else high2_s
        layout: gl.constexpr = copy_layout(KW, WM, MT, H, 4)
        copies = copies + ((high_s,) + tile_pointers(P.high, P.rows, layout, KW, M, H),)  # type: ignore[assignment]
    if SCALE == "int8" or SCALE == "nibbles":
        LCD: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 32, 1], [KW, WM, 1], [1, 2, 0])
        copies = copies + ((extra_s,) + tile_pointers(P.extra, P.rows, LCD, KW, M, 1),)  # type: ignore[assignment]
    if SCALE == "half_min":
        copies = copies + ((extra_s,) + tile_pointers(P.extra, P.rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    return copies


@gluon.jit
def share(P, M: gl.constexpr, PARTS: gl.constexpr):
    """The units [start, stop) of a product that this program takes."""
    program = gl.program_id(0)
    if PARTS > 1:
        stop = gl.minimum((program + 1) * P.per_program, P.n_units)
        start = gl.minimum(program * P.per_program, stop)
    else:
        start = program * (P.rows // M) // gl.num_programs(0) * P.units
        stop = (program + 1) * (P.rows // M) // gl.num_programs(0) * P.units
    return start, stop


@gluon.jit
def multiplied(acc, P, at, low_s, scale_s, high1_s, high2_s, extra_s, x_s, LOW: gl.constexpr, HIGH: gl.constexpr,
               SCALE: gl.constexpr, OFFSET: gl.constexpr, N: gl.constexpr,
               KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr):  # fmt: skip
    """acc [KW, M, N] plus a stage's weights times its activations."""
    M: gl.constexpr = 16 * WM * MT
    MMA: gl.constexpr = acc.type.layout
    LE: gl.constexpr = tile_layout(KW, WM, MT, [4, 8], [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]])
    LC: gl.constexpr = gl.SliceLayout(3, LE)
    zero = gl.zeros([KW, M, 4, 8], gl.int32, LE)
    words = low_words(low_s.index(at).load(low_layout(LOW, KW, WM, MT)), LOW)
    highs = words
    if HIGH:
        high_s = high1_s if HIGH == 1 else high2_s
        highs = high_words(high_s.index(at).load(high_layout(HIGH, KW, WM, MT)), HIGH)
    own = scale_s.index(at).load(LC) if LOW < 16 else gl.zeros([KW, M, 4], gl.int32, LC)
    if SCALE == "int8" or SCALE == "nibbles":
        other = gl.expand_dims(extra_s.index(at).reshape([KW, M]).load(gl.SliceLayout(2, LC)), 2)
    elif SCALE == "half_min":
        other = extra_s.index(at).load(LC)
    else:
        other = own
    x_tiles = reinterpret(x_s.index(at), gl.float16, [8, KW, N, 32], shared_layout(KW, N, 32, False))
    scales = decode_scales(own, other, P.min_scale, P.min_bias, SCALE, OFFSET, KW, M, LC)
    for t in gl.static_range(8):
        b = x_tiles.index(t).permute([0, 2, 1]).load(gl.DotOperandLayout(1, MMA, 8))
        a = gl.reshape(weights_at(t, words, highs, scales, zero, LOW, HIGH, SCALE), [KW, M, 32])
        acc = mma_v2(gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 8), assert_trivial=True), b, acc)
    return acc


@gluon.jit
def one_step(
    products, p: gl.constexpr, sync, T, token, at, low_s, scale_s, high1_s, high2_s, extra_s, x_s,
    STEPS: gl.constexpr, N: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, ST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """This program's share of the p-th product; its first ST - 1 copies are under way unless it is the first.

    at: the stage of its first unit. Returns that of the next product's.
    """
    LOW: gl.constexpr = fact(STEPS, p, "LOW")
    HIGH: gl.constexpr = fact(STEPS, p, "HIGH")
    SCALE: gl.constexpr = fact(STEPS, p, "SCALE")
    OFFSET: gl.constexpr = fact(STEPS, p, "OFFSET")
    PARTS: gl.constexpr = fact(STEPS, p, "PARTS")
    SQUARES: gl.constexpr = fact(STEPS, p, "SQUARES")
    END: gl.constexpr = fact(STEPS, p, "END")
    LAST: gl.constexpr = p == count(STEPS) - 1
    M: gl.constexpr = 16 * WM * MT
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KW, WM, 1], [1, 16, 8])
    LO: gl.constexpr = gl.SliceLayout(0, MMA)
    LCX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [KW, WM, 1], [2, 1, 0])
    kw_x = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, LCX))), 1, 2)
    n_x = expand(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LCX))), 0, 2)
    k_x = expand(gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, LCX))), 0, 1)
    inside = (token + n_x < T) & (k_x >= 0)
    P = products[p]
    S, rows = P.S, P.rows
    copies = copies_of(P, low_s, scale_s, high1_s, high2_s, extra_s, LOW, HIGH, SCALE, KW, WM, MT)
    start, stop = share(P, M, PARTS)
    tile = start // P.units
    block = (start - tile * P.units) * KW
    ahead_tile, ahead_block = tile, block
    if p == 0:
        for i in gl.static_range(ST - 1):
            fetch(copies, i, ahead_tile, ahead_block, start + i < stop, rows, S)
            async_copy.commit_group()
            ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)
        if PDL:
            release_dependents()
            wait_for_inputs()
    elif fact(STEPS, p, "WAITS"):
        meet(sync, n_meetings(STEPS, p))
    if SQUARES:
        factor = normed_factor(P, token, T, gl.program_id(0) == 0, N, SQUARES, KW * WM)
        factor = gl.convert_layout(factor, gl.SliceLayout(0, LO))
    else:
        factor = gl.zeros([N], gl.float32, gl.SliceLayout(0, LO))
    # the first stages' activations by plain loads: in the copies' groups, stage 0 would have to wait for them all
    x_ptrs = P.x + ((token + n_x) * (S * 256) + kw_x * 256 + k_x)
    ahead_tile, ahead_block = tile, block
    stage = at
    for i in gl.static_range(ST - 1):
        mask = inside & (kw_x + ahead_block < S) & (start + i < stop)
        x_s.index(stage).store(gl.load(x_ptrs + ahead_block * 256, mask=mask, other=0.0))
        ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)
        stage = gl.where(stage == ST - 1, 0, stage + 1)

    # the copies ahead run into the next product's first units, so a product lasts at least as long as they reach
    end = stop if LAST else gl.maximum(stop, start + (ST - 1))
    if not LAST:
        Q = products[p + 1]
        next_copies = copies_of(
            Q, low_s, scale_s, high1_s, high2_s, extra_s,
            LOW, fact(STEPS, p + 1, "HIGH"), fact(STEPS, p + 1, "SCALE"), KW, WM, MT,
        )  # fmt: skip
        next_start, next_stop = share(Q, M, fact(STEPS, p + 1, "PARTS"))
        next_tile = next_start // Q.units
        next_block = (next_start - next_tile * Q.units) * KW
    acc = gl.zeros([KW, M, N], gl.float32, MMA)
    for unit in range(start, end):
        async_copy.wait_group(ST - 2)
        # into the stage that the unit before this one has left
        free = gl.where(at == 0, ST - 1, at - 1)
        ahead = unit + (ST - 1)
        if LAST or ahead < end:
            fetch(copies, free, ahead_tile, ahead_block, ahead < stop, rows, S)
            mask = inside & (kw_x + ahead_block < S) & (ahead < stop)
            copy_async(x_s.index(free), x_ptrs + ahead_block * 256, mask=mask)
            ahead_tile, ahead_block = step(ahead_tile, ahead_block, KW, S)
        if not LAST:
            if ahead >= end:
                fetch(next_copies, free, next_tile, next_block, ahead - end < next_stop - next_start, Q.rows, Q.S)
                next_tile, next_block = step(next_tile, next_block, KW, Q.S)
        async_copy.commit_group()
        if LAST or unit < stop:
            acc = multiplied(
                acc, P, at, low_s, scale_s, high1_s, high2_s, extra_s, x_s, LOW, HIGH, SCALE, OFFSET, N, KW, WM, MT
            )
            if (unit + 1 == stop) | (block + KW >= S):
                y = gl.sum(acc, 0)
                acc = gl.zeros([KW, M, N], gl.float32, MMA)
                finish(P, y, factor, tile, token, T, N, M, PARTS, SQUARES, END)
            tile, block = step(tile, block, KW, S)
        at = gl.where(at == ST - 1, 0, at + 1)
    return at


@gluon.jit(do_not_specialize=["T"])
def narrow(
    products, sync, T,
    STEPS: gl.constexpr, N: gl.constexpr, KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, ST: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All weight rows of one or more products times N tokens: each program takes an equal share of every product.

    Program (i, j): share i of the weights, tokens N j and on; several products have one tile of tokens.

    products: `narrow.Product` each. x: float16 [T, S * 256] in the arrays' column order; x_scale [T]. row_start,
    row_width [rows]: the first row of a row's weight and that weight's number of rows (0: a padding row).
    STEPS: a line of constants each, see `FACTS`: the form (all of one LOW), END (see `finish`), PARTS, SQUARES, and
    WAITS: whether a product's input comes from one before it, in this launch. sync: two int32 zeros, zeros again
    afterwards.

    A tile has M = 16 WM MT rows, a unit KW of its `units` runs of super-blocks. PARTS = 1: a program takes whole tiles,
    as many as the others or one more. Else it takes units [per_program * i, per_program * (i + 1)) of n_units in all,
    so its end can fall inside a tile. Such a tile's parts (at most PARTS) go through `partial`, and the program that
    arrives last (`arrived`, one counter a tile, zero before and after) adds them in the order of K. Nothing here
    depends on T, so neither does the order of a token's sums.
    PDL: launched before the kernels ahead have ended; the first stages' weights are read while waiting for them.

    SQUARES > 0: the rows of x are not normed yet, see `normed_factor` (x_scale: their power).
    """
    M: gl.constexpr = 16 * WM * MT
    STEP_COUNT: gl.constexpr = count(STEPS)
    W: gl.constexpr = 8 * fact(STEPS, 0, "LOW")
    token = gl.program_id(1) * N

    low_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, W], shared_layout(KW, M, W, W >= 32))
    scale_s, high1_s, high2_s, extra_s = low_s, low_s, low_s, low_s
    if W < 128:
        scale_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 4], shared_layout(KW, M, 4, False))
    if has_high(STEPS, 1):
        high1_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 8], shared_layout(KW, M, 8, False))
    if has_high(STEPS, 2):
        high2_s = gl.allocate_shared_memory(gl.int32, [ST, KW, M, 16], shared_layout(KW, M, 16, False))
    E: gl.constexpr = extra_words(STEPS)
    if E:
        kind: gl.constexpr = products[with_extra(STEPS)].extra.dtype.element_ty
        extra_s = gl.allocate_shared_memory(kind, [ST, KW, M, E], shared_layout(KW, M, E, False))
    x_s = gl.allocate_shared_memory(gl.float16, [ST, KW, N, 256], rows_layout(KW, N))
    at = 0
    for p in gl.static_range(STEP_COUNT):
        at = one_step(
            products, p, sync, T, token, at, low_s, scale_s, high1_s, high2_s, extra_s, x_s,
            STEPS, N, KW, WM, MT, ST, PDL,
        )  # fmt: skip
    if STEP_COUNT > 1:
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
