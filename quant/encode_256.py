"""Encoders of the 256-element types: Q2_K..Q6_K, IQ4_XS. Same contract as `encode_32`.

Each does three things: fit a scale (and minimum) to every group of 16 or 32 elements; quantize the group scales
of a block against one or two half-precision numbers; quantize the elements again with the scales as stored.
A group whose stored scale is zero keeps the levels of its fit.
"""

from __future__ import annotations

from collections.abc import Callable

from ggufspec.quant.arrays import (
    Array,
    cat,
    clip,
    contiguous,
    divide,
    half_bytes,
    i8_bytes,
    inverse,
    rint,
    round_half,
    sqrt,
    tile_columns,
    u8,
    where,
)
from ggufspec.quant.encode_32 import column_weights, groups, nonlinear_weights, searches, ungroup

Fit = Callable[[Array], Array]  # x [n, g] -> the levels a search found for it, from 0 on


def _block_weights(x: Array, xt: Array, importance: Array, factor: int) -> Array:
    """importance * sqrt(factor * sum of squares of the block / 256 + x^2), laid out like xt [n, g]."""
    n, blocks = xt.shape[0], groups(x, 256)
    sigma2 = searches(x).ordered_sum(blocks * blocks) * (factor / 256)
    per_group = tile_columns(sigma2.reshape(-1, 1), 256 // n).reshape(-1)
    return column_weights(importance, len(x), n) * sqrt(per_group + xt * xt)


def _scale_codes(s: Array, top: int, n_groups: int) -> tuple[Array, Array]:
    """Non-negative group scales [g] -> codes 0..top [blocks, n_groups] and the blocks' unit [blocks], unrounded."""
    s = s.reshape(-1, n_groups)
    peak = clip(searches(s).highest(contiguous(s.T)), 0, float("inf")) + 0  # no minus zero
    return clip(rint(divide(top, peak).reshape(-1, 1) * s), 0, top), divide(peak, top)


def _fitted_codes(s: Array, m: Array, w: Array, top: int, n_groups: int) -> tuple[Array, Array, Array, Array]:
    """Codes [blocks, n_groups] and units [blocks] of scales and minima, weighted by the groups' sums of w."""
    fit = searches(s)
    sums = fit.ordered_sum(w)
    x = cat([contiguous(v.reshape(-1, n_groups).T) for v in (s, m)], 1)
    weights = tile_columns(contiguous(sums.reshape(-1, n_groups).T), 2)
    unit, codes = fit.positive(x, top, weights)
    half = codes.shape[1] // 2
    return contiguous(codes[:, :half].T), unit[:half], contiguous(codes[:, half:].T), unit[half:]


def _requantize(x: Array, scale: Array, low: int, high: int, fitted: Fit, offset: Array | None = None) -> Array:
    """Levels minus `low` of x [n, g] for stored scales [g], as float32 [n, g]; `offset` is added to x first."""
    zero = scale == 0
    v = x if offset is None else x + offset
    levels = clip(rint(v / where(zero, scale + 1, scale)), low, high) - low
    return where(zero, fitted(x), levels) if bool(zero.any()) else levels


def _asymmetric(
    x: Array, importance: Array | None, n: int, n_max: int, top: int, trials: tuple[float, float, int], factor: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Fit and store groups of n elements with levels 0..n_max and scale codes 0..top.

    Returns scale codes and minimum codes, uint8 [blocks, 256 / n]; their units [blocks]; levels uint8 [blocks, 256].
    """
    fit, xt, n_groups = searches(x), groups(x, n), 256 // n
    if importance is None:
        absolute = abs(xt)
        w = absolute if n == 16 else sqrt(divide(fit.ordered_sum(xt * xt), n)) + absolute
        s, m, fitted = fit.asymmetric(xt, n_max, w, *trials, use_mad=n == 16)
        codes, d = _scale_codes(s, top, n_groups)
        m_codes, d_min = _scale_codes(m, top, n_groups)
    else:
        w = _block_weights(x, xt, importance, factor)
        s, m, fitted = fit.asymmetric(xt, n_max, w, -0.9, 0.05, 36)
        codes, d, m_codes, d_min = _fitted_codes(s, m, w, top, n_groups)
    scale = (round_half(d).reshape(-1, 1) * codes).reshape(-1)
    offset = (round_half(d_min).reshape(-1, 1) * m_codes).reshape(-1)
    levels = ungroup(_requantize(xt, scale, 0, n_max, fitted.of, offset)).reshape(-1, 256)
    return u8(codes), u8(m_codes), d, d_min, levels


def _pack_quarters(levels: Array) -> Array:
    """2-bit levels uint8 [blocks, 256] -> [blocks, 64]; byte 32h+l holds elements 128h + 32r + l."""
    q = levels.reshape(-1, 2, 4, 32)
    return (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(-1, 64)


def _pack_pairs(levels: Array) -> Array:
    """4-bit levels uint8 [blocks, 256] -> [blocks, 128]; byte 32c+l holds elements 64c + l and 64c + 32 + l."""
    q = levels.reshape(-1, 4, 2, 32)
    return (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)


def _pack_masks(bits: Array) -> Array:
    """0/1 uint8 [blocks, 256] -> [blocks, 32]; bit k of byte l belongs to element 32k + l."""
    b = bits.reshape(-1, 8, 32)
    mask = b[:, 0]
    for k in range(1, 8):
        mask = mask | b[:, k] << k
    return mask


def _pack_k4_scales(codes: Array, m_codes: Array) -> Array:
    """Eight pairs of 6-bit codes, uint8 [blocks, 8] each -> the 12 scale bytes of Q4_K and Q5_K."""
    s, t, m, o = codes[:, :4], codes[:, 4:], m_codes[:, :4], m_codes[:, 4:]
    return cat([s | t >> 4 << 6, m | o >> 4 << 6, (t & 15) | (o & 15) << 4], 1)


def q2_k(x: Array, importance: Array | None) -> Array:
    codes, m_codes, d, d_min, levels = _asymmetric(x, importance, 16, 3, 15, (-0.5, 0.1, 15), 1)
    return cat([codes | m_codes << 4, _pack_quarters(levels), half_bytes(d), half_bytes(d_min)], 1)


def q4_k(x: Array, importance: Array | None) -> Array:
    codes, m_codes, d, d_min, levels = _asymmetric(x, importance, 32, 15, 63, (-1.0, 0.1, 20), 2)
    return cat([half_bytes(d), half_bytes(d_min), _pack_k4_scales(codes, m_codes), _pack_pairs(levels)], 1)


def q5_k(x: Array, importance: Array | None) -> Array:
    codes, m_codes, d, d_min, levels = _asymmetric(x, importance, 32, 31, 63, (-0.5, 0.1, 15), 2)
    scales = cat([half_bytes(d), half_bytes(d_min), _pack_k4_scales(codes, m_codes)], 1)
    return cat([scales, _pack_masks(levels >> 4), _pack_pairs(levels & 15)], 1)


def q3_k(x: Array, importance: Array | None) -> Array:
    fit, xt = searches(x), groups(x, 16)
    if importance is None:
        s, fit_levels = fit.symmetric_sweeps(xt, 4)
        by_block = contiguous(s.reshape(-1, 16).T)
        unit = divide(-32, fit.extreme(by_block))
        codes = clip(rint(unit * by_block), -32, 31) + 32
        codes = where(unit == 0, codes - 32, codes)
        d = inverse(unit)

        def fitted(_: Array) -> Array:
            return fit_levels
    else:
        w = _block_weights(x, xt, importance, 2)
        s, levels = fit.symmetric(xt, 4, w)
        fitted = levels.of
        by_block = contiguous(s.reshape(-1, 16).T)
        d, code_levels = fit.symmetric(by_block, 32, contiguous(fit.ordered_sum(w).reshape(-1, 16).T))
        codes = code_levels.of(by_block)
    scale = (round_half(d) * (codes - 32)).T.reshape(-1)
    levels = ungroup(_requantize(xt, scale, -4, 3, fitted)).reshape(-1, 256)
    c = ungroup(codes)
    high = c >> 4
    tops = high[:, :4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:] << 6
    scales = cat([(c[:, :8] & 15) | (c[:, 8:] & 15) << 4, tops], 1)
    return cat([_pack_masks(levels >> 2), _pack_quarters(levels & 3), scales, half_bytes(d)], 1)


def q6_k(x: Array, importance: Array | None) -> Array:
    fit, xt = searches(x), groups(x, 16)
    w = xt * xt if importance is None else column_weights(importance, len(x), 16)
    s, fitted = fit.symmetric(xt, 32, contiguous(w))
    by_block = contiguous(s.reshape(-1, 16).T)
    peak = fit.extreme(by_block)
    empty = abs(peak) < 1e-15
    unit = divide(-128, where(empty, peak * 0 + 1, peak))
    d = where(empty, peak * 0, inverse(unit))
    codes = clip(rint(unit * by_block), -128, 127)
    codes = where(empty, codes * 0, codes)
    scale = (round_half(d) * codes).T.reshape(-1)
    levels = ungroup(_requantize(xt, scale, -32, 31, fitted.of)).reshape(-1, 256)
    levels = levels * u8(~empty).reshape(-1, 1)
    q = (levels & 15).reshape(-1, 2, 2, 64)
    low = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    return cat([low, _pack_quarters(levels >> 4), contiguous(i8_bytes(codes).T), half_bytes(d)], 1)


def iq4_xs(x: Array, importance: Array | None) -> Array:
    fit, xt = searches(x), groups(x, 32)
    s = fit.nonlinear(xt, nonlinear_weights(x, xt, importance, 256))
    by_block = contiguous(s.reshape(-1, 8).T)
    d = divide(fit.extreme(by_block), -32)
    codes = clip(rint(inverse(d) * by_block), -32, 31)
    scale = (d * codes).T.reshape(-1)
    levels = ungroup(fit.nonlinear_level(xt * inverse(scale))).reshape(-1, 8, 2, 16)
    c = ungroup(codes + 32)
    high = c >> 4
    tops = [high[:, i] | high[:, i + 1] << 2 | high[:, i + 2] << 4 | high[:, i + 3] << 6 for i in (0, 4)]
    lows = (c[:, 0::2] & 15) | (c[:, 1::2] & 15) << 4
    packed = (levels[:, :, 0] | levels[:, :, 1] << 4).reshape(-1, 128)
    return cat([half_bytes(d), tops[0].reshape(-1, 1), tops[1].reshape(-1, 1), lows, packed], 1)
