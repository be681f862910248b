"""The searches that find a group's scale (and minimum): float32, one rounding per operation, sums in index order.

Layout: the elements of a group run along axis 0 and the groups along axis 1, so `x` is [n, g] for g groups of n.
Every step of a search is then one vector operation over all groups, and a sum over a group adds n rows in order,
which is the order of the reference (ggml-quants.c); results are its results bit for bit.

| function | reference | used by |
|---|---|---|
| `symmetric` | make_qx_quants | Q6_K; Q3_K, Q4_0, Q5_0 with an importance matrix |
| `asymmetric` | make_qkx2_quants, make_qkx3_quants | Q2_K, Q4_K, Q5_K; Q4_1, Q5_1 with an importance matrix |
| `positive` | make_qp_quants | scales and minima of Q2_K, Q4_K, Q5_K with an importance matrix |
| `symmetric_sweeps` | make_q3_quants | Q3_K |
| `nonlinear` | quantize_row_iq4_nl_impl | IQ4_NL, IQ4_XS |

Levels are not carried through a search. It returns how they follow from x (`Levels`), and the encoders, which
compute the final levels from the rounded scales anyway, ask for them only where a rounded scale is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggufspec.quant.arrays import Array, clip, rint, where
from ggufspec.quant.dequantize import IQ4_VALUES

EPSILON = np.float32(1e-15)  # groups whose largest magnitude is below count as all zero
ROUND_BIAS = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to an integer, ties to even


def ordered_sum(a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Sum of [n, g] over axis 0 in index order -> [g]."""
    if a.shape[1] == 1:  # numpy sums one contiguous column pairwise
        total = np.add.accumulate(a, axis=0)[-1]
        if out is None:
            return total
        out[:] = total
        return out
    return np.add.reduce(a, axis=0, out=out)


def extreme(x: np.ndarray) -> np.ndarray:
    """The signed element of largest magnitude of each group, the first one on ties -> [g]."""
    high, low = x.max(axis=0), x.min(axis=0)
    value = np.where(high > -low, high, low)
    tied = np.flatnonzero((high == -low) & (high > 0))
    if len(tied):
        columns = x[:, tied]
        first = (np.abs(columns) == high[tied]).argmax(axis=0)
        value[tied] = columns[first, np.arange(len(tied))]
    return value + np.float32(0)  # zero is +0


def magnitude(x: np.ndarray) -> np.ndarray:
    """Largest |x| of each row of [n, k] -> [n]."""
    return np.maximum(x.max(axis=1), -x.min(axis=1)) + np.float32(0)


def lowest(x: np.ndarray) -> np.ndarray:
    """Smallest element of each group -> [g]. Of several zeros the first one counts: it gives the sign."""
    value = x.min(axis=0)
    zero = np.flatnonzero(value == 0)
    if len(zero):
        columns = x[:, zero]
        value[zero] = columns[(columns == 0).argmax(axis=0), np.arange(len(zero))]
    return value


def highest(x: np.ndarray) -> np.ndarray:
    """Largest element of each group -> [g]."""
    return x.max(axis=0)


def nearest_int_bits(v: np.ndarray) -> np.ndarray:
    """ggml's nearest_int including what it gives outside of +-2^22, as float32."""
    bits = (v + ROUND_BIAS).view(np.int32)
    return ((bits & 0x007FFFFF) - 0x00400000).astype(np.float32)


@dataclass
class Levels:
    """Levels of all groups: clip(rint(inverse * (x - base)), low, high); `inverse` and `base` are [g]."""

    inverse: Array
    base: Array | None
    low: int
    high: int

    def of(self, x: Array) -> Array:
        """Levels minus `low` (so they start at 0), float32, for x [n, g]; groups with inverse 0 give 0."""
        v = x if self.base is None else x - self.base
        levels = clip(rint(v * self.inverse), self.low, self.high) - self.low
        return where(self.inverse == 0, levels * 0, levels)


def symmetric(x: np.ndarray, n_max: int, w: np.ndarray) -> tuple[np.ndarray, Levels]:
    """Scale of levels -n_max..n_max-1 by 19 trial scales, each refitted by weighted least squares.

    x, w [n, g] float32 -> scale [g], levels. All-zero groups get scale 0 and levels 0.
    """
    peak = extreme(x)
    zero = np.abs(peak) < EPSILON
    peak = np.where(zero, np.float32(1), peak)
    wx, l, t = w * x, np.empty_like(x), np.empty_like(x)
    low, high = np.float32(-n_max), np.float32(n_max - 1)
    sums = np.empty((2, x.shape[1]), np.float32)

    def try_inverse(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        np.multiply(x, inverse, out=l)
        np.rint(l, out=l)
        np.clip(l, low, high, out=l)
        p = ordered_sum(np.multiply(wx, l, out=t), out=sums[0])
        np.multiply(w, l, out=t)
        return p, ordered_sum(np.multiply(t, l, out=t), out=sums[1])

    best_inverse = -np.float32(n_max) / peak
    p, s = try_inverse(best_inverse)
    scale = np.divide(p, s, out=np.zeros_like(p), where=s > 0)
    best = scale * p
    for step in (*range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(n_max) + np.float32(0.1) * np.float32(step)) / peak
        p, s = try_inverse(inverse)
        better = (s > 0) & (p * p > best * s)
        np.divide(p, s, out=scale, where=better)
        np.multiply(scale, p, out=best, where=better)
        np.copyto(best_inverse, inverse, where=better)
    scale[zero] = 0
    best_inverse[zero] = 0
    return scale, Levels(best_inverse, None, -n_max, n_max - 1)


def asymmetric(
    x: np.ndarray, n_max: int, w: np.ndarray, rmin: float, rdelta: float, n_steps: int, use_mad: bool = False
) -> tuple[np.ndarray, np.ndarray, Levels]:
    """Scale and minimum of levels 0..n_max: x ~ scale * level - minimum, minimum >= 0.

    x, w [n, g] float32 -> scale [g], minimum [g], levels. `use_mad` weighs absolute instead of squared errors.
    Each of `n_steps` + 1 trials starts from the best minimum so far, as the reference does.
    """
    n_max32 = np.float32(n_max)
    total_w, total_x = ordered_sum(w), ordered_sum(w * x)
    low = lowest(x)
    start = np.where(low > 0, np.float32(0), low)
    base = start.copy()
    top = x.max(axis=0)
    flat = top <= base
    top = np.where(flat, base + np.float32(1), top)  # keeps the arithmetic finite; the result is not used
    l, t, u = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    sum_l, sum_l2, sum_xl, error = np.empty((4, x.shape[1]), np.float32)

    def quantize(inverse: np.ndarray) -> None:
        np.subtract(x, base, out=l)
        np.multiply(l, inverse, out=l)
        np.rint(l, out=l)
        np.clip(l, np.float32(0), n_max32, out=l)

    def error_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        np.multiply(l, a, out=t)
        np.add(t, b, out=t)
        np.subtract(t, x, out=t)
        if use_mad:
            np.abs(t, out=t)
        else:
            np.multiply(t, t, out=t)
        return ordered_sum(np.multiply(w, t, out=t), out=error)

    best_inverse = n_max32 / (top - base)
    best_base = base.copy()
    scale = np.float32(1) / best_inverse
    quantize(best_inverse)
    best = error_of(scale, base).copy()
    for step in range(n_steps + 1):
        factor = np.float32(rmin) + np.float32(rdelta) * np.float32(step) + n_max32
        inverse = factor / (top - base)
        quantize(inverse)
        ordered_sum(np.multiply(w, l, out=t), out=sum_l)
        ordered_sum(np.multiply(t, l, out=u), out=sum_l2)
        ordered_sum(np.multiply(t, x, out=t), out=sum_xl)
        determinant = total_w * sum_l2 - sum_l * sum_l
        a = (total_w * sum_xl - total_x * sum_l) / determinant
        b = (sum_l2 * total_x - sum_l * sum_xl) / determinant
        above = b > 0
        np.divide(sum_xl, sum_l2, out=a, where=above)
        b[above] = 0
        better = (determinant > 0) & (error_of(a, b) < best)
        np.copyto(best, error, where=better)
        np.copyto(scale, a, where=better)
        np.copyto(best_inverse, inverse, where=better)
        np.copyto(best_base, base, where=better)
        np.copyto(base, b, where=better)
    minimum = -np.where(flat, start, base)
    scale[flat] = 0
    best_inverse[flat] = 0
    return scale, minimum, Levels(best_inverse, best_base, 0, n_max)


def positive(x: np.ndarray, n_max: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and levels 0..n_max of non-negative x: nine trial scales, then up to five coordinate sweeps.

    x, w [n, g] float32 -> scale [g], levels [n, g] float32.
    """
    n_max32 = np.float32(n_max)
    peak = np.maximum(x.max(axis=0), np.float32(0))
    zero = peak < EPSILON
    peak = np.where(zero, np.float32(1), peak)
    inverse = n_max32 / peak
    best = _error(x, np.rint(inverse * x), np.float32(1) / inverse, w)
    for step in (*range(-4, 0), *range(1, 5)):
        trial = (np.float32(0.1) * np.float32(step) + n_max32) / peak
        error = _error(x, np.minimum(np.rint(trial * x), n_max32), np.float32(1) / trial, w)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(inverse, trial, where=better)
    l = np.minimum(np.rint(inverse * x), n_max32)
    wx = w * x
    p, s = ordered_sum(wx * l), ordered_sum(w * l * l)
    _sweep(x, w, wx, l, p, s, None, n_max32)
    scale = np.divide(p, s, out=np.zeros_like(p), where=s > 0)
    scale[zero] = 0
    l[:, zero] = 0
    return scale, l


def _error(x: np.ndarray, l: np.ndarray, scale: np.ndarray, w: np.ndarray) -> np.ndarray:
    d = x - scale * l
    return ordered_sum(w * d * d)


def _sweep(
    x: np.ndarray, w: np.ndarray, wx: np.ndarray, l: np.ndarray, p: np.ndarray, s: np.ndarray,
    low: np.float32 | None, high: np.float32,
) -> None:  # fmt: skip
    """Up to five sweeps that move one level at a time where that raises p^2 / s; l, p and s change in place.

    A group that a sweep leaves unchanged is finished, so later sweeps look only at the others. `low` None means
    non-negative levels, for which the reference also wants the rest of s to be positive.
    """
    active = np.arange(x.shape[1])
    for _ in range(5):
        xa, wa, wxa, la, pa, sa = (a[..., active] for a in (x, w, wx, l, p, s))
        changed = np.zeros(len(active), bool)
        for i in range(x.shape[0]):
            li = la[i]
            q, r = pa - wxa[i] * li, sa - wa[i] * li * li
            usable = q > 0 if low is not None else (q > 0) & (r > 0)
            new = np.minimum(nearest_int_bits(xa[i] * r / q), high)
            if low is not None:
                new = np.maximum(new, low)
            q = q + wxa[i] * new
            r = r + wa[i] * new * new
            move = usable & (new != li) & (q * q * sa > pa * pa * r)
            if low is not None:
                move &= r > 0
            np.copyto(li, new, where=move)
            np.copyto(pa, q, where=move)
            np.copyto(sa, r, where=move)
            changed |= move
        l[:, active], p[active], s[active] = la, pa, sa
        active = active[changed]
        if not len(active):
            return


def symmetric_sweeps(x: np.ndarray, n_max: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and levels of x with weights x^2: one trial scale, then up to five coordinate sweeps.

    x [n, g] float32 -> scale [g], levels + n_max [n, g] float32 (0 in groups that are all zero).
    """
    peak = extreme(x)
    zero = np.abs(peak) < EPSILON
    low, high = np.float32(-n_max), np.float32(n_max - 1)
    inverse = low / np.where(zero, np.float32(1), peak)
    l = np.clip(np.rint(x * inverse), low, high)
    w = x * x
    wx = w * x
    p, s = ordered_sum(wx * l), ordered_sum(w * l * l)
    _sweep(x, w, wx, l, p, s, low, high)
    scale = np.divide(p, s, out=np.zeros_like(p), where=s > 0)
    scale[zero] = 0
    l += np.float32(n_max)
    l[:, zero] = 0
    return scale, l


def _nonlinear_tables() -> tuple[np.ndarray, np.ndarray]:
    """Level and value by floor(2 v) + 254 for v in -127..113. Boundaries between levels are multiples of 1/2,
    so the floor loses nothing; a v midway between two values takes the upper one, as the reference does.
    """
    values = np.array(IQ4_VALUES)
    half_steps = np.arange(2 * values[0], 2 * values[-1] + 1)
    levels = np.searchsorted(values[:-1] + values[1:], half_steps, side="right")
    return levels.astype(np.uint8), values[levels].astype(np.float32)


NONLINEAR_LEVEL, NONLINEAR_VALUE = _nonlinear_tables()


def nonlinear_index(v: np.ndarray) -> np.ndarray:
    """Index into the two tables above for every v, a new intp array."""
    t = np.clip(v, np.float32(-127), np.float32(113))
    return np.floor(t * np.float32(2)).astype(np.intp) + 254


def nonlinear_level(v: np.ndarray) -> np.ndarray:
    """The level whose value is nearest to each v -> uint8."""
    return NONLINEAR_LEVEL.take(nonlinear_index(v))


def nonlinear(x: np.ndarray, w: np.ndarray, n_tries: int = 7) -> np.ndarray:
    """Scale for the 16 non-linear levels: 2 n_tries + 2 trial scales, refitted by weighted least squares.

    x, w [n, g] float32 -> scale [g]; 0 for groups that are all zero.
    """
    peak = extreme(x)
    zero = np.abs(peak) < EPSILON
    peak = np.where(zero, np.float32(1), peak)
    first = np.float32(IQ4_VALUES[0])

    def fit(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = NONLINEAR_VALUE.take(nonlinear_index(x * inverse))
        wq = w * q
        return ordered_sum(wq * x), ordered_sum(wq * q)

    p, s = fit(np.float32(1) / (-peak / first))
    scale = p / s
    best = scale * p
    for step in range(-n_tries, n_tries + 1):
        p, s = fit((np.float32(step) + first) / peak)
        better = (s > 0) & (p * p > best * s)
        np.divide(p, s, out=scale, where=better)
        np.multiply(scale, p, out=best, where=better)
    scale[zero] = 0
    return scale
