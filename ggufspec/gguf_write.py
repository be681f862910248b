"""Write GGUF files, byte for byte as llama.cpp's tools lay them out; one file or a set of shards.

    entries = [Entry("token_embd.weight", (4096, 512), Q8_0), ...]
    write_gguf("out.gguf", [Key("general.architecture", "str", "qwen3"), ...], entries, chunks)

`chunks` yields the tensors' bytes in the order of `entries`: any number of pieces for a tensor, none reaching
into the next one, so that a tensor never has to be in memory as a whole. The result appears under its name
only when it is complete and on the disk; after any failure (full disk, Ctrl-C, an error of the iterator)
nothing is left.
"""

import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ggufspec.errors import FileError
from ggufspec.gguf_file import GGUFFile
from ggufspec.gguf_header import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_NAME,
    STRING,
    VALUE_TYPE_BY_NAME,
    StringArray,
)
from ggufspec.quant.layouts import Layout

Chunk: TypeAlias = bytes | bytearray | memoryview | np.ndarray

_ARRAY_TYPE = re.compile(r"arr\[(\w+)\]")


@dataclass(frozen=True)
class Key:
    """A metadata key with its type as text: `u32`, `f32`, `bool`, `str`, `arr[str]`... (`GGUFFile.types`)."""

    name: str
    type: str
    value: Any


@dataclass(frozen=True)
class Entry:
    """A tensor to write. `shape` is in PyTorch order."""

    name: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.layout.row_bytes(self.shape[-1])


def keys_of(file: GGUFFile) -> list[Key]:
    """All keys of an open file, in its order, ready to be written unchanged."""
    return [Key(name, file.types[name], value) for name, value in file.metadata.items()]


def shard_name(prefix: str, index: int, n_shards: int) -> str:
    """The file name of shard `index` (0-based)."""
    return f"{prefix}-{index + 1:05d}-of-{n_shards:05d}.gguf"


def write_gguf(
    path: str | os.PathLike[str],
    keys: Sequence[Key],
    entries: Sequence[Entry],
    chunks: Iterable[Chunk],
    *,
    version: int = 3,
) -> int:
    """Write one file and return its size in bytes.

    The alignment is that of the key `general.alignment`, if given. Raises `FileError` if the file cannot be
    written, or a key, a tensor or the amount of data does not fit the format.
    """
    return _write_all([Path(path)], [keys], [entries], chunks, version)


def write_split(
    prefix: str | os.PathLike[str],
    keys: Sequence[Key],
    shards: Sequence[Sequence[Entry]],
    chunks: Iterable[Chunk],
) -> int:
    """Write shards `PREFIX-00001-of-0000N.gguf`... and return their total size in bytes.

    The first shard carries `keys`, all carry the `split.*` keys; `chunks` runs over all shards. Either all
    shards appear or none does.
    """
    n_shards, n_tensors = len(shards), sum(len(entries) for entries in shards)
    all_keys = []
    for i in range(n_shards):
        split = [
            Key("split.no", "u16", i),
            Key("split.count", "u16", n_shards),
            Key("split.tensors.count", "i32", n_tensors),
        ]
        all_keys.append(([*keys] if i == 0 else []) + split)
    paths = [Path(shard_name(os.fspath(prefix), i, n_shards)) for i in range(n_shards)]
    return _write_all(paths, all_keys, shards, chunks, 3)


def _write_all(
    paths: Sequence[Path],
    keys: Sequence[Sequence[Key]],
    shards: Sequence[Sequence[Entry]],
    chunks: Iterable[Chunk],
    version: int,
) -> int:
    """Write every file under a temporary name beside its own, then rename them all."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    alignments = [_alignment_of(file_keys, path) for path, file_keys in zip(paths, keys)]
    headers = [_header(*each, version) for each in zip(paths, keys, shards, alignments)]
    for path in paths:
        if path.is_dir():
            raise FileError(f"{path}: cannot be written: is a directory, expected a file name")
        if path.exists() and not path.is_file():  # the rename would put a file in the place of /dev/null
            raise FileError(f"{path}: cannot be written: is a device or pipe, expected a file name")
    stream = iter(chunks)
    n_bytes = 0
    try:
        for path, temp, header, entries, alignment in zip(paths, temporary, headers, shards, alignments):
            with _new_file(temp, path) as file:
                _put(file, header, path)
                for entry in entries:
                    _put_tensor(file, entry, stream, alignment, path)
                n_bytes += file.tell()
        if next(stream, None) is not None:
            raise FileError(f"{paths[-1]}: there is more tensor data than the table of tensors announces")
        for path, temp in zip(paths, temporary):
            with _reported(path):
                os.replace(temp, path)
        _sync_folder(paths[0].parent)
    except BaseException:
        for temp in temporary:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
        raise
    return n_bytes


def _header(path: Path, keys: Sequence[Key], entries: Sequence[Entry], alignment: int, version: int) -> bytes:
    """Everything before the tensor data, padding included."""
    names: set[str] = set()
    out = bytearray(MAGIC + struct.pack("<Iqq", version, len(entries), len(keys)))
    for key in keys:
        if not key.name or key.name in names:
            raise FileError(f"{path}: key {key.name!r} is empty or appears twice, expected unique keys")
        names.add(key.name)
        try:
            out += _text(key.name) + _value(key.type, key.value)
        except (struct.error, OverflowError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{path}: key {key.name!r} cannot be stored as {key.type}: {error}") from None
    offset = 0
    names.clear()
    for entry in entries:
        _check_entry(entry, names, path)
        ne = tuple(reversed(entry.shape))
        out += _text(entry.name) + struct.pack(f"<I{len(ne)}q", len(ne), *ne)
        out += struct.pack("<iQ", entry.layout.id, offset)
        offset += _padded(entry.n_bytes, alignment)
    if entries:
        out += bytes(_padded(len(out), alignment) - len(out))
    return bytes(out)


def _check_entry(entry: Entry, names: set[str], path: Path) -> None:
    what, block = f"{path}: tensor {entry.name!r}", entry.layout.n_elements
    if entry.name in names:
        raise FileError(f"{what} appears twice, expected unique names")
    if len(entry.name.encode()) > MAX_NAME:
        raise FileError(f"{what} has a name of {len(entry.name.encode())} bytes, expected at most {MAX_NAME}")
    if not 1 <= len(entry.shape) <= MAX_DIMENSIONS or min(entry.shape) < 1:
        raise FileError(f"{what} has shape {entry.shape}, expected 1 to {MAX_DIMENSIONS} positive sizes")
    if entry.shape[-1] % block:
        kind, columns = entry.layout.name, entry.shape[-1]
        raise FileError(f"{what} has rows of {columns} elements, expected a multiple of {block} for {kind}")
    names.add(entry.name)


def _put_tensor(file: BinaryIO, entry: Entry, stream: Iterator[Chunk], alignment: int, path: Path) -> None:
    n_bytes = 0
    while n_bytes < entry.n_bytes:
        chunk = next(stream, None)
        if chunk is None:
            break
        raw = _bytes(chunk)
        n_bytes += len(raw)
        if n_bytes <= entry.n_bytes:
            _put(file, raw, path)
    if n_bytes != entry.n_bytes:
        raise FileError(f"{path}: tensor {entry.name!r} was given {n_bytes} bytes of data, expected {entry.n_bytes}")
    _put(file, bytes(_padded(n_bytes, alignment) - n_bytes), path)


def _bytes(chunk: Chunk) -> memoryview:
    if isinstance(chunk, np.ndarray):
        return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
    return memoryview(chunk).cast("B")


def _put(file: BinaryIO, raw: bytes | memoryview, path: Path) -> None:
    with _reported(path):
        file.write(raw)


@contextmanager
def _new_file(temporary: Path, path: Path) -> Iterator[BinaryIO]:
    """An open file that is on the disk when the block ends well, and merely closed when it fails."""
    with _reported(path):
        file = open(temporary, "wb")
    try:
        yield file
    except BaseException:
        with suppress(OSError):  # closing writes what is left, which fails again on a full disk
            file.close()
        raise
    with _reported(path), file:
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn the system's refusal (no such folder, no permission, disk full) into one line about `path`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None


def _sync_folder(folder: Path) -> None:
    """Make the renames durable. Some file systems can't do this for a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _alignment_of(keys: Sequence[Key], path: Path) -> int:
    for key in keys:
        if key.name == "general.alignment":
            if key.type != "u32" or key.value < 1 or key.value & (key.value - 1):
                raise FileError(
                    f"{path}: key 'general.alignment' is {key.type} {key.value}, expected a u32 power of two"
                )
            return key.value
    return DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(type_text: str, value: Any) -> bytes:
    """Type number and bytes of a value."""
    if array := _ARRAY_TYPE.fullmatch(type_text):
        kind = VALUE_TYPE_BY_NAME.get(array[1])
        if kind is None or kind is ARRAY:
            raise ValueError(f"there is no type arr[{array[1]}]")
        head = struct.pack("<iiQ", ARRAY.id, kind.id, len(value))
        if kind is STRING:
            texts = value.to_list() if isinstance(value, StringArray) else value
            return head + b"".join(map(_text, texts))
        return head + _numbers(value, kind.dtype)
    kind = VALUE_TYPE_BY_NAME.get(type_text)
    if kind is None or kind is ARRAY:
        raise ValueError(f"there is no type {type_text}")
    head = struct.pack("<i", kind.id)
    if kind is STRING:
        return head + _text(value)
    if kind is BOOL and not isinstance(value, bool | np.bool_):
        raise TypeError(f"{value!r} is not a boolean")
    return head + struct.pack("<" + kind.format, value)


def _numbers(values: Any, dtype: np.dtype) -> bytes:
    """The bytes of an array; an integer or boolean that the type can't hold is an error, not wrapped."""
    given = values if isinstance(values, np.ndarray) else list(values)
    try:
        stored = np.array(given, dtype)
    except OverflowError:
        raise ValueError(f"an element is outside the range of {dtype.name}") from None
    # Python's own integers are compared one by one: as an array, large ones would become floats.
    if dtype.kind != "f" and stored.tolist() != np.asarray(given, object).tolist():
        raise ValueError(f"an element is outside the range of {dtype.name}")
    return stored.tobytes()


def _padded(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment
