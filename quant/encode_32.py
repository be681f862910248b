"""Encoders of the 32-element types: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL.

An encoder takes x, float32 [rows, columns], and the importance of each column, float32 [columns] or None, and
returns blocks, uint8 [rows * columns / 32, block bytes]. It works on numpy arrays and on CUDA tensors; `searches`
picks the implementation of the scale searches. Bytes are those of ggml's reference quantizers.
"""

from __future__ import annotations

from types import ModuleType

from ggufspec.quant import search
from ggufspec.quant.arrays import (
    Array,
    cat,
    clip,
    contiguous,
    divide,
    half_bytes,
    i8_bytes,
    inverse,
    is_torch,
    round_away,
    sqrt,
    tile_columns,
    trunc,
    u8,
)


def searches(x: Array) -> ModuleType:
    """The module with the scale searches for arrays like `x`."""
    if is_torch(x):
        from ggufspec.quant import search_triton

        return search_triton
    return search


def groups(x: Array, n: int) -> Array:
    """Rows cut into groups of n elements, one group a column: [..., columns] -> [n, number of groups]."""
    return contiguous(x.reshape(-1, n).T)


def column_weights(importance: Array, n_rows: int, n: int) -> Array:
    """Importance of columns [columns] laid out like `groups` of n_rows rows -> [n, number of groups]."""
    return tile_columns(importance.reshape(-1, n).T, n_rows)


def ungroup(levels: Array) -> Array:
    """Levels [n, g] of any type -> uint8 [g, n]."""
    return contiguous(u8(levels).T)


def _row_weights(x: Array, xt: Array, importance: Array) -> Array:
    """importance * sqrt(sigma^2 + x^2), sigma^2 the mean square of the whole row; laid out like xt [32, g]."""
    n_rows, n_columns = x.shape
    by_column = contiguous(x.T)
    sigma2 = divide(searches(x).ordered_sum(by_column * by_column), n_columns)
    per_group = tile_columns(sigma2.reshape(-1, 1), n_columns // 32).reshape(-1)
    return column_weights(importance, n_rows, 32) * sqrt(per_group + xt * xt)


def _nibbles(levels: Array) -> Array:
    """Levels uint8 [n, 32] -> the low four bits as bytes [n, 16]: element j low, element j + 16 high."""
    return (levels[:, :16] & 15) | (levels[:, 16:] & 15) << 4


def _high_bits(levels: Array) -> Array:
    """Bit 4 of levels uint8 [n, 32] -> [n, 4]: a 32-bit word whose bit e belongs to element e."""
    bits = (levels >> 4 & 1).reshape(-1, 4, 8)
    word = bits[:, :, 0]
    for i in range(1, 8):
        word = word | bits[:, :, i] << i
    return word


def q8_0(x: Array, importance: Array | None) -> Array:
    blocks = x.reshape(-1, 32)
    d = divide(searches(x).magnitude(blocks), 127)
    return cat([half_bytes(d), i8_bytes(round_away(blocks * inverse(d).reshape(-1, 1)))], 1)


def _symmetric(x: Array, importance: Array | None, n_max: int) -> tuple[Array, Array]:
    """Scale [g] and levels uint8 [g, 32] of a type with levels around n_max (8 or 16) and no minimum."""
    fit, xt = searches(x), groups(x, 32)
    if importance is None:
        d = divide(fit.extreme(xt), -n_max)
        return d, ungroup(clip(trunc(xt * inverse(d) + (n_max + 0.5)), 0, 2 * n_max - 1))
    d, levels = fit.symmetric(xt, n_max, _row_weights(x, xt, importance))
    return d, ungroup(levels.of(xt))


def _asymmetric(x: Array, importance: Array | None, n_max: int) -> tuple[Array, Array, Array]:
    """Scale [g], minimum [g] (to be added) and levels uint8 [g, 32] of a type with levels 0..n_max."""
    fit, xt = searches(x), groups(x, 32)
    if importance is None:
        low = fit.lowest(xt)
        d = divide(fit.highest(xt) - low, n_max)
        return d, low, ungroup(clip(trunc((xt - low) * inverse(d) + 0.5), 0, n_max))
    d, minus, levels = fit.asymmetric(xt, n_max, _row_weights(x, xt, importance), -0.9, 0.05, 36)
    return d, -minus, ungroup(levels.of(xt))


def q4_0(x: Array, importance: Array | None) -> Array:
    d, levels = _symmetric(x, importance, 8)
    return cat([half_bytes(d), _nibbles(levels)], 1)


def q5_0(x: Array, importance: Array | None) -> Array:
    d, levels = _symmetric(x, importance, 16)
    return cat([half_bytes(d), _high_bits(levels), _nibbles(levels)], 1)


def q4_1(x: Array, importance: Array | None) -> Array:
    d, m, levels = _asymmetric(x, importance, 15)
    return cat([half_bytes(d), half_bytes(m), _nibbles(levels)], 1)


def q5_1(x: Array, importance: Array | None) -> Array:
    d, m, levels = _asymmetric(x, importance, 31)
    return cat([half_bytes(d), half_bytes(m), _high_bits(levels), _nibbles(levels)], 1)


def nonlinear_weights(x: Array, xt: Array, importance: Array | None, n_block: int) -> Array:
    """Weights of IQ4_NL and IQ4_XS for xt [32, g]: x^2, or importance * sqrt(2 * mean square of n_block + x^2)."""
    if importance is None:
        return xt * xt
    blocks = groups(x, n_block)
    sigma2 = searches(x).ordered_sum(blocks * blocks) * (2 / n_block)
    per_group = tile_columns(sigma2.reshape(-1, 1), n_block // 32).reshape(-1)
    return column_weights(importance, len(x), 32) * sqrt(per_group + xt * xt)


def iq4_nl(x: Array, importance: Array | None) -> Array:
    fit, xt = searches(x), groups(x, 32)
    d = fit.nonlinear(xt, nonlinear_weights(x, xt, importance, 32))
    return cat([half_bytes(d), _nibbles(ungroup(fit.nonlinear_level(xt * inverse(d))))], 1)
