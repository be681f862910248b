"""Open a GGUF file, or all shards of a split one, as a mapping of keys and a mapping of tensors.

    file = open_gguf("model.gguf")
    file.get(file.key("block_count"), int)          # typed, with clear errors
    file.tensors["token_embd.weight"].shape         # (rows, columns), PyTorch order
    file.read("token_embd.weight")                  # uint8 [rows, row_bytes], a view of the mapped file

Nothing is read but the header; tensor bytes are paged in when they are touched.
"""

import mmap
import os
import re
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar, overload

import numpy as np

from ggufspec.errors import FileError
from ggufspec.gguf_header import Header, StringArray, TensorInfo, parse_header

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "open_gguf"]

T = TypeVar("T")
_REQUIRED: Any = object()
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# What each Python type asked for may be in the file, by the type's text in `Header.types`.
_INTEGERS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
_ACCEPTED: dict[type, tuple[str, ...]] = {
    int: _INTEGERS,
    float: ("f32", "f64"),
    bool: ("bool",),
    str: ("str",),
}


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file. `metadata` is the first shard's; arrays of numbers are numpy arrays, arrays of
    strings a lazily decoded `StringArray`. `types` holds each key's type as text (`u32`, `arr[str]`...).
    """

    path: Path
    shards: tuple[Path, ...]
    version: int
    alignment: int
    metadata: dict[str, Any]
    types: dict[str, str]
    tensors: dict[str, TensorInfo]
    _maps: tuple[mmap.mmap, ...]

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    def key(self, suffix: str) -> str:
        """The full name of an architecture's key: `block_count` -> `qwen35.block_count`."""
        return f"{self.architecture}.{suffix}"

    def tensor(self, name: str) -> TensorInfo:
        """The tensor's entry. Raises `FileError` if the file has no such tensor."""
        if name not in self.tensors:
            raise FileError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 of shape (*shape[:-1], row_bytes): a read-only view of the mapped file.

        Raises `FileError` if it is missing, `UnsupportedError` if its type has no decoder.
        """
        info = self.tensor(name)
        raw = np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset)
        return raw.reshape(*info.shape[:-1], info.row_bytes)

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """The value of `key` as `kind`: int, float, bool, str, or list[...] of one of these.

        An int may be stored in any integer type, a float as f32 or f64; nothing else is converted. Raises
        `FileError` if the key has another type, or is missing and no default is given.
        """
        wanted = _type_text(kind)
        if key not in self.metadata:
            if default is _REQUIRED:
                raise FileError(f"{self.path}: key {key!r} is missing, expected a value of type {wanted}")
            return default
        stored, value = self.types[key], self.metadata[key]
        is_list = isinstance(kind, GenericAlias)
        accepted = _ACCEPTED[typing.get_args(kind)[0] if is_list else kind]
        if stored not in ([f"arr[{t}]" for t in accepted] if is_list else accepted):
            raise FileError(f"{self.path}: key {key!r} has type {stored}, expected {wanted}")
        if not is_list:
            return value
        return value.to_list() if isinstance(value, StringArray) else value.tolist()

    def get_per_block(self, key: str, kind: type[T], n: int, default: Any = _REQUIRED) -> list[T]:
        """`n` values of a key that holds one value for all blocks or an array with one entry a block."""
        if key in self.metadata and self.types[key].startswith("arr["):
            values: list[T] = self.get(key, list[kind])  # type: ignore[valid-type]
            if len(values) != n:
                raise FileError(f"{self.path}: key {key!r} has {len(values)} entries, expected {n}, one a block")
            return values
        if default is not _REQUIRED and key not in self.metadata:
            return [default] * n
        return [self.get(key, kind)] * n


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open `path` and, if it is the first shard of a split file, its other shards too.

    Raises `FileError`: one line naming the file, the key or tensor, and what was expected.
    """
    path = Path(path)
    data, header = _open_one(path)
    n_shards = _checked(header, path, "split.count", "u16", 0)
    shards: tuple[Path, ...] = (path,)
    maps: tuple[mmap.mmap, ...] = (data,)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if n_shards > 1:
        shards = _shard_paths(path, _checked(header, path, "split.no", "u16"), n_shards)
        tensors, maps = _join_shards(shards, header, data)
    return GGUFFile(path, shards, header.version, header.alignment, header.metadata, header.types, tensors, maps)


def _open_one(path: Path) -> tuple[mmap.mmap, Header]:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FileError(f"{path}: the file is empty, expected a GGUF file")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(f"{path}: cannot be opened: {reason}") from None
    return data, parse_header(data, str(path))


def _checked(header: Header, path: Path, key: str, kind: str, default: int | None = None) -> int:
    """A `split.*` key, whose types the format fixes exactly."""
    if key not in header.metadata:
        if default is None:
            raise FileError(f"{path}: key {key!r} is missing, expected a value of type {kind}")
        return default
    if header.types[key] != kind:
        raise FileError(f"{path}: key {key!r} has type {header.types[key]}, expected {kind}")
    return header.metadata[key]


def _shard_paths(path: Path, number: int, count: int) -> tuple[Path, ...]:
    match = _SHARD_NAME.fullmatch(path.name)
    if not match or int(match["count"]) != count or int(match["number"]) != number + 1:
        name = f"PREFIX-{number + 1:05d}-of-{count:05d}.gguf"
        raise FileError(f"{path}: is shard {number + 1} of {count} by its keys, expected a name like {name}")
    paths = tuple(path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    if number != 0:
        raise FileError(f"{path}: is shard {number + 1} of {count}, expected the first one: open {paths[0]}")
    return paths


def _join_shards(
    paths: tuple[Path, ...], first: Header, first_data: mmap.mmap
) -> tuple[dict[str, TensorInfo], tuple[mmap.mmap, ...]]:
    tensors: dict[str, TensorInfo] = {}
    maps: list[mmap.mmap] = []
    for i, path in enumerate(paths):
        data, header = (first_data, first) if i == 0 else _open_one(path)
        number = _checked(header, path, "split.no", "u16")
        if number != i:
            raise FileError(f"{path}: key 'split.no' is {number}, expected {i}")
        for tensor in header.tensors:
            if tensor.name in tensors:
                other = paths[tensors[tensor.name].shard]
                raise FileError(f"{path}: tensor {tensor.name!r} is also in {other}, expected unique names")
            tensors[tensor.name] = replace(tensor, shard=i)
        maps.append(data)
    total = _checked(first, paths[0], "split.tensors.count", "i32", len(tensors))
    if total != len(tensors):
        raise FileError(f"{paths[0]}: key 'split.tensors.count' is {total}, expected the {len(tensors)} of all shards")
    return tensors, tuple(maps)


def _type_text(kind: Any) -> str:
    names: dict[Any, str] = {int: "integer", float: "float", bool: "bool", str: "str"}
    return f"array of {names[typing.get_args(kind)[0]]}" if isinstance(kind, GenericAlias) else names[kind]
