"""Convert the rows of one tensor from one stored type to another: the unit of work of the requantizer.

A `Task` names a range of rows in a file; `convert` reads them, decodes, checks and encodes them. It holds no
state, so that worker processes can run it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ggufspec.errors import FileError
from ggufspec.quant import layouts
from ggufspec.quant.dequantize import DECODERS, dequantize
from ggufspec.quant.quantize import quantize

# Byte offsets of the half-precision numbers in a block; an infinite one makes the block worthless.
HALVES = {
    "F16": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Rows `first_row`.. of a tensor: `n_bytes` at `offset` of `path`, `source` type, to become `target` type."""

    path: str
    tensor: str
    offset: int
    n_bytes: int
    first_row: int
    n_columns: int
    source: str
    target: str
    importance: np.ndarray | None = None  # float32 [n_columns]


def read_rows(task: Task) -> np.ndarray:
    """The task's bytes, uint8 [rows, row bytes]."""
    raw = np.empty(task.n_bytes, np.uint8)
    with open(task.path, "rb", buffering=0) as file:
        position = 0
        while position < task.n_bytes:
            n = os.preadv(file.fileno(), [raw.data[position:]], task.offset + position)
            if n <= 0:
                raise FileError(f"{task.path}: tensor {task.tensor!r}: the file ended while it was read")
            position += n
    return raw.reshape(-1, layouts.BY_NAME[task.source].row_bytes(task.n_columns))


def check_finite(x: np.ndarray, task: Task) -> None:
    """Raise FileError naming the first element of x [rows, columns] that is NaN or infinite."""
    if np.isfinite(x).all():
        return
    row, column = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
    index = (task.first_row + row) * task.n_columns + column
    raise FileError(
        f"{task.path}: tensor {task.tensor!r} holds {x[row, column]} at element {index} "
        f"(row {task.first_row + row}, column {column}), expected finite numbers: quantized data validation failed"
    )


def check_encoded(raw: np.ndarray, task: Task) -> None:
    """Raise FileError if a scale of the encoded rows does not fit half precision."""
    layout = layouts.BY_NAME[task.target]
    blocks = raw.reshape(-1, layout.n_bytes)
    for at in HALVES.get(task.target, ()):
        bad = (blocks[:, at + 1] & 0x7C) == 0x7C  # all exponent bits set
        if bad.any():
            index = task.first_row * task.n_columns + int(bad.argmax()) * layout.n_elements
            raise FileError(
                f"{task.path}: tensor {task.tensor!r}: numbers from element {index} on are too large for "
                f"{task.target}: quantized data validation failed"
            )


def convert(task: Task) -> np.ndarray:
    """uint8 [rows, row bytes] of the target type. Raises FileError for numbers that are not finite or too large."""
    raw = read_rows(task)
    if task.source in DECODERS:
        with np.errstate(all="ignore"):
            x = dequantize(raw, task.source)
        check_finite(x, task)
    if task.source == task.target:
        return raw
    out = quantize(x, task.target, task.importance)
    check_encoded(out, task)
    return out
