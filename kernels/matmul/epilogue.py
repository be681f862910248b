"""What a narrow product does before and after its sums: the factor of normed rows, and what becomes of a finished tile.

A tile's values stand as the tensor cores leave them: [M, N], weight rows by tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ggufspec.kernels.matmul import product, values
from ggufspec.kernels.matmul.dialect import barrier
from ggufspec.kernels.matmul.forms import holds, is_only
from ggufspec.kernels.matmul.product import get

FIXED_SCALE = gl.constexpr(values.FIXED_SCALE.value)
HEADROOM = gl.constexpr(values.HEADROOM.value)
ROWS, ADDED, SILU, GELU = (gl.constexpr(product.ENDS[name]) for name in ("rows", "added", "silu", "gelu"))


@gluon.jit
def row_place(e):
    """Where column e of a row stands in an activation row; as `values.row_place`."""
    i = e % 256
    return e - i + 32 * (i // 4 % 8) + 8 * (i // 32 % 4) + 2 * (i % 4) + i // 128


@gluon.jit
def half(v):
    return gl.minimum(gl.maximum(v, -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def normed_factor(P, token, T, leads, N: gl.constexpr, SQUARES: gl.constexpr, WARPS: gl.constexpr):
    """[N]: what makes a token's sums those of its normed row, whose x is x * weight / power, not yet normed.

    squares [n_squares, T]: partial sums of x^2, added in one order at every width; SQUARES: the most there are. The
    program that `leads` also writes a power of two near the row's root mean square to next_power: what the stream
    after this layer is divided by.
    """
    L: gl.constexpr = gl.BlockedLayout([SQUARES // 32, 1], [32, 1], [1, WARPS], [0, 1])
    i = gl.expand_dims(gl.arange(0, SQUARES, gl.SliceLayout(1, L)), 1)
    n = token + gl.arange(0, N, gl.SliceLayout(0, L))
    mask = (i < get(P, "n_squares")) & (gl.expand_dims(n, 0) < T)
    parts = gl.load(get(P, "squares") + (i * T + gl.expand_dims(n, 0)), mask=mask, other=0.0)
    mean = gl.sum(parts, 0) / get(P, "columns") + get(P, "eps")
    if leads:
        exponent = (((mean.to(gl.int32, bitcast=True) >> 23) - 127) >> 1) + 127 + HEADROOM
        gl.store(get(P, "next_power") + n, (exponent << 23).to(gl.float32, bitcast=True), mask=n < T)
    return gl.rsqrt(mean)


@gluon.jit
def pair(x, M: gl.constexpr, N: gl.constexpr):
    """[M, N] to the two halves [M / 16, 8, N] of every sixteen rows; both halves of a pair are one thread's."""
    return gl.split(gl.permute(gl.reshape(x, [M // 16, 2, 8, N]), (0, 2, 3, 1)))


@gluon.jit
def gated(y, gelu, M: gl.constexpr, N: gl.constexpr):
    """silu(gate) * up (or gelu) [M / 16, 8, N] of a tile whose sixteens are eight rows of gate, eight of up."""
    gate, up = pair(y, M, N)
    # gelu: 0.5 (1 + tanh(y)) = sigmoid(2 y)
    z = gl.where(gelu, 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate), gate)
    return gate * gl.div_rn(gl.full_like(z, 1.0), 1.0 + gl.exp(-z)) * up


@gluon.jit
def finish(P, y, factor_row, tile, token, T, N: gl.constexpr, M: gl.constexpr, PARTS: gl.constexpr,
           ENDS: gl.constexpr):  # fmt: skip
    """What becomes of a tile's sums y [M, N], or of a part of them: see `narrow` for parts.

    By the product's end, with y times its token's (factor_row [N]) and its weights' factors:
    ROWS   y to out, float32, weight after weight [T, width]
    ADDED  stream + y to stream_out [T, n_out], float32; the same * weight / power to out_rows, float16 in the arrays'
           order, out_width a row; the sums of its squares by tile to out_side [tiles, T]
    SILU, GELU  the tile's rows are pairs, see `gated`: activation(gate) * up / FIXED_SCALE to out_rows likewise, n_out
           columns; FIXED_SCALE to out_side [T]
    ENDS: those that the launch has.
    """
    LO: gl.constexpr = y.type.layout
    ONLY: gl.constexpr = is_only(ENDS)
    m = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, LO)), 1)
    n_row = token + gl.arange(0, N, gl.SliceLayout(0, LO))
    n = gl.expand_dims(n_row, 0)
    row = tile * M + m
    end, n_out, out_width = get(P, "end"), get(P, "n_out"), get(P, "out_width")
    here = (n < T) & (m >= 0)
    factor = gl.expand_dims(factor_row, 0) * get(P, "out_scale")
    # asked for now, to arrive while the parts are exchanged
    if holds(ENDS, ROWS):
        mine = (m >= 0) & (ONLY | (end == ROWS))
        width = gl.load(get(P, "row_width") + row, mask=mine, other=0)
        begin = gl.load(get(P, "row_start") + row, mask=mine, other=0)
    if holds(ENDS, ADDED):
        mine = (row < n_out) & (ONLY | (end == ADDED))
        before = gl.load(get(P, "stream") + (n * n_out + row), mask=here & mine, other=0.0)
        gain = gl.load(get(P, "weight") + row, mask=mine, other=0.0)
        gain = gain / gl.load(get(P, "power") + n, mask=n < T, other=1.0)
    last = True
    if PARTS > 1:
        units, per_program = get(P, "units"), get(P, "per_program")
        first = tile * units // per_program
        n_parts = ((tile + 1) * units - 1) // per_program - first + 1
        last = n_parts == 1
        place = gl.program_id(1) * (get(P, "rows") // M) + tile
        slots = get(P, "partial") + place * (PARTS * M * N) + ((n - token) * M + m)
        if n_parts > 1:
            gl.store(slots + (gl.program_id(0) - first) * (M * N), y, mask=n < T, cache_modifier=".cg")
            barrier()
            last = gl.atomic_add(get(P, "arrived") + place, 1) == n_parts - 1
            if last:
                gl.store(get(P, "arrived") + place, 0)
                y = gl.load(slots, mask=n < T, other=0.0, cache_modifier=".cg")
                for k in gl.static_range(1, PARTS):
                    y += gl.load(slots + k * (M * N), mask=(n < T) & (k < n_parts), other=0.0, cache_modifier=".cg")
    if last:
        y = y * factor
        if holds(ENDS, ROWS):
            if ONLY or end == ROWS:
                gl.store(get(P, "out") + (begin * (T - 1) + row + n * width), y, mask=here & (width > 0))
        if holds(ENDS, ADDED):
            if ONLY or end == ADDED:
                total = before + y
                real = here & (row < n_out)
                gl.store(get(P, "stream_out") + (n * n_out + row), total, mask=real)
                gl.store(get(P, "out_rows") + (n * out_width + row_place(row)), half(total * gain), mask=real)
                of_tile = gl.sum(gl.where(real, total * total, 0.0), 0)
                gl.store(get(P, "out_side") + (tile * T + n_row), of_tile, mask=n_row < T)
        if holds(ENDS, SILU) or holds(ENDS, GELU):
            if ONLY or end >= SILU:
                inner = row // 16 * 8 + row % 8
                to = gl.where(here & (inner < n_out), n * out_width + row_place(inner), -1)
                to, _ = pair(to, M, N)
                v = half(gated(y, end == GELU, M, N) * (1.0 / FIXED_SCALE))
                gl.store(get(P, "out_rows") + to, v, mask=to >= 0)
                if tile == 0:
                    fixed = gl.full([N], FIXED_SCALE, gl.float32, gl.SliceLayout(0, LO))
                    gl.store(get(P, "out_side") + n_row, fixed, mask=n_row < T)
