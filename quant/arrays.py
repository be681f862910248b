"""The few array operations whose spelling differs between numpy and torch, so that one decoder serves both.

Every function takes numpy arrays or torch tensors (any device) and returns the same kind.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


def is_torch(a: Array) -> bool:
    """True for a torch tensor; does not import torch when nobody else has."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, torch.Tensor)


def f32(a: Array) -> Array:
    """Convert numbers of any type to float32."""
    return a.float() if is_torch(a) else a.astype(np.float32)


def view(a: Array, dtype: str) -> Array:
    """Reinterpret the bytes of the last dimension as `dtype` ("float16", "int8"...), little-endian."""
    if is_torch(a):
        import torch

        return a.contiguous().view(getattr(torch, dtype))
    return np.ascontiguousarray(a).view(np.dtype(dtype).newbyteorder("<"))


def half(a: Array) -> Array:
    """Bytes [..., 2k] holding k half-precision numbers -> float32 [..., k]."""
    return f32(view(a, "float16"))


def bfloat(a: Array) -> Array:
    """Bytes [..., 2k] holding k bfloat16 numbers -> float32 [..., k]."""
    if is_torch(a):
        return f32(view(a, "bfloat16"))
    return (view(a, "uint16").astype(np.uint32) << 16).view(np.float32)


def cat(parts: list[Array], axis: int) -> Array:
    if is_torch(parts[0]):
        import torch

        return torch.cat(parts, axis)
    return np.concatenate(parts, axis)


def stack(parts: list[Array], axis: int) -> Array:
    if is_torch(parts[0]):
        import torch

        return torch.stack(parts, axis)
    return np.stack(parts, axis)


def take(table: tuple[int, ...], index: Array) -> Array:
    """Look every element of the integer array `index` up in `table` -> float32, same shape."""
    if is_torch(index):
        import torch

        return torch.tensor(table, dtype=torch.float32, device=index.device)[index.long()]
    return np.array(table, dtype=np.float32)[index]


def u8(a: Array) -> Array:
    """Whole numbers 0..255 of any type -> uint8."""
    if is_torch(a):
        import torch

        return a.to(torch.uint8)
    return a.astype(np.uint8)


def i8_bytes(a: Array) -> Array:
    """Whole numbers -128..127 -> their bytes, uint8 of the same shape."""
    if is_torch(a):
        import torch

        return a.to(torch.int8).view(torch.uint8)
    return a.astype(np.int8).view(np.uint8)


def half_bytes(a: Array) -> Array:
    """float32 [n] -> the bytes of the nearest halves (ties to even), uint8 [n, 2]."""
    if is_torch(a):
        import torch

        return a.to(torch.float16).view(torch.uint8).reshape(-1, 2)
    return a.astype("<f2").view(np.uint8).reshape(-1, 2)


def round_half(a: Array) -> Array:
    """float32 rounded to half precision and back."""
    if is_torch(a):
        return a.half().float()
    return a.astype(np.float16).astype(np.float32)


def rint(a: Array) -> Array:
    """Nearest integer, ties to even, same type."""
    return a.round() if is_torch(a) else np.rint(a)


def sqrt(a: Array) -> Array:
    """Correctly rounded square root (torch's own on the CPU is not)."""
    if is_torch(a):
        import torch

        return torch.from_numpy(np.sqrt(a.numpy())) if a.device.type == "cpu" else a.sqrt()
    return np.sqrt(a)


def trunc(a: Array) -> Array:
    return a.trunc() if is_torch(a) else np.trunc(a)


def round_away(a: Array) -> Array:
    """Nearest integer, ties away from zero: adds the number just below 1/2 with the sign of `a`, then truncates."""
    below = float(np.float32(0.49999997))
    if is_torch(a):
        import torch

        return (a + torch.full_like(a, below).copysign(a)).trunc()
    return np.trunc(a + np.copysign(np.float32(below), a))


def clip(a: Array, low: float, high: float) -> Array:
    return a.clamp(low, high) if is_torch(a) else np.clip(a, np.float32(low), np.float32(high))


def where(condition: Array, a: Array, b: Array | float) -> Array:
    if is_torch(a):
        import torch

        return torch.where(condition, a, b)
    return np.where(condition, a, np.float32(b) if isinstance(b, int | float) else b)


def divide(a: Array | float, b: Array | float) -> Array:
    """a / b, correctly rounded, for an array and a number or two arrays; 0 where an array b is 0.

    (torch multiplies by the reciprocal when one side is a Python number.)
    """
    array: Array = a if isinstance(b, int | float) else b
    if is_torch(array):
        import torch

        a, b = (torch.as_tensor(v, dtype=torch.float32, device=array.device) for v in (a, b))
        return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
    if isinstance(b, int | float):
        return array / np.float32(b)
    return np.divide(np.float32(a) if isinstance(a, int | float) else a, b, out=np.zeros_like(b), where=b != 0)


def inverse(a: Array) -> Array:
    """1 / a, and 0 where a is 0."""
    return divide(1, a)


def contiguous(a: Array) -> Array:
    return a.contiguous() if is_torch(a) else np.ascontiguousarray(a)


def tile_columns(a: Array, n: int) -> Array:
    """[k, c] repeated n times along axis 1 -> [k, n c]."""
    return a.repeat(1, n) if is_torch(a) else np.tile(a, (1, n))
