"""Named tensors of one GGUF file, brought onto a device: matrices stay quantized, vectors become float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .errors import FileError, PlacementError, UnsupportedError
from .kernels.fused import GatedPair, join
from .kernels.matmul import PackedWeight, WeightGroup, fuse, pack

if TYPE_CHECKING:
    from .gguf_file import GGUFFile, TensorInfo

Range = tuple[int, int]  # start, stop

_VECTOR_TYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class Part:
    """A matrix of the file, or ranges of its rows or columns."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[Range, ...] | None = None
    columns: tuple[Range, ...] | None = None

    @classmethod
    def of(cls, name: str, shape: Sequence[int], rows: Sequence[Range] | None = None,
           columns: Sequence[Range] | None = None) -> Part:
        def fixed(ranges: Sequence[Range] | None) -> tuple[Range, ...] | None:
            return None if ranges is None else tuple(ranges)

        return cls(name, tuple(shape), fixed(rows), fixed(columns))


class Weights:
    """Reads tensors of `file`. Every read checks the shape the caller expects against the file's.

    `progress`, when given, is called with the number of bytes each time a tensor has been read.
    """

    def __init__(self, file: GGUFFile, progress: Callable[[int], None] | None = None):
        self.file = file
        self.progress = progress
        self.used: set[str] = set()  # names of tensors that were asked for
        self._packed: dict[tuple[Part, torch.device], PackedWeight] = {}
        self._groups: dict[tuple[tuple[Part, ...], torch.device], WeightGroup] = {}

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def _info(self, name: str, shape: Sequence[int]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise FileError(f"{self.file.path}: tensor {name} is missing; expected one of shape {list(shape)}")
        if tuple(info.shape) != tuple(shape):
            raise FileError(
                f"{self.file.path}: tensor {name} has shape {list(info.shape)}; "
                f"the file's keys ask for {list(shape)} (rows, columns)"
            )
        self.used.add(name)
        scale = name.removesuffix(".weight") + ".scale"
        if scale != name and scale in self.file.tensors:
            raise UnsupportedError(f"{self.file.path}: tensor {scale} (a per-tensor scale) is not supported")
        return info

    def matrix(self, name: str, shape: Sequence[int], device: torch.device, *,
               rows: Sequence[Range] | None = None, columns: Sequence[Range] | None = None) -> PackedWeight:
        """The matrix `name` of (rows, columns), packed for `device`; the same request is packed once.

        `rows` and `columns` take parts of it, in order; column ranges must be whole blocks of the tensor's type.
        """
        part = Part.of(name, shape, rows, columns)
        if (part, device) not in self._packed:
            self._packed[part, device] = self._pack(part, device)
        return self._packed[part, device]

    def _pack(self, part: Part, device: torch.device) -> PackedWeight:
        info = self._info(part.name, part.shape)
        raw = self.file.read(part.name)
        if part.rows is not None:
            pieces = [raw[start:stop] for start, stop in part.rows]
            raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if part.columns is not None:
            raw = np.concatenate([raw[:, slice(*self._byte_range(info, r))] for r in part.columns], axis=1)
        shape = extent(part.rows, part.shape[0]), extent(part.columns, part.shape[1])
        with self._room(part.name, device):
            packed = pack(as_tensor(raw), info.layout.name, shape, device)
        self._count(info.n_bytes)
        return packed

    def _byte_range(self, info: TensorInfo, columns: Range) -> Range:
        block = info.layout.n_elements
        if columns[0] % block or columns[1] % block:
            raise PlacementError(
                f"{self.file.path}: tensor {info.name} ({info.layout.name}) cannot be cut at columns {columns[0]} to "
                f"{columns[1]}; its blocks have {block} columns"
            )
        return columns[0] // block * info.layout.n_bytes, columns[1] // block * info.layout.n_bytes

    def block_size(self, name: str) -> int:
        """Columns of one block of a tensor's type, 1 where the file has no such tensor."""
        info = self.file.tensors.get(name)
        return 1 if info is None else info.layout.n_elements

    def group(self, device: torch.device, *parts: Part | tuple[str, Sequence[int]]) -> WeightGroup:
        """Matrices that share an input, fused into one launch; each (name, shape) or a `Part`."""
        named = tuple(part if isinstance(part, Part) else Part.of(*part) for part in parts)
        if (named, device) not in self._groups:
            # Fusing may move weights into arrays of the group's own: keep no second copy of them here.
            packed = [self._packed.get((part, device)) or self._pack(part, device) for part in named]
            with self._room(named[0].name, device):
                self._groups[named, device] = fuse(packed)
        return self._groups[named, device]

    def pair(self, device: torch.device, gate: Part, up: Part) -> GatedPair:
        """Gate and up matrices of one shape, of a gated feed-forward layer."""
        packed = self._pack(gate, device), self._pack(up, device)
        with self._room(gate.name, device):
            return join(*packed)

    def subgroup(self, name: str, group: WeightGroup, start: int) -> WeightGroup:
        """A group's weights from number `start` on, also as a group of their own; on CUDA these are copies.

        name: of the tensor in whose block they are counted.
        """
        with self._room(name, group.weights[start].device):
            return fuse(group.weights[start:])

    def vector(self, name: str, shape: Sequence[int], device: torch.device,
               rows: Sequence[Range] | None = None) -> Tensor:
        """A small tensor as float32 (integers stay int64) of `shape`, or the given ranges of its first dimension."""
        info = self._info(name, shape)
        if info.layout.name not in _VECTOR_TYPES:
            if info.layout.name != "BF16":
                raise UnsupportedError(
                    f"{self.file.path}: tensor {name} has type {info.layout.name}; "
                    "expected F32, F16, BF16 or an integer type for a tensor of this role"
                )
            raw = np.ascontiguousarray(self.file.read(name)).view(np.uint16).astype(np.uint32) << 16
            array = raw.view(np.float32)
        else:
            array = np.ascontiguousarray(self.file.read(name)).view(_VECTOR_TYPES[info.layout.name])
        kind = np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32
        whole = array.astype(kind).reshape(tuple(shape))
        if rows is not None:
            whole = np.concatenate([whole[start:stop] for start, stop in rows])
        self._count(info.n_bytes)
        with self._room(name, device):
            return torch.from_numpy(whole).to(device)

    def optional_vector(self, name: str, shape: Sequence[int], device: torch.device,
                        rows: Sequence[Range] | None = None) -> Tensor | None:
        return self.vector(name, shape, device, rows) if self.has(name) else None

    @contextmanager
    def _room(self, name: str, device: torch.device) -> Iterator[None]:
        """A tensor that a device has no room for is named."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise PlacementError(
                f"{self.file.path}: {device} has no memory left for tensor {name}; spread the model over more devices, "
                "put the drafter elsewhere (--device-draft), or use a smaller file (ggufspec plan shows what fits)"
            ) from error

    def _count(self, n_bytes: int) -> None:
        if self.progress is not None:
            self.progress(n_bytes)


def extent(ranges: Sequence[Range] | None, n: int) -> int:
    """How many of n the ranges take; None takes all."""
    return n if ranges is None else sum(stop - start for start, stop in ranges)


def as_tensor(raw: np.ndarray) -> Tensor:
    """A tensor over the mapped file's bytes, without a copy. Nobody writes to it: the map is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)
