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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ggufspec.kernels.matmul.dialect import copy_async
from ggufspec.kernels.matmul.epilogue import FIXED_SCALE, gated, half, normed_factor, pair, row_place, square
from ggufspec.kernels.matmul.exchange import boxes_of, collect, over_ranks
from ggufspec.kernels.matmul.fragments import (
    copy_layout,
    decode_scales,
    expand,
    high_layout,
    high_words,
    low_layout,
    low_words,
    quad_layout,
    rows_copy_layout,
    rows_layout,
    shared_layout,
    steps_layout,
    tile_layout,
    weights_at,
)  # fmt: skip
from ggufspec.kernels.matmul.units import (
    fetch,
    multiply_together,
    multiply_unit,
    read_unit,
    ring,
    step,
    store_steps,
    tile_pointers,
)  # fmt: skip


@gluon.jit
def release_dependents():
    """Programmatic dependent launch: let the next kernel start its prologue."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_inputs():
    """Programmatic dependent launch: wait for the results of the kernels before."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


NUMBERS = [
    "S", "T", "first_tile", "units", "n_units", "per_program", "min_scale", "min_bias", "n_squares", "half_of_box",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def narrow(
    low, high, scale, extra, x, x_scale, out, row_start, row_width, slots,
    squares, next_power, stream, weight, power, stream_out, out_side, boxes, half_of_box,
    S, rows, T, first_tile, units, n_units, per_program, out_scale, min_scale, min_bias,
    n_squares, columns, eps, n_out, out_width,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, OFFSET: gl.constexpr, N: gl.constexpr,
    KW: gl.constexpr, WM: gl.constexpr, MT: gl.constexpr, TOGETHER: gl.constexpr,
    ST: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
    SQUARES: gl.constexpr, END: gl.constexpr, SPARE: gl.constexpr,
    RANK: gl.constexpr, RANKS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """All weight rows times N tokens: each program works through an equal share of (row tile, part of K) units.

    Program (i, j): share i of the weights, tokens N (first_tile + j) and on.

    low, high, scale, extra: a form's arrays (extra: `d` or `min`). x: float16 [T, S * 256] in the arrays' column
    order; x_scale [T]. out: float32, weight after weight [T, width]; row_start, row_width [rows]: the first row of a
    row's weight and that weight's number of rows (0: a padding row).

    A tile has M = 16 WM MT rows, a unit KW of its `units` runs of super-blocks; a program takes units
    [per_program * i, per_program * (i + 1)) of n_units in all, so its end can fall inside a tile. Such a tile (of at
    most PARTS parts) is its first program's, which adds in the order of K what the others leave in `slots`, see
    `exchange`. Nothing here depends on T, so neither does the order of a token's sums.
    TOGETHER: four warps multiply 64 rows at once by Hopper's instruction, which adds 16 columns at a time in the order
    of a chain of single warps'. Where sums over rows follow ("added") the order of warps would tell, so never there.
    SPARE: stages of activations that nothing uses: no more programs fit a multiprocessor than it is to run at once.
    PDL: launched before the kernels ahead have ended; the first stages' weights are read while waiting for them.

    SQUARES > 0: the rows of x are not normed yet, see `normed_factor` (x_scale: their power). END says what becomes of
    the products y:
    "rows"   out, as above
    "added"  stream + y to stream_out [T, n_out], float32; the same * weight / power to out, float16 in the arrays'
             order, out_width a row; the sums of its squares by tile to out_side [tiles, T]. RANKS > 1: y is the sum of
             all ranks' products, see `joint`
    "silu", "gelu"  the tile's rows are pairs, see `gated`: activation(gate) * up / FIXED_SCALE to out likewise, n_out
             columns; FIXED_SCALE to out_side [T]
    """
    M: gl.constexpr = 16 * WM * MT
    if TOGETHER:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, 1], [16, N, 16])
        LO: gl.constexpr = MMA
    else:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [KW, WM, 1], [1, 16, 8])  # type: ignore[no-redef]
        LO: gl.constexpr = gl.SliceLayout(0, MMA)  # type: ignore[no-redef]
    LE: gl.constexpr = tile_layout(KW, WM, MT, [4, 8], [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]])
    LC: gl.constexpr = gl.SliceLayout(3, LE)
    W: gl.constexpr = 8 * LOW
    H: gl.constexpr = 8 * HIGH if HIGH else 8
    program = gl.program_id(0)
    token = (first_tile + gl.program_id(1)) * N
    start = program * per_program
    stop = gl.minimum(start + per_program, n_units)

    LCW: gl.constexpr = copy_layout(KW, WM, MT, W, 4)
    LCH: gl.constexpr = copy_layout(KW, WM, MT, H, 4)
    LCS: gl.constexpr = copy_layout(KW, WM, MT, 4, 4)
    LCD: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 32, 1], [KW, WM, 1], [1, 2, 0])
    if TOGETHER:
        LCX: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [1, WM, 1], [2, 1, 0])
    else:
        LCX: gl.constexpr = rows_copy_layout(KW, WM, N)  # type: ignore[no-redef]
    w_s = ring(gl.int32, [KW, M, W], shared_layout(KW, M, W, W >= 32), ST)
    h_s, s_s, e_s = w_s, w_s, w_s  # where a form has none
    copies = ((w_s,) + tile_pointers(low, rows, LCW, KW, M, W),)
    if LOW < 16:
        s_s = ring(gl.int32, [KW, M, 4], shared_layout(KW, M, 4, False), ST)
        copies = copies + ((s_s,) + tile_pointers(scale, rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    if HIGH:
        h_s = ring(gl.int32, [KW, M, H], shared_layout(KW, M, H, False), ST)
        copies = copies + ((h_s,) + tile_pointers(high, rows, LCH, KW, M, H),)  # type: ignore[assignment]
    if SCALE == "int8" or SCALE == "nibbles":
        e_s = ring(extra.dtype.element_ty, [KW, M, 1], shared_layout(KW, M, 1, False), ST)
        copies = copies + ((e_s,) + tile_pointers(extra, rows, LCD, KW, M, 1),)  # type: ignore[assignment]
    if SCALE == "half_min":
        e_s = ring(gl.int32, [KW, M, 4], shared_layout(KW, M, 4, False), ST)
        copies = copies + ((e_s,) + tile_pointers(extra, rows, LCS, KW, M, 4),)  # type: ignore[assignment]
    if TOGETHER:
        x_s = ring(gl.float16, [4, N, 32], steps_layout(N), 2 * ST)  # halves of units
        t_x = expand(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LCX))), 1, 2)
        n_x = expand(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LCX))), 0, 2)
        k_x = expand(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LCX))), 0, 1) + 32 * t_x
        kw_x = 0
        x_ptrs = x + ((token + n_x) * (S * 256) + k_x)
    else:
        roomy = gl.allocate_shared_memory(gl.float16, [1 + SPARE, KW, N, 256], rows_layout(KW, N))
        x_s = (roomy.index(0),) + ring(gl.float16, [KW, N, 256], rows_layout(KW, N), ST - 1)
        kw_x = expand(gl.arange(0, KW, gl.SliceLayout(1, gl.SliceLayout(2, LCX))), 1, 2)
        n_x = expand(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LCX))), 0, 2)
        k_x = expand(gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, LCX))), 0, 1)
        x_ptrs = x + ((token + n_x) * (S * 256) + kw_x * 256 + k_x)

    tile = start // units
    first_block = (start - tile * units) * KW
    first_row = first_block * rows + tile * M
    ahead_row, ahead_block = first_row, first_block
    for i in gl.static_range(ST - 1):
        if start + i < stop:
            fetch(copies, i, ahead_row, ahead_block, KW, S)
        async_copy.commit_group()
        ahead_row, ahead_block = step(ahead_row, ahead_block, KW, M, S, rows, units)
    if RANKS > 1:  # no kernel writes these
        others = boxes_of(boxes, RANKS)
    if PDL:
        release_dependents()
        wait_for_inputs()
    # the first stages' activations by plain loads: in the copies' groups, stage 0 would have to wait for them all
    inside = (token + n_x < T) & (k_x >= 0)
    ahead_row, ahead_block = first_row, first_block
    first_x = ()
    for i in gl.static_range(ST - 1):
        mask = inside & (kw_x + ahead_block < S) & (start + i < stop)
        if TOGETHER:
            first_x = first_x + (gl.load(x_ptrs + ahead_block * 256, mask=mask, other=0.0),)  # type: ignore[assignment]
            first_x = first_x + (gl.load(x_ptrs + (ahead_block * 256 + 128), mask=mask, other=0.0),)  # type: ignore[assignment]
        else:
            first_x = first_x + (gl.load(x_ptrs + ahead_block * 256, mask=mask, other=0.0),)  # type: ignore[assignment]
        ahead_row, ahead_block = step(ahead_row, ahead_block, KW, M, S, rows, units)
    if SQUARES:  # asked for while the activations are on their way
        factor_row = normed_factor(
            squares, x_scale, next_power, token, T, n_squares, columns, eps, program == 0, N, SQUARES, KW * WM
        )
        factor_row = gl.convert_layout(factor_row, gl.SliceLayout(0, LO))
    for i in gl.static_range(ST - 1):
        if TOGETHER:
            store_steps(x_s[2 * i], first_x[2 * i])
            store_steps(x_s[2 * i + 1], first_x[2 * i + 1])
        else:
            x_s[i].store(first_x[i])

    zero = gl.zeros([KW, M, 4, 8], gl.int32, LE)
    unit = start
    while unit < stop:
        end = gl.minimum((tile + 1) * units, stop)
        if TOGETHER:
            acc = gl.zeros([M, N], gl.float32, MMA)
        else:
            acc = gl.zeros([KW, M, N], gl.float32, MMA)
        for base in range(unit - (unit - start) % ST, end, ST):
            for at in gl.static_range(ST):  # unit base + at is in stage `at`
                if (base >= unit - at) & (base < end - at):
                    async_copy.wait_group(ST - 2)
                    if TOGETHER:
                        fence_async_shared()
                        coming_at = x_ptrs + ahead_block.to(gl.int64) * 256
                        comes = inside & (base < stop - (at + ST - 1))
                        coming = gl.load(coming_at, mask=comes, other=0.0)
                    # asked for ahead of the copies, which would hold them up
                    read = read_unit(w_s[at], h_s[at], s_s[at], e_s[at], LC, LOW, HIGH, SCALE, KW, WM, MT)
                    free: gl.constexpr = (at + ST - 1) % ST  # the stage that the unit before has left
                    if base < stop - (at + ST - 1):
                        fetch(copies, free, ahead_row, ahead_block, KW, S)
                        if not TOGETHER:
                            mask = inside if KW == 1 else inside & (kw_x + ahead_block < S)
                            copy_async(x_s[free], x_ptrs + ahead_block.to(gl.int64) * 256, mask=mask)
                    async_copy.commit_group()
                    ahead_row, ahead_block = step(ahead_row, ahead_block, KW, M, S, rows, units)
                    if TOGETHER:
                        scales = decode_scales(read[2], read[3], min_scale, min_bias, SCALE, OFFSET, 1, M, LC)
                        x_at, rest_at = x_s[2 * at], x_s[2 * at + 1]
                        acc = multiply_together(acc, read, scales, x_at, zero, 0, MMA, LOW, HIGH, SCALE)
                        rest = gl.load(coming_at + 128, mask=comes, other=0.0)
                        acc = multiply_together(acc, read, scales, rest_at, zero, 1, MMA, LOW, HIGH, SCALE)
                        # not sooner: a store waits for its load, the products need not
                        store_steps(x_s[2 * free], coming)
                        store_steps(x_s[2 * free + 1], rest)
                        acc = warpgroup_mma_wait(0, [acc])  # this stage is overwritten after the next barrier
                    else:
                        acc = multiply_unit(
                            acc, read, x_s[at], zero, min_scale, min_bias, MMA, LC, LOW, HIGH, SCALE, OFFSET
                        )
        if TOGETHER:
            y = acc
        else:
            y = gl.sum(acc, 0)
        m = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, LO)), 1)
        n_row = token + gl.arange(0, N, gl.SliceLayout(0, LO))
        n = gl.expand_dims(n_row, 0)
        here = (n < T) & (m >= 0)
        # the programs that have the tile's first and last units, without a division: at most PARTS have any
        first, final = program, program
        for k in gl.static_range(PARTS - 1):
            first -= (tile * units < start - k * per_program).to(gl.int32)
            final += ((tile + 1) * units > stop + k * per_program).to(gl.int32)
        n_parts = final - first + 1
        slot = slots + (gl.program_id(1) * gl.num_programs(0) + program) * (M * N) + ((n - token) * M + m)
        # asked for now, to arrive while the parts are exchanged
        if SQUARES:
            factor = gl.expand_dims(factor_row, 0) * out_scale
        else:
            factor = gl.load(x_scale + gl.minimum(n, T - 1)) * out_scale
        row = tile * M + m
        if END == "rows":
            width = gl.load(row_width + row)
            begin = gl.load(row_start + row)
        elif END == "added":
            here = here & (row < n_out)
            before = gl.load(stream + (n * n_out + row), mask=here, other=0.0)
            gain = gl.load(weight + row, mask=row < n_out, other=0.0)
            gain = gain / gl.load(power + n, mask=n < T, other=1.0)
        if program != first:
            gl.store(slot, y, mask=n < T)
        else:
            if PARTS > 1:
                if n_parts > 1:
                    y = collect(y, slot, n < T, n_parts, PARTS, KW > 1)
            y = y * factor
            if RANKS > 1:
                y = over_ranks(y, others, half_of_box, n, row, here, RANK, RANKS, ROWS, COLUMNS, KW > 1)
            if END == "rows":
                gl.store(out + (begin * (T - 1) + row + n * width), y, mask=here & (width > 0))
            elif END == "added":
                total = before + y
                gl.store(stream_out + (n * n_out + row), total, mask=here)
                gl.store(out + (n * out_width + row_place(row)), half(total * gain), mask=here)
                of_tile = gl.sum(gl.where(here, square(total), 0.0), 0)
                gl.store(out_side + (tile * T + n_row), of_tile, mask=n_row < T)
            else:
                inner = (tile * M + m) // 16 * 8 + m % 8
                to = gl.where(here & (inner < n_out), n * out_width + row_place(inner), -1)
                to, _ = pair(to, M, N)
                gl.store(out + to, half(gated(y, END == "gelu", M, N) * (1.0 / FIXED_SCALE)), mask=to >= 0)
                if tile == 0:
                    fixed = gl.full([N], FIXED_SCALE, gl.float32, gl.SliceLayout(0, LO))
                    gl.store(out_side + n_row, fixed, mask=n_row < T)
        unit, tile = end, tile + 1


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
    elif SCALE == "six_bit" or SCALE == "six_table":
        LQ: gl.constexpr = quad_layout(1, WM, MT)
        q_ptrs, _ = tile_pointers(scale, rows, LQ, 1, M, 4)
        m_q = expand(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LQ))), 0, 2)
        other = gl.load(q_ptrs + at * 4, mask=m0 + m_q < limit, other=0)
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
