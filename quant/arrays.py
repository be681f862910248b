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
