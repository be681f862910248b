"""Storing and loading keys and values in PyTorch: the CPU path and the oracle of the Triton kernels."""

import torch
from torch import Tensor

from ggufspec.kernels.kv.blocks import decode, encode
from ggufspec.kernels.kv.hadamard import rotate
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.norm.plain import rms_norm
from ggufspec.kernels.rope import RopeSpec
from ggufspec.kernels.rope import plain as ropes


def store(kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    valid = positions >= 0
    cells = positions % kv.n_cells if kv.ring else positions
    if not kv.ring and bool((positions >= kv.n_cells).any()):
        raise IndexError(f"position {int(positions.max())} does not fit {kv.n_cells} cells")
    slot = slots[:, None].expand_as(positions)[valid]
    cell = cells[valid]
    kv.k[slot, cell] = encode(rotate(k[valid].float(), kv.rotation_k), kv.type_k)
    kv.v[slot, cell] = encode(rotate(v[valid].float(), kv.rotation_v), kv.type_v)


def norm_rope_store(
    kv: KV, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor,
    norms: tuple[Tensor, Tensor, float] | None, rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> Tensor:  # fmt: skip
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    if rope is not None:
        q, k = ropes.rotate(q, *rope), ropes.rotate(k, *rope)
    store(kv, k, v, slots, positions)
    return rotate(q.float(), kv.rotation_k)


def store_raw(
    kv: KV, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, norm: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor, RopeSpec] | None,
) -> None:  # fmt: skip
    if norm is not None:
        k = rms_norm(k, *norm)
    if rope is not None:
        k = ropes.rotate(k, *rope)
    store(kv, k, v, slots, positions)


def decode_cells(kv: KV, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Cells start..stop of a slot as float32 [n, n_kv, hd], still rotated: what attention multiplies."""
    return (
        decode(kv.k[slot, start:stop], kv.type_k, kv.hd_k),
        decode(kv.v[slot, start:stop], kv.type_v, kv.hd_v),
    )


def load(kv: KV, slot: int, n: int) -> tuple[Tensor, Tensor]:
    if kv.ring and n > kv.n_cells:
        raise IndexError(f"a ring of {kv.n_cells} cells does not hold {n} positions")
    k, v = decode_cells(kv, slot, 0, n)
    return rotate(k, kv.rotation_k), rotate(v, kv.rotation_v)


def cell_positions(kv: KV, n_stored: Tensor) -> Tensor:
    """[B] positions stored so far to [B, n_cells]: the position in each cell, -1 for a cell never written."""
    cells = torch.arange(kv.n_cells, device=n_stored.device)
    if not kv.ring:
        return torch.where(cells < n_stored[:, None], cells, -1)
    last = n_stored[:, None] - 1
    return (last - (last - cells) % kv.n_cells).clamp(min=-1)
