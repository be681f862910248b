"""What a narrow product does before and after its sums: the factor of normed rows, and what becomes of a finished tile.

A tile's values stand as the tensor cores leave them: [M, N], weight rows by tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ggufspec.kernels.matmul import values

FIXED_SCALE = gl.constexpr(values.FIXED_SCALE.value)
HEADROOM = gl.constexpr(values.HEADROOM.value)


@gluon.jit
def row_place(e):
    """Where column e of a row stands in an activation row; as `values.row_place`."""
    i = e % 256
    return e - i + 32 * (i // 4 % 8) + 8 * (i // 32 % 4) + 2 * (i % 4) + i // 128


@gluon.jit
def half(v):
    return gl.minimum(gl.maximum(v, -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def square(v):
    """v * v, rounded: fused into a sum, which of two squares is not rounded would be each compilation's choice."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $1;", "=f,f", [v], gl.float32, True, 1)


@gluon.jit
def normed_factor(
    squares, power, next_power, token, T, n_squares, columns, eps, leads,
    N: gl.constexpr, SQUARES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """[N]: what a token's sums are multiplied by where its row is x * weight / power, not yet normed.

    squares [n_squares, T]: partial sums of x^2, added in one order at every width. The program that `leads` also
    writes the power of two next to the row's root mean square: what the stream after this layer is divided by.
    """
    L: gl.constexpr = gl.BlockedLayout([SQUARES // 32, 1], [32, 1], [1, WARPS], [0, 1])
    i = gl.expand_dims(gl.arange(0, SQUARES, gl.SliceLayout(1, L)), 1)
    n = token + gl.arange(0, N, gl.SliceLayout(0, L))
    mask = (i < n_squares) & (gl.expand_dims(n, 0) < T)
    parts = gl.load(squares + (i * T + gl.expand_dims(n, 0)), mask=mask, other=0.0)
    mean = gl.sum(parts, 0) / columns + eps
    own = gl.load(power + n, mask=n < T, other=1.0)
    if leads:
        exponent = (((mean.to(gl.int32, bitcast=True) >> 23) - 127) >> 1) + 127 + HEADROOM
        gl.store(next_power + n, (exponent << 23).to(gl.float32, bitcast=True), mask=n < T)
    return gl.rsqrt(mean) * own


@gluon.jit
def pair(x, M: gl.constexpr, N: gl.constexpr):
    """[M, N] to the two halves [M / 16, 8, N] of every sixteen rows; both halves of a pair are one thread's."""
    return gl.split(gl.permute(gl.reshape(x, [M // 16, 2, 8, N]), (0, 2, 3, 1)))


@gluon.jit
def gated(y, GELU: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """silu(gate) * up (or gelu) [M / 16, 8, N] of a tile whose sixteens are eight rows of gate, eight of up."""
    gate, up = pair(y, M, N)
    z = gate
    if GELU:  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    return gate * gl.div_rn(gl.full_like(z, 1.0), 1.0 + gl.exp(-z)) * up
