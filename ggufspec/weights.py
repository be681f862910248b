"""Named tensors of one GGUF file, brought onto a device: matrices stay quantized, vectors become float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .errors import FileError, UnsupportedError
from .kernels.matmul import PackedWeight, WeightGroup, fuse, pack

if TYPE_CHECKING:
    from .gguf_file import GGUFFile, TensorInfo

_VECTOR_TYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64}


class Weights:
    """Reads tensors of `file`. Every read checks the shape the caller expects against the file's.

    `progress`, when given, is called with the number of bytes each time a tensor has been read.
    """

    def __init__(self, file: GGUFFile, progress: Callable[[int], None] | None = None):
        self.file = file
        self.progress = progress
        self._packed: dict[tuple[str, str], PackedWeight] = {}

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
        scale = name.removesuffix(".weight") + ".scale"
        if scale != name and scale in self.file.tensors:
            raise UnsupportedError(f"{self.file.path}: tensor {scale} (a per-tensor scale) is not supported")
        return info

    def matrix(self, name: str, shape: Sequence[int], device: torch.device) -> PackedWeight:
        """The matrix `name` of (rows, columns), packed for `device`; the same name is packed once a device."""
        key = (name, str(device))
        if key not in self._packed:
            info = self._info(name, shape)
            raw = self.file.read(name)
            rows, columns = shape
            self._packed[key] = pack(as_tensor(raw), info.layout.name, (rows, columns), device)
            self._count(info.n_bytes)
        return self._packed[key]

    def group(self, device: torch.device, *named: tuple[str, Sequence[int]]) -> WeightGroup:
        """Matrices that share an input, fused into one launch."""
        return fuse([self.matrix(name, shape, device) for name, shape in named])

    def vector(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """A small tensor as float32 (integers stay int64) of `shape`."""
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
        tensor = torch.from_numpy(array.astype(kind).reshape(tuple(shape))).to(device)
        self._count(info.n_bytes)
        return tensor

    def optional_vector(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor | None:
        return self.vector(name, shape, device) if self.has(name) else None

    def _count(self, n_bytes: int) -> None:
        if self.progress is not None:
            self.progress(n_bytes)


def as_tensor(raw: np.ndarray) -> Tensor:
    """A tensor over the mapped file's bytes, without a copy. Nobody writes to it: the map is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)
