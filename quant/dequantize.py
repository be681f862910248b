"""Stored bytes -> float32, for every tensor type a model file may hold.

The values are those of ggml's reference decoders bit for bit: float32 arithmetic, one rounding per operation,
in the order written here. One decoder per type works on numpy arrays and on torch tensors of any device.

Each decoder takes blocks, uint8 [n_blocks, block bytes], and returns float32 [n_blocks, block elements]. The
comment above it draws the block: byte ranges, then how an element is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.quant import layouts
from ggufspec.quant.arrays import Array, bfloat, cat, f32, half, stack, take, view

if TYPE_CHECKING:
    import torch

# The 16 values of the non-linear 4-bit types (IQ4_NL, IQ4_XS).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _nibbles(qs: Array) -> Array:
    """[n, k] bytes -> [n, 2k]: all low halves, then all high halves."""
    return cat([qs & 15, qs >> 4], 1)


def _bits(qh: Array) -> Array:
    """[n, 4] bytes -> [n, 32]: bit e of the little-endian 32-bit word."""
    n = qh.shape[0]
    return stack([(qh >> i) & 1 for i in range(8)], 2).reshape(n, 32)


def _f32(b: Array) -> Array:
    return view(b, "float32")


def _f64(b: Array) -> Array:
    return f32(view(b, "float64"))


# d:h16 | 32 x i8.  x = d q
def _q8_0(b: Array) -> Array:
    return half(b[:, :2]) * f32(view(b[:, 2:], "int8"))


# d:h16 | 16 B nibbles.  x = d (q - 8)
def _q4_0(b: Array) -> Array:
    return half(b[:, :2]) * (f32(_nibbles(b[:, 2:])) - 8)


# d:h16 | m:h16 | 16 B nibbles.  x = d q + m
def _q4_1(b: Array) -> Array:
    return half(b[:, :2]) * f32(_nibbles(b[:, 4:])) + half(b[:, 2:4])


# d:h16 | qh 4 B | 16 B nibbles.  x = d (q - 16), bit 4 of q from qh
def _q5_0(b: Array) -> Array:
    q = _nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return half(b[:, :2]) * (f32(q) - 16)


# d:h16 | m:h16 | qh 4 B | 16 B nibbles.  x = d q + m
def _q5_1(b: Array) -> Array:
    q = _nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return half(b[:, :2]) * f32(q) + half(b[:, 2:4])


# d:h16 | 16 B nibbles.  x = d T[q]
def _iq4_nl(b: Array) -> Array:
    return half(b[:, :2]) * take(IQ4_VALUES, _nibbles(b[:, 2:]))


def _quarters(qs: Array) -> Array:
    """2-bit fields of a 256-block: [n, 64] bytes -> [n, 256]; byte 32h+l holds elements 128h + 32r + l."""
    n = qs.shape[0]
    halves = qs.reshape(n, 2, 32)
    return stack([(halves >> 2 * r) & 3 for r in range(4)], 2).reshape(n, 256)


def _pairs(qs: Array) -> Array:
    """4-bit fields of a 256-block: [n, 128] bytes -> [n, 256]; byte 32c+l holds elements 64c+l, 64c+32+l."""
    n = qs.shape[0]
    chunks = qs.reshape(n, 4, 32)
    return stack([chunks & 15, chunks >> 4], 2).reshape(n, 256)


def _grouped(scale: Array, q: Array) -> Array:
    """scale [n, g] times q [n, 256], group by group."""
    n, g = scale.shape
    return (scale.reshape(n, g, 1) * q.reshape(n, g, 256 // g)).reshape(n, 256)


def _minus(x: Array, m: Array) -> Array:
    """x [n, 256] minus m [n, g], group by group."""
    n, g = m.shape
    return (x.reshape(n, g, 256 // g) - m.reshape(n, g, 1)).reshape(n, 256)


# scales 16 B | qs 64 B | d:h16 | dmin:h16.  x = (d (s & 15)) q - dmin (s >> 4), 16 groups of 16
def _q2_k(b: Array) -> Array:
    s = b[:, :16]
    x = _grouped(half(b[:, 80:82]) * f32(s & 15), f32(_quarters(b[:, 16:80])))
    return _minus(x, half(b[:, 82:84]) * f32(s >> 4))


def q3_scales(s: Array) -> Array:
    """Q3_K's 12 scale bytes [n, 12] -> 16 six-bit numbers [n, 16] (uint8, 0..63)."""
    low = cat([s[:, :8] & 15, s[:, :8] >> 4], 1)
    high = cat([(s[:, 8:] >> 2 * k) & 3 for k in range(4)], 1)
    return low | high << 4


# hmask 32 B | qs 64 B | scales 12 B | d:h16.  x = d (s - 32) q, q = two bits - 4 (0 if hmask bit)
def _q3_k(b: Array) -> Array:
    n = b.shape[0]
    high = stack([(b[:, :32] >> k) & 1 for k in range(8)], 1).reshape(n, 256)
    q = f32(_quarters(b[:, 32:96]) | high << 2) - 4
    return _grouped(half(b[:, 108:110]) * (f32(q3_scales(b[:, 96:108])) - 32), q)


def k4_scales(s: Array) -> tuple[Array, Array]:
    """The 12 scale bytes of Q4_K / Q5_K [n, 12] -> (scales, minima), six-bit numbers, each [n, 8] uint8."""
    a, m, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = cat([a & 63, (c & 15) | (a >> 6) << 4], 1)
    minima = cat([m & 63, (c >> 4) | (m >> 6) << 4], 1)
    return scales, minima


# d:h16 | dmin:h16 | scales 12 B | qs 128 B.  x = (d s) q - dmin m, 8 groups of 32
def _q4_k(b: Array) -> Array:
    scales, minima = k4_scales(b[:, 4:16])
    x = _grouped(half(b[:, :2]) * f32(scales), f32(_pairs(b[:, 16:])))
    return _minus(x, half(b[:, 2:4]) * f32(minima))


# d:h16 | dmin:h16 | scales 12 B | qh 32 B | qs 128 B.  as Q4_K, bit 4 of q from bit s of qh
def _q5_k(b: Array) -> Array:
    n = b.shape[0]
    scales, minima = k4_scales(b[:, 4:16])
    high = stack([(b[:, 16:48] >> k) & 1 for k in range(8)], 1).reshape(n, 256)
    x = _grouped(half(b[:, :2]) * f32(scales), f32(_pairs(b[:, 48:]) | high << 4))
    return _minus(x, half(b[:, 2:4]) * f32(minima))


# ql 128 B | qh 64 B | scales 16 x i8 | d:h16.  x = (d s) (q - 32), 16 groups of 16
def _q6_k(b: Array) -> Array:
    n = b.shape[0]
    ql = b[:, :128].reshape(n, 2, 64)
    low = stack([ql & 15, ql >> 4], 2).reshape(n, 256)  # element 128h + 64p + l from byte 64h + l, half p
    q = f32(low | _quarters(b[:, 128:192]) << 4) - 32
    return _grouped(half(b[:, 208:210]) * f32(view(b[:, 192:208], "int8")), q)


# d:h16 | scales_h u16 | scales_l 4 B | qs 128 B.  x = (d (s - 32)) T[q], 8 groups of 32
def _iq4_xs(b: Array) -> Array:
    n = b.shape[0]
    low = stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).reshape(n, 8)
    high = stack([(b[:, 2:4] >> 2 * k) & 3 for k in range(4)], 2).reshape(n, 8)
    qs = b[:, 8:].reshape(n, 8, 16)
    q = cat([qs & 15, qs >> 4], 2).reshape(n, 256)
    return _grouped(half(b[:, :2]) * (f32(low | high << 4) - 32), take(IQ4_VALUES, q))


DECODERS: dict[str, Callable[[Array], Array]] = {
    "F32": _f32, "F64": _f64, "F16": half, "BF16": bfloat,
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip


def _decode(raw: Array, type_name: str) -> Array:
    decoder = DECODERS.get(type_name)
    if decoder is None:
        raise UnsupportedError(f"no decoder for tensor type {type_name}; known: {', '.join(DECODERS)}")
    layout = layouts.BY_NAME[type_name]
    *lead, row_bytes = raw.shape
    if row_bytes % layout.n_bytes:
        raise FileError(
            f"a row of {row_bytes} bytes is not whole {type_name} blocks of {layout.n_bytes} bytes"
        )
    n_columns = row_bytes // layout.n_bytes * layout.n_elements
    return decoder(raw.reshape(-1, layout.n_bytes)).reshape(*lead, n_columns)


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """uint8 [..., row bytes] in file layout -> float32 [..., n_columns], on the CPU.

    Raises UnsupportedError for a type without a decoder, FileError for a row that is not whole blocks.
    """
    return _decode(raw, type_name)


def dequantize_torch(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """`dequantize` for a uint8 tensor on any device; same values, same shapes."""
    return _decode(raw, type_name)
