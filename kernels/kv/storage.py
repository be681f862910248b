"""Packed storage of one attention layer's keys and values, for all slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ggufspec.errors import ConfigError, PlacementError
from ggufspec.kernels.kv.blocks import BLOCK, BLOCKS, PLAIN, layout_of
from ggufspec.kernels.kv.hadamard import rotation_size

CELL_CHUNK = 256  # attention walks the cells in chunks of this many; storage is rounded up to it


@dataclass
class KV:
    """k, v: [n_slots, n_cells, n_kv, hd] of a plain type, or uint8 [n_slots, n_cells, n_kv, row_bytes].

    Position p of a slot stands in cell p; in a ring, in cell p mod n_cells. rotation_k, rotation_v: size of
    the Hadamard rotation applied before storing, 0 for none.
    """

    type_k: str
    type_v: str
    k: Tensor
    v: Tensor
    hd_k: int
    hd_v: int
    rotation_k: int
    rotation_v: int
    ring: bool

    @property
    def n_slots(self) -> int:
        return self.k.shape[0]

    @property
    def n_cells(self) -> int:
        return self.k.shape[1]

    @property
    def n_kv(self) -> int:
        return self.k.shape[2]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v))


def cells_for(n_cells: int) -> int:
    """Cells really allocated for n_cells asked for."""
    return -(-n_cells // CELL_CHUNK) * CELL_CHUNK


def allocate(
    type_k: str,
    type_v: str,
    n_slots: int,
    n_cells: int,
    n_kv: int,
    hd_k: int,
    hd_v: int,
    device: torch.device | str,
    *,
    ring: bool = False,
    rotation: bool = True,
) -> KV:
    """Storage for `n_cells` positions a slot (rounded up to 256), zeroed: masked cells must be finite.

    ring: position p goes to cell p mod n_cells, so n_cells must be at least the sliding window plus the rows
    of a step. rotation False: no Hadamard rotation (layers with different head sizes share a cache). Raises
    ConfigError for unknown types and for head sizes that a block does not divide, PlacementError without memory.
    """

    def buffer(type_name: str, hd: int, name: str) -> Tensor:
        layout = layout_of(type_name)
        if type_name in BLOCKS and hd % BLOCK:
            raise ConfigError(
                f"cache type {type_name} for {name} needs a head size divisible by {BLOCK}, "
                f"the model has {hd}; use f16"
            )
        width = hd if type_name in PLAIN else layout.row_bytes(hd)
        dtype = PLAIN.get(type_name, torch.uint8)
        try:
            return torch.zeros(n_slots, cells_for(n_cells), n_kv, width, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise PlacementError(
                f"{device} has no memory left for a layer's cache of {n_slots} slot(s) of {n_cells} tokens; "
                "use a shorter context (-c), fewer slots (-np) or smaller cache types (-ctk, -ctv)"
            ) from error

    return KV(
        type_k,
        type_v,
        buffer(type_k, hd_k, "K"),
        buffer(type_v, hd_v, "V"),
        hd_k,
        hd_v,
        rotation_size(type_k, hd_k, grow=True) if rotation else 0,
        rotation_size(type_v, hd_v, grow=False) if rotation else 0,
        ring,
    )


def used_cells(kv: KV, n_past: int) -> int:
    """Cells that `save` copies; of a ring all of them, since a position's cell depends on the ring's size."""
    return kv.n_cells if kv.ring else min(n_past, kv.n_cells)


def save(kv: KV, slot: int, n_past: int, n_beside: int = 0) -> tuple[Tensor, Tensor]:
    """The cells of the first n_past positions, packed as they are, copied to the host; n_beside: see `copy`."""
    k, v = copy(kv, slot, n_past, n_beside)
    return k.cpu(), v.cpu()


def copy(kv: KV, slot: int, n_past: int, n_beside: int = 0) -> tuple[Tensor, Tensor]:
    """`save` on the device.

    Of a ring all cells, but zeros where none of these positions stands for certain: the slot may hold rows of an
    earlier text there, or of a draft, which n_beside positions from n_past on can have.
    """
    n = used_cells(kv, n_past)
    copies = kv.k[slot, :n].clone(), kv.v[slot, :n].clone()
    if kv.ring:
        first = n_past % n
        stop = first + max(n - n_past, n_beside)  # in the cells from there on, and round to the first ones
        for cells in copies:
            cells[first:stop].zero_()
            cells[: max(stop - n, 0)].zero_()
    return copies


def fits(kv: KV, saved: tuple[Tensor, Tensor]) -> bool:
    """Whether saved cells can be restored into this storage."""
    return all(
        part.dtype == own.dtype
        and part.shape[1:] == own.shape[2:]
        and (part.shape[0] == kv.n_cells if kv.ring else part.shape[0] <= kv.n_cells)
        for part, own in zip(saved, (kv.k, kv.v))
    )


def restore(kv: KV, slot: int, saved: tuple[Tensor, Tensor]) -> None:
    """Write saved cells back; the caller has checked `fits`."""
    for part, own in zip(saved, (kv.k, kv.v)):
        own[slot, : part.shape[0]] = part.to(own.device)
