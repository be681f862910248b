"""Importance matrices: for each weight, the mean square of every input column over a calibration text.

Two file formats are read. GGUF: tensors `NAME.in_sum2` [experts, columns] and `NAME.counts` [experts], keys
`imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`. The older one is a sequence of little-endian
numbers: i32 n, then n times (i32 length, name, i32 calls, i32 values, f32 values), optionally followed by
i32 chunks, i32 length, name of the data set.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ggufspec.errors import ConfigError, FileError
from ggufspec.gguf_file import open_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Imatrix:
    """`values`: tensor name -> float32 [experts * columns]. `file`, `dataset`, `n_chunks` go into the output."""

    file: str
    values: dict[str, np.ndarray]
    dataset: str | None = None
    n_chunks: int = 0


def read_imatrix(
    path: str | os.PathLike[str], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Imatrix:
    """Read either format and keep the entries whose name contains one of `include`, or none of `exclude`.

    Raises FileError if the file is neither format or holds a value that is not finite, ConfigError if both
    `include` and `exclude` are given or nothing is left.
    """
    if include and exclude:
        raise ConfigError("include-weights and exclude-weights exclude one another; give one of the two")
    path = Path(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FileError(f"failed to load imatrix from '{path}': {error.strerror or error}") from None
    matrix = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path)
    for name, values in matrix.values.items():
        finite = np.isfinite(values)
        if not finite.all():
            index = int(np.flatnonzero(~finite)[0])
            raise FileError(
                f"{path}: imatrix contains non-finite value {values[index]} for {name!r} at index {index}"
            )
    kept = {
        name: values
        for name, values in matrix.values.items()
        if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)
    }
    if not kept:
        raise ConfigError(f"{path}: no imatrix entry is left after including and excluding weights by name")
    return replace(matrix, values=kept)


def _read_gguf(path: Path) -> Imatrix:
    file = open_gguf(path)
    for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"):
        if key not in file.metadata:
            raise FileError(f"missing imatrix metadata in file {path}: key {key!r}")
    values: dict[str, np.ndarray] = {}
    for name, info in file.tensors.items():
        stem = name.removesuffix(_SUMS) if name.endswith(_SUMS) else name.removesuffix(_COUNTS)
        if stem == name:
            raise FileError(f"{path}: tensor {name!r}, expected names that end in {_SUMS} or {_COUNTS}")
        for other in (stem + _SUMS, stem + _COUNTS):
            if other not in file.tensors:
                raise FileError(f"{path}: tensor {name!r} has no partner {other!r}")
        if info.type_name != "F32":
            raise FileError(f"{path}: tensor {name!r} has type {info.type_name}, expected F32")
        if not name.endswith(_SUMS):
            continue
        sums = file.read(name).view(np.float32).reshape(-1, info.columns)
        counts = file.read(stem + _COUNTS).view(np.float32).reshape(-1)
        if len(counts) != len(sums):
            raise FileError(f"{path}: {len(sums)} rows of {name!r} but {len(counts)} counts")
        counted = (counts > 0).reshape(-1, 1)
        divisor = np.where(counted, counts.reshape(-1, 1), np.float32(1))
        values[stem] = np.where(counted, sums / divisor, np.float32(1)).reshape(-1)
    if not values:
        raise FileError(f"failed to load imatrix from '{path}': it has no entries")
    datasets = file.get("imatrix.datasets", list[str])
    n_chunks = file.get("imatrix.chunk_count", int)
    return Imatrix(str(path), values, datasets[0] if datasets else None, n_chunks)


def _read_legacy(path: Path) -> Imatrix:
    data = path.read_bytes()
    position = 0

    def take(n_bytes: int, what: str) -> bytes:
        nonlocal position
        if n_bytes < 0 or position + n_bytes > len(data):
            raise FileError(
                f"failed to load imatrix from '{path}': {what} needs {n_bytes} bytes at byte {position}, "
                f"the file has {len(data)}"
            )
        position += n_bytes
        return data[position - n_bytes : position]

    def number(what: str) -> int:
        return struct.unpack("<i", take(4, what))[0]

    n_entries = number("the number of entries")
    if n_entries < 1:
        raise FileError(f"failed to load imatrix from '{path}': {n_entries} entries, expected at least one")
    values: dict[str, np.ndarray] = {}
    for i in range(n_entries):
        name = take(number(f"entry {i}"), f"the name of entry {i}").decode(errors="replace")
        n_calls, n_values = number(f"calls of {name!r}"), number(f"length of {name!r}")
        if n_values < 1:
            raise FileError(f"failed to load imatrix from '{path}': {name!r} has {n_values} values")
        raw = np.frombuffer(take(4 * n_values, f"values of {name!r}"), "<f4").astype(np.float32)
        values[name] = raw / np.float32(n_calls) if n_calls > 0 else raw
    if position == len(data):
        return Imatrix(str(path), values)
    n_chunks = number("the number of chunks")
    dataset = take(number("the data set"), "the data set's name").decode(errors="replace")
    return Imatrix(str(path), values, dataset, n_chunks)


def importance_of(matrix: Imatrix, name: str, n_columns: int, n_matrices: int) -> np.ndarray | None:
    """Importance of a tensor's columns, float32 [n_matrices, n_columns], or None if there is no entry.

    Raises ConfigError for an entry of another length; for token embeddings that counts as no entry.
    """
    values = matrix.values.get(name)
    if values is None:
        return None
    if values.size != n_columns * n_matrices:
        if name in ("token_embd.weight", "per_layer_token_embd.weight"):
            return None
        raise ConfigError(
            f"imatrix size {values.size} is different from tensor size {n_columns * n_matrices} for {name}"
        )
    return values.reshape(n_matrices, n_columns)
