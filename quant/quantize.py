"""float32 -> stored bytes, for every type the quantizer writes. The inverse of `dequantize`.

    raw = quantize(x, "Q4_K")                      # x float32 [..., n_columns] -> uint8 [..., row bytes]
    raw = quantize(x, "Q4_K", imatrix=importance)  # importance float32 [n_columns]

The bytes equal ggml's reference quantizers (ggml-quants.c), with and without importance. On the CPU the work is
numpy, a chunk of rows at a time; `quantize_torch` on a CUDA tensor runs the same encoders on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.quant import encode_32, encode_256, layouts
from ggufspec.quant.arrays import Array, half_bytes, is_torch

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 18  # 1 MB an array: small enough for a core's caches, large enough to hide the calls
CUDA_CHUNK_ELEMENTS = 1 << 26


def _f32(x: Array, importance: Array | None) -> Array:
    if is_torch(x):
        import torch

        return x.reshape(-1, 1).view(torch.uint8)
    return np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1, 4)


def _f16(x: Array, importance: Array | None) -> Array:
    return half_bytes(x.reshape(-1))


def _bf16(x: Array, importance: Array | None) -> Array:
    """Upper halves of float32, rounded to nearest even. (NaN never gets here.)"""
    if is_torch(x):
        import torch

        return x.reshape(-1, 1).bfloat16().view(torch.uint8)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").view(np.uint8).reshape(-1, 2)


Encoder = Callable[[Array, "Array | None"], Array]
ENCODERS: dict[str, Encoder] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16,
    "Q8_0": encode_32.q8_0, "Q4_0": encode_32.q4_0, "Q4_1": encode_32.q4_1, "Q5_0": encode_32.q5_0,
    "Q5_1": encode_32.q5_1, "IQ4_NL": encode_32.iq4_nl,
    "Q2_K": encode_256.q2_k, "Q3_K": encode_256.q3_k, "Q4_K": encode_256.q4_k, "Q5_K": encode_256.q5_k,
    "Q6_K": encode_256.q6_k, "IQ4_XS": encode_256.iq4_xs,
}  # fmt: skip


def _checked(x: Array, type_name: str, imatrix: Array | None) -> layouts.Layout:
    if type_name not in ENCODERS:
        raise UnsupportedError(f"no encoder for tensor type {type_name}; known: {', '.join(ENCODERS)}")
    layout, n_columns = layouts.BY_NAME[type_name], x.shape[-1]
    if n_columns % layout.n_elements:
        raise ConfigError(
            f"rows of {n_columns} elements, expected a multiple of {layout.n_elements} for {type_name}"
        )
    if imatrix is not None and tuple(imatrix.shape) != (n_columns,):
        raise ConfigError(f"importance of shape {tuple(imatrix.shape)}, expected ({n_columns},), one a column")
    return layout


def quantize(x: np.ndarray, type_name: str, imatrix: np.ndarray | None = None) -> np.ndarray:
    """float32 [..., n_columns] -> uint8 [..., row bytes] in file layout.

    `imatrix` [n_columns] float32 weighs the columns; types without such a variant (plain types, Q8_0) ignore it.
    All values must be finite. Raises UnsupportedError for an unknown type, ConfigError for shapes that do not fit.
    """
    layout = _checked(x, type_name, imatrix)
    *lead, n_columns = x.shape
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, n_columns)
    importance = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
    out = np.empty((len(rows), layout.row_bytes(n_columns)), np.uint8)
    step = max(1, CHUNK_ELEMENTS // n_columns)
    with np.errstate(all="ignore"):
        for i in range(0, len(rows), step):
            chunk = ENCODERS[type_name](rows[i : i + step], importance)
            out[i : i + step] = chunk.reshape(-1, out.shape[1])
    return out.reshape(*lead, out.shape[1])


def quantize_torch(x: torch.Tensor, type_name: str, imatrix: torch.Tensor | None = None) -> torch.Tensor:
    """`quantize` for a floating-point tensor on any device; same bytes, on the tensor's device."""
    import torch

    layout = _checked(x, type_name, imatrix)
    if x.device.type == "cpu":
        importance = None if imatrix is None else imatrix.numpy()
        return torch.from_numpy(quantize(x.detach().float().numpy(), type_name, importance))
    *lead, n_columns = x.shape
    rows = x.detach().float().reshape(-1, n_columns).contiguous()
    out = torch.empty((len(rows), layout.row_bytes(n_columns)), dtype=torch.uint8, device=x.device)
    step = max(1, CUDA_CHUNK_ELEMENTS // n_columns)
    for i in range(0, len(rows), step):
        out[i : i + step] = ENCODERS[type_name](rows[i : i + step], imatrix).reshape(-1, out.shape[1])
    return out.reshape(*lead, out.shape[1])
