"""The KV cache of one attention layer: packed rows in the type asked for. Vectors are rotated (Hadamard) and
quantized in `store` and nowhere else.

    kv = allocate("q8_0", "f16", n_slots, n_cells, n_kv, hd_k, hd_v, device)
    store(kv, k, v, slots, positions)          # k, v [B, W, n_kv, hd]
    k, v = load(kv, slot, n)                   # the oracle: float32 [n, n_kv, hd]
"""

from torch import Tensor

from ggufspec.kernels.kv import plain
from ggufspec.kernels.kv.blocks import TYPES
from ggufspec.kernels.kv.storage import CELL_CHUNK, KV, allocate, cells_for, fits, restore, save

__all__ = ["CELL_CHUNK", "KV", "TYPES", "allocate", "cells_for", "fits", "load", "restore", "save", "store"]


def store(kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write k, v [B, W, n_kv, hd] of slots [B] at positions [B, W] (int64); rows with position < 0 are
    dropped."""
    plain.store(kv, k, v, slots, positions)


def load(kv: KV, slot: int, n: int) -> tuple[Tensor, Tensor]:
    """Positions 0..n of a slot as float32 [n, n_kv, hd] each, rotated back. Slow; for tests and tools."""
    return plain.load(kv, slot, n)
