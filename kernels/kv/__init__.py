"""The KV cache of one attention layer: packed rows in the type asked for. Vectors are rotated (Hadamard) and
quantized in `store` and nowhere else.

    kv = allocate("q8_0", "f16", n_slots, n_cells, n_kv, hd_k, hd_v, device)
    store(kv, k, v, slots, positions)          # k, v [B, W, n_kv, hd]
    k, v = load(kv, slot, n)                   # the oracle: float32 [n, n_kv, hd]
"""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.kv import plain
from ggufspec.kernels.kv.blocks import TYPES
from ggufspec.kernels.kv.storage import CELL_CHUNK, KV, allocate, cells_for, copy, fits, restore, save
from ggufspec.kernels.rope import RopeSpec

__all__ = [
    "CELL_CHUNK", "KV", "TYPES", "allocate", "cells_for", "copy", "fits", "load", "norm_rope_store", "restore", "save",
    "store", "store_raw",
]  # fmt: skip


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.kv import triton

        return triton
    return plain


def store(kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write k, v [B, W, n_kv, hd] of slots [B] at positions [B, W] (int64); rows with position < 0 are
    dropped."""
    room(k).store(kv, k, v, slots, positions)


def norm_rope_store(
    kv: KV, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor, float] | None, rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> Tensor:  # fmt: skip
    """All that stands between the projections and attention, in one launch.

    q [B, W, H, hd] (any strides of rows and heads), k, v [B, W, n_kv, ..] raw projections. norms: per-head RMS
    weights of q and k and eps, or None; rope: (cos, sin, spec) of these rows, or None. Stores k and v as `store`
    does and returns the new q, Hadamard-rotated where the cache is: pass it on as attend(.., q_rotated=True).
    """
    return room(k).norm_rope_store(kv, q, k, v, slots, positions, norms, rope)


def store_raw(
    kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> None:  # fmt: skip
    """`norm_rope_store` without queries: raw projections k, v [B, W, n_kv, ..]; norm: weight of k and eps, or None."""
    room(k).store_raw(kv, k, v, slots, positions, norm, rope)


def load(kv: KV, slot: int, n: int) -> tuple[Tensor, Tensor]:
    """Positions 0..n of a slot as float32 [n, n_kv, hd] each, rotated back. Slow; for tests and tools."""
    return plain.load(kv, slot, n)
