"""The scale searches of `search` for CUDA tensors: same names, same arguments, the same bits.

One lane searches one group: it walks along axis 0 of x [n, g] in order, as the reference does. Products and sums
are never fused (`enable_fp_fusion=False`) and divisions are correctly rounded, so each operation rounds once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.quant import search
from ggufspec.quant.search import Levels

BLOCK = 128
_BIAS = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even
_EPSILON = tl.constexpr(float(search.EPSILON))


@triton.jit
def _rint(v):
    return (v + _BIAS) - _BIAS


@triton.jit
def _nearest_int_bits(v):
    bits = (v + _BIAS).to(tl.int32, bitcast=True)
    return ((bits & 0x007FFFFF) - 0x00400000).to(tl.float32)


@triton.jit
def _peak(x, g, inside, G, N: tl.constexpr):
    """Signed element of largest magnitude, the first one on ties."""
    peak = tl.zeros_like(tl.load(x + g, mask=inside, other=0.0))
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        peak = tl.where(tl.abs(v) > tl.abs(peak), v, peak)
    return peak


@triton.jit
def _sum_kernel(a, out, G, N: tl.constexpr, SIZE: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(a + g, mask=g < G, other=0.0)
    for i in range(1, N):
        total += tl.load(a + i * G + g, mask=g < G, other=0.0)
    tl.store(out + g, total, mask=g < G)


@triton.jit
def _symmetric_fit(x, w, g, inside, G, inverse, N: tl.constexpr, N_MAX: tl.constexpr):
    p = tl.zeros_like(inverse)
    s = tl.zeros_like(inverse)
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        l = tl.minimum(tl.maximum(_rint(v * inverse), -N_MAX), N_MAX - 1)
        p += (q * v) * l
        s += (q * l) * l
    return p, s


@triton.jit
def _symmetric_kernel(
    x, w, factors, scale_out, inverse_out, G, K: tl.constexpr, N: tl.constexpr, N_MAX: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = g < G
    peak = _peak(x, g, inside, G, N)
    zero = tl.abs(peak) < _EPSILON
    peak = tl.where(zero, 1.0, peak)
    inverse = tl.div_rn(tl.zeros_like(peak) - N_MAX, peak)
    p, s = _symmetric_fit(x, w, g, inside, G, inverse, N, N_MAX)
    scale = tl.where(s > 0, tl.div_rn(p, tl.where(s > 0, s, 1.0)), 0.0)
    best = scale * p
    for k in range(K):
        trial = tl.div_rn(tl.zeros_like(peak) - tl.load(factors + k), peak)
        p, s = _symmetric_fit(x, w, g, inside, G, trial, N, N_MAX)
        better = (s > 0) & (p * p > best * s)
        fitted = tl.div_rn(p, tl.where(s > 0, s, 1.0))
        scale = tl.where(better, fitted, scale)
        best = tl.where(better, fitted * p, best)
        inverse = tl.where(better, trial, inverse)
    tl.store(scale_out + g, tl.where(zero, 0.0, scale), mask=inside)
    tl.store(inverse_out + g, tl.where(zero, 0.0, inverse), mask=inside)


@triton.jit
def _error(x, w, g, inside, G, inverse, base, a, b, N: tl.constexpr, N_MAX: tl.constexpr, USE_MAD: tl.constexpr):
    error = tl.zeros_like(inverse)
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        l = tl.minimum(tl.maximum(_rint((v - base) * inverse), 0.0), N_MAX)
        d = (l * a + b) - v
        d = tl.abs(d) if USE_MAD else d * d
        error += q * d
    return error


@triton.jit
def _asymmetric_kernel(
    x, w, factors, scale_out, minimum_out, inverse_out, base_out, G,
    K: tl.constexpr, N: tl.constexpr, N_MAX: tl.constexpr, USE_MAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = g < G
    low = tl.load(x + g, mask=inside, other=0.0)
    top = low
    total_w = tl.load(w + g, mask=inside, other=0.0)
    total_x = total_w * low
    for i in range(1, N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        low = tl.where(v < low, v, low)
        top = tl.where(v > top, v, top)
        total_w += q
        total_x += q * v
    low = tl.where(low > 0, 0.0, low)
    flat = top <= low
    top = tl.where(flat, low + 1.0, top)
    base = low
    inverse = tl.div_rn(tl.zeros_like(low) + N_MAX, top - base)
    scale = tl.div_rn(tl.zeros_like(low) + 1.0, inverse)
    best_base = base
    best = _error(x, w, g, inside, G, inverse, base, scale, base, N, N_MAX, USE_MAD)
    for k in range(K):
        trial = tl.div_rn(tl.zeros_like(low) + tl.load(factors + k), top - base)
        sum_l = tl.zeros_like(low)
        sum_l2 = tl.zeros_like(low)
        sum_xl = tl.zeros_like(low)
        for i in range(N):
            v = tl.load(x + i * G + g, mask=inside, other=0.0)
            q = tl.load(w + i * G + g, mask=inside, other=0.0)
            l = tl.minimum(tl.maximum(_rint((v - base) * trial), 0.0), N_MAX)
            ql = q * l
            sum_l += ql
            sum_l2 += ql * l
            sum_xl += ql * v
        determinant = total_w * sum_l2 - sum_l * sum_l
        usable = determinant > 0
        divisor = tl.where(usable, determinant, 1.0)
        a = tl.div_rn(total_w * sum_xl - total_x * sum_l, divisor)
        b = tl.div_rn(sum_l2 * total_x - sum_l * sum_xl, divisor)
        above = b > 0
        a = tl.where(above, tl.div_rn(sum_xl, tl.where(above, sum_l2, 1.0)), a)
        b = tl.where(above, 0.0, b)
        error = _error(x, w, g, inside, G, trial, base, a, b, N, N_MAX, USE_MAD)
        better = usable & (error < best)
        best = tl.where(better, error, best)
        scale = tl.where(better, a, scale)
        inverse = tl.where(better, trial, inverse)
        best_base = tl.where(better, base, best_base)
        base = tl.where(better, b, base)
    tl.store(scale_out + g, tl.where(flat, 0.0, scale), mask=inside)
    tl.store(minimum_out + g, tl.where(flat, low, base) * -1.0, mask=inside)  # keeps the sign of zero
    tl.store(inverse_out + g, tl.where(flat, 0.0, inverse), mask=inside)
    tl.store(base_out + g, best_base, mask=inside)


@triton.jit
def _sweeps(x, w, g, inside, G, packed, p, s, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr,
            N: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Five sweeps over levels packed into one 64-bit word a group, `BITS` each, counted from LOW."""
    for _ in range(5):
        for i in range(N):
            v = tl.load(x + i * G + g, mask=inside, other=0.0)
            q = tl.load(w + i * G + g, mask=inside, other=0.0)
            old = ((packed >> (i * BITS)) & ((1 << BITS) - 1)).to(tl.int32)
            l = old.to(tl.float32) + LOW
            qv = q * v
            a = p - qv * l
            b = s - (q * l) * l
            usable = a > 0
            if not SIGNED:
                usable = usable & (b > 0)
            new = tl.minimum(_nearest_int_bits(tl.div_rn(v * b, tl.where(usable, a, 1.0))), HIGH)
            if SIGNED:
                new = tl.maximum(new, LOW)
            a = a + qv * new
            b = b + (q * new) * new
            move = usable & (new != l) & ((a * a) * s > (p * p) * b)
            if SIGNED:
                move = move & (b > 0)
            change = (new - LOW).to(tl.int64) - old.to(tl.int64)
            packed = tl.where(move, packed + (change << (i * BITS)), packed)
            p = tl.where(move, a, p)
            s = tl.where(move, b, s)
    return packed, p, s


@triton.jit
def _store_levels(levels, packed, zero, g, inside, G, N: tl.constexpr, BITS: tl.constexpr):
    for i in range(N):
        l = ((packed >> (i * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        tl.store(levels + i * G + g, tl.where(zero, 0.0, l), mask=inside)


@triton.jit
def _positive_kernel(
    x, w, factors, scale_out, levels, G,
    K: tl.constexpr, N: tl.constexpr, N_MAX: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = g < G
    peak = tl.zeros_like(tl.load(x + g, mask=inside, other=0.0))
    for i in range(N):
        peak = tl.maximum(peak, tl.load(x + i * G + g, mask=inside, other=0.0))
    zero = peak < _EPSILON
    peak = tl.where(zero, 1.0, peak)
    inverse = tl.div_rn(tl.zeros_like(peak) + N_MAX, peak)
    best = tl.zeros_like(peak)
    for k in range(K):  # the first factor is N_MAX itself
        trial = tl.div_rn(tl.zeros_like(peak) + tl.load(factors + k), peak)
        step = tl.div_rn(tl.zeros_like(peak) + 1.0, trial)
        error = tl.zeros_like(peak)
        for i in range(N):
            v = tl.load(x + i * G + g, mask=inside, other=0.0)
            q = tl.load(w + i * G + g, mask=inside, other=0.0)
            l = _rint(trial * v)
            l = tl.where(k == 0, l, tl.minimum(l, N_MAX))
            d = v - step * l
            error += (q * d) * d
        better = (k == 0) | (error < best)
        best = tl.where(better, error, best)
        inverse = tl.where(better, trial, inverse)
    p = tl.zeros_like(peak)
    s = tl.zeros_like(peak)
    packed = tl.zeros_like(peak).to(tl.int64)
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        l = tl.minimum(_rint(inverse * v), N_MAX)
        packed = packed | (l.to(tl.int64) << (i * BITS))
        p += (q * v) * l
        s += (q * l) * l
    packed, p, s = _sweeps(x, w, g, inside, G, packed, p, s, 0.0, N_MAX, False, N, BITS)
    scale = tl.where((s > 0) & (zero == 0), tl.div_rn(p, tl.where(s > 0, s, 1.0)), 0.0)
    tl.store(scale_out + g, scale, mask=inside)
    _store_levels(levels, packed, zero, g, inside, G, N, BITS)


@triton.jit
def _symmetric_sweeps_kernel(
    x, w, scale_out, levels, G, N: tl.constexpr, N_MAX: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr
):
    g = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = g < G
    peak = _peak(x, g, inside, G, N)
    zero = tl.abs(peak) < _EPSILON
    inverse = tl.div_rn(tl.zeros_like(peak) - N_MAX, tl.where(zero, 1.0, peak))
    p = tl.zeros_like(peak)
    s = tl.zeros_like(peak)
    packed = tl.zeros_like(peak).to(tl.int64)
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        l = tl.minimum(tl.maximum(_rint(v * inverse), -N_MAX), N_MAX - 1)
        packed = packed | ((l + N_MAX).to(tl.int64) << (i * BITS))
        p += (q * v) * l
        s += (q * l) * l
    packed, p, s = _sweeps(x, w, g, inside, G, packed, p, s, -N_MAX, N_MAX - 1, True, N, BITS)
    scale = tl.where((s > 0) & (zero == 0), tl.div_rn(p, tl.where(s > 0, s, 1.0)), 0.0)
    tl.store(scale_out + g, scale, mask=inside)
    _store_levels(levels, packed, zero, g, inside, G, N, BITS)


@triton.jit
def _nonlinear_fit(x, w, values, g, inside, G, inverse, N: tl.constexpr):
    p = tl.zeros_like(inverse)
    s = tl.zeros_like(inverse)
    for i in range(N):
        v = tl.load(x + i * G + g, mask=inside, other=0.0)
        q = tl.load(w + i * G + g, mask=inside, other=0.0)
        t = tl.minimum(tl.maximum(v * inverse, -127.0), 113.0)
        value = tl.load(values + tl.floor(t * 2.0).to(tl.int32) + 254)
        qv = q * value
        p += qv * v
        s += qv * value
    return p, s


@triton.jit
def _nonlinear_kernel(
    x, w, values, out, G, FIRST: tl.constexpr, TRIES: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr
):
    g = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = g < G
    peak = _peak(x, g, inside, G, N)
    zero = tl.abs(peak) < _EPSILON
    peak = tl.where(zero, 1.0, peak)
    one = tl.zeros_like(peak) + 1.0
    p, s = _nonlinear_fit(x, w, values, g, inside, G, tl.div_rn(one, tl.div_rn(-peak, one * FIRST)), N)
    scale = tl.div_rn(p, s)
    best = scale * p
    for k in range(2 * TRIES + 1):
        p, s = _nonlinear_fit(x, w, values, g, inside, G, tl.div_rn(one * (k - TRIES + FIRST), peak), N)
        better = (s > 0) & (p * p > best * s)
        fitted = tl.div_rn(p, tl.where(s > 0, s, 1.0))
        scale = tl.where(better, fitted, scale)
        best = tl.where(better, fitted * p, best)
    tl.store(out + g, tl.where(zero, 0.0, scale), mask=inside)


def _launch(kernel: Any, n_groups: int, *arguments: Any, **constants: Any) -> None:
    grid = (triton.cdiv(n_groups, BLOCK),)
    kernel[grid](*arguments, **constants, SIZE=BLOCK, num_warps=BLOCK // 32, enable_fp_fusion=False)


@cache
def _factors(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _like(x: Tensor, n: int) -> list[Tensor]:
    return [torch.empty(x.shape[1], dtype=torch.float32, device=x.device) for _ in range(n)]


def ordered_sum(a: Tensor) -> Tensor:
    (out,) = _like(a, 1)
    _launch(_sum_kernel, a.shape[1], a.contiguous(), out, a.shape[1], N=a.shape[0])
    return out


def extreme(x: Tensor) -> Tensor:
    peak = torch.zeros_like(x[0])
    for row in x:
        peak = torch.where(row.abs() > peak.abs(), row, peak)
    return peak


def magnitude(x: Tensor) -> Tensor:
    return x.abs().amax(1)


def lowest(x: Tensor) -> Tensor:
    value = x[0]
    for row in x[1:]:
        value = torch.where(row < value, row, value)
    return value


def highest(x: Tensor) -> Tensor:
    return x.amax(0)


def symmetric(x: Tensor, n_max: int, w: Tensor) -> tuple[Tensor, Levels]:
    steps = (*range(-9, 0), *range(1, 10))
    factors = _factors(tuple(float(np.float32(n_max) + np.float32(0.1) * np.float32(k)) for k in steps), x.device)
    scale, inverse = _like(x, 2)
    _launch(
        _symmetric_kernel, x.shape[1], x, w.contiguous(), factors, scale, inverse, x.shape[1],
        K=len(factors), N=x.shape[0], N_MAX=float(n_max),
    )  # fmt: skip
    return scale, Levels(inverse, None, -n_max, n_max - 1)


def asymmetric(
    x: Tensor, n_max: int, w: Tensor, rmin: float, rdelta: float, n_steps: int, use_mad: bool = False
) -> tuple[Tensor, Tensor, Levels]:
    values = (np.float32(rmin) + np.float32(rdelta) * np.float32(k) + np.float32(n_max) for k in range(n_steps + 1))
    factors = _factors(tuple(map(float, values)), x.device)
    scale, minimum, inverse, base = _like(x, 4)
    _launch(
        _asymmetric_kernel, x.shape[1], x, w.contiguous(), factors, scale, minimum, inverse, base, x.shape[1],
        K=len(factors), N=x.shape[0], N_MAX=float(n_max), USE_MAD=use_mad,
    )  # fmt: skip
    return scale, minimum, Levels(inverse, base, 0, n_max)


def positive(x: Tensor, n_max: int, w: Tensor) -> tuple[Tensor, Tensor]:
    steps = (0, *range(-4, 0), *range(1, 5))
    factors = _factors(tuple(float(np.float32(0.1) * np.float32(k) + np.float32(n_max)) for k in steps), x.device)
    (scale,), levels = _like(x, 1), torch.empty_like(x)
    _launch(
        _positive_kernel, x.shape[1], x, w.contiguous(), factors, scale, levels, x.shape[1],
        K=len(factors), N=x.shape[0], N_MAX=float(n_max), BITS=64 // x.shape[0],
    )  # fmt: skip
    return scale, levels


def symmetric_sweeps(x: Tensor, n_max: int) -> tuple[Tensor, Tensor]:
    (scale,), levels = _like(x, 1), torch.empty_like(x)
    _launch(
        _symmetric_sweeps_kernel, x.shape[1], x, x * x, scale, levels, x.shape[1],
        N=x.shape[0], N_MAX=float(n_max), BITS=64 // x.shape[0],
    )  # fmt: skip
    return scale, levels


def nonlinear(x: Tensor, w: Tensor, n_tries: int = 7) -> Tensor:
    values = _factors(tuple(search.NONLINEAR_VALUE.tolist()), x.device)
    (scale,) = _like(x, 1)
    _launch(
        _nonlinear_kernel, x.shape[1], x, w.contiguous(), values, scale, x.shape[1],
        FIRST=float(search.IQ4_VALUES[0]), TRIES=n_tries, N=x.shape[0],
    )  # fmt: skip
    return scale


def nonlinear_level(v: Tensor) -> Tensor:
    table = _factors(tuple(search.NONLINEAR_LEVEL.tolist()), v.device)
    return table[(v.clamp(-127, 113) * 2).floor().long() + 254]
