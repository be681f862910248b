"""How narrow attention is cut up: splits of the cells, tiles of cells and of (row, query head) pairs, a program's share
of a multiprocessor.

Splits, and the cells of a tile, give sums their order: cache and card alone decide them, never a batch. Columns of a
tile, warps and stages change no bit and follow the batch too.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ggufspec.kernels.attention.tiles import compute_type
from ggufspec.kernels.kv.storage import KV

CHUNK = tl.constexpr(64)  # a split is a whole number of chunks of so many cells
# Programs of a tile of rows that are aimed at: as many as 132 multiprocessors run at once, two each. Before, a split
# was a function of cells alone (64 of one chunk, 64 of two, 64 of four, ..): 32k cells of 4 key heads were 800
# programs, and each of the 264 places began three of them, one after the other.
WAVE = 264
CELLS = 64  # of a tile, at most: the height of Hopper's tensor core instructions
COLUMNS = 32  # of a tile, at most: sums of 64 take more registers than there are
WARPS = 4  # of a program: one for 16 of the 64 cells
REGISTERS = 32_768  # of a program: two fit a multiprocessor. What threads have to spill is outside the loop
SMALL = ((8, 6), (8, 9), (12, 0))  # cards with 99 KB of shared memory for a program
TILE_BYTES = 36_000  # of cells: two programs of two tiles each share 227 KB, consumer cards have 99 KB for one
STAGES = 3  # of the loop over tiles, at most
PROGRAMS = 1024  # about as many are started at most; one takes several splits where there are more


def most_splits(n_kv: int) -> int:
    """Splits of a causal row at most; the others may have one more."""
    return max(16, min(127, WAVE // n_kv))


def count_splits(n_cells: int, most: int, spare: int) -> int:
    """Room for splits in a cache of n_cells. spare: 1 where rows see cells behind their own position."""
    return min(most + spare, triton.cdiv(n_cells, CHUNK.value))


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a card; of a device that is none, one with tensor cores."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def old(device: torch.device) -> bool:
    """Whether a card has 64 KB of shared memory and no tensor cores that Triton uses."""
    return capability(device) < (8, 0)


def cells_at_once(kv: KV) -> int:
    """Cells of a tile: at most CELLS, as many keys and values as 64 KB hold in the types they are multiplied in, and
    as many as TILE_BYTES hold as they are stored."""
    if old(kv.device):
        return 16
    widths = ((kv.type_k, kv.hd_k), (kv.type_v, kv.hd_v))
    n_bytes = sum(
        triton.next_power_of_2(hd) * (4 if compute_type(name)[0] == tl.float32 else 2) for name, hd in widths
    )
    n = min(CELLS, 64 if n_bytes <= 1024 else 32 if n_bytes <= 2048 else 16)
    if "iq4_nl" in (kv.type_k, kv.type_v):
        n = min(n, 32)  # looked up by way of shared memory: 64 would need 154 KB
        if kv.type_k == kv.type_v and capability(kv.device) in SMALL:
            n = 16  # Triton 3.9 wants 105 KB for 32 of both (3.6 less)
    while n > 16 and n * cell_bytes(kv) > TILE_BYTES:
        n //= 2
    return n


def cell_bytes(kv: KV) -> int:
    """Bytes of a cell's key and value of one head."""
    return sum(t.shape[-1] * t.element_size() for t in (kv.k, kv.v))


def columns(kv: KV, n_pairs: int) -> int:
    """Columns of a tile for a batch of n_pairs (row, query head) pairs: 8 are the least that tensor cores take.

    The instructions that Triton chooses for 8 to 32 columns give the same bits for cells of half precision and q8_0,
    on cards of capability 8 and 9, and on 12, which has those of 8. Elsewhere there are always 16: of cells that are
    read byte by byte, few columns are multiplied in another order than many.
    """
    fixed = capability(kv.device)[0] not in (8, 9, 12) or triton.knobs.runtime.interpret
    if fixed or not {kv.type_k, kv.type_v} <= {"f16", "bf16", "q8_0"}:
        return 16
    most = 16 if "bf16" in (kv.type_k, kv.type_v) else COLUMNS  # what bfloat16 is split into takes twice the room
    return max(8, min(most, triton.next_power_of_2(n_pairs)))


def warps(kv: KV) -> int:
    """Twice as many where products are not the tensor cores'."""
    floats = tl.float32 in (compute_type(kv.type_k)[0], compute_type(kv.type_v)[0])
    return 2 * WARPS if floats or old(kv.device) else WARPS


def stages(kv: KV) -> int:
    """STAGES, 3: one tile is always on its way while a program works on another. 2: where tiles are large, or decoded
    by way of shared memory; a program then waits for each tile, and other programs fill the gaps."""
    small = cells_at_once(kv) * cell_bytes(kv) <= TILE_BYTES
    return STAGES if small and {kv.type_k, kv.type_v} <= {"f16", "bf16", "f32", "q8_0"} else 2


def registers(kv: KV) -> int:
    """Of a thread, at most."""
    return min(255, REGISTERS // (32 * warps(kv)))
