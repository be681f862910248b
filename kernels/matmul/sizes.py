"""Bytes that packed weights take on a device, from types and shapes alone: what `pack` and `fuse` would allocate."""

from collections.abc import Sequence
from functools import cache

import torch

from ggufspec.kernels.matmul import cuda, repack
from ggufspec.quant import layouts

TABLE_ENTRIES = 2 * 4  # row_start and row_width of a launch, int32 a row


@cache
def block_bytes(type_name: str) -> int:
    """Bytes that the kernels' arrays take for 256 columns of one row: those of a row of zeros, packed."""
    layout = layouts.BY_NAME[type_name]
    raw = torch.zeros((1, layout.row_bytes(repack.BLOCK)), dtype=torch.uint8)
    return sum(part.numel() * part.element_size() for part in repack.repack(raw, type_name, 0).values())


def row_bytes(type_name: str, n_columns: int) -> int:
    """Bytes of one row in the CUDA kernels' arrays; the file's row for types without arrays of their own."""
    if type_name not in repack.FORMS:
        return layouts.BY_NAME[type_name].row_bytes(n_columns)
    return repack.n_super_blocks(n_columns) * block_bytes(type_name)


def packed_bytes(type_name: str, shape: tuple[int, int], is_cuda: bool) -> int:
    """One weight (rows, columns) by itself. On the CPU: the file's bytes and the float32 values beside them."""
    rows, columns = shape
    if is_cuda:
        return rows * row_bytes(type_name, columns)
    return rows * (layouts.BY_NAME[type_name].row_bytes(columns) + 4 * columns)


def launch_bytes(type_name: str, n_rows: Sequence[int], n_columns: int) -> int:
    """A CUDA launch over weights of one type: arrays for the padded rows and the launch's tables."""
    padded = -(-sum(n_rows) // cuda.ROW_MULTIPLE) * cuda.ROW_MULTIPLE
    return padded * (row_bytes(type_name, n_columns) + TABLE_ENTRIES)


def has_arrays(type_name: str) -> bool:
    return type_name in repack.FORMS
