"""Bytes that packed weights take on a device, from types and shapes alone: what `pack` and `fuse` would allocate."""

from collections.abc import Sequence

from ggufspec.kernels.matmul import cuda, repack
from ggufspec.quant import layouts

TABLE_ENTRIES = 2 * 4  # row_start and row_width of a launch, int32 a row


def row_bytes(type_name: str, n_columns: int) -> int:
    """Bytes of one row in the CUDA kernels' arrays; the file's row for types without arrays of their own."""
    form = repack.FORMS.get(type_name)
    if form is None:
        return layouts.BY_NAME[type_name].row_bytes(n_columns)
    words = 8 * form.low + 8 * form.high + 4 * (2 if form.scale == "half_min" else 1)
    return repack.n_super_blocks(n_columns) * (4 * words + (2 if form.scale == "int8" else 0))


def packed_bytes(type_name: str, shape: tuple[int, int], is_cuda: bool) -> int:
    """One weight (rows, columns) by itself. On the CPU: the file's bytes and the float32 values beside them."""
    rows, columns = shape
    if is_cuda:
        return rows * row_bytes(type_name, columns)
    return rows * (layouts.BY_NAME[type_name].row_bytes(columns) + 4 * columns)


def launch_bytes(type_name: str, n_rows: Sequence[int], n_columns: int) -> int:
    """A CUDA launch over weights of one type: arrays for the padded rows and the launch's tables."""
    padded = -(-sum(n_rows) // cuda.ROW_MULTIPLE) * cuda.ROW_MULTIPLE
    counters = padded // 32 * -(-cuda.NARROW_TOKENS // cuda.TOKEN_TILES[0]) * 4
    return padded * (row_bytes(type_name, n_columns) + TABLE_ENTRIES) + counters


def has_arrays(type_name: str) -> bool:
    return type_name in repack.FORMS
