"""Parse the header of one GGUF file: magic, keys and tensor table (versions 2 and 3, little-endian).

The bytes come from strangers. Every count and length is compared with the bytes that are left before anything
is allocated or read, and every failure is a one-line `FileError` that names the file, the key or tensor, what
was found and what was expected. Rules are those of llama.cpp's reader, which refuses nested arrays, empty and
duplicate keys, tensor names of 64 bytes and more, and offsets that leave a gap; text must be valid UTF-8 too.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from mmap import mmap
from typing import Any, NoReturn, overload

import numpy as np

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.quant.layouts import BY_ID, Layout

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ITEMS = 1 << 30  # bytes of a string, elements of an array
MAX_DIMENSIONS = 4
MAX_NAME = 63  # bytes of a tensor name
MAX_ELEMENTS = (1 << 63) - 1


@dataclass(frozen=True)
class ValueType:
    """A metadata value type. `format` is the little-endian struct and numpy code of a number."""

    name: str
    id: int
    format: str = ""

    @property
    def n_bytes(self) -> int:
        return struct.calcsize("<" + self.format)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<" + self.format)


STRING, ARRAY, BOOL = ValueType("str", 8), ValueType("arr", 9), ValueType("bool", 7, "?")
VALUE_TYPES = (
    ValueType("u8", 0, "B"), ValueType("i8", 1, "b"), ValueType("u16", 2, "H"), ValueType("i16", 3, "h"),
    ValueType("u32", 4, "I"), ValueType("i32", 5, "i"), ValueType("f32", 6, "f"), BOOL, STRING, ARRAY,
    ValueType("u64", 10, "Q"), ValueType("i64", 11, "q"), ValueType("f64", 12, "d"),
)  # fmt: skip
VALUE_TYPE_BY_ID = {t.id: t for t in VALUE_TYPES}
VALUE_TYPE_BY_NAME = {t.name: t for t in VALUE_TYPES}

# Tensor types that files may hold and nothing here decodes: number -> (name, elements and bytes of a block).
# Their sizes are known so that the rest of such a file can still be checked and shown.
OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    9: ("Q8_1", 32, 36), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in PyTorch order: the last dimension is contiguous (ne[0]).

    `offset` counts from the start of the file that holds the tensor, shard number `shard`. `n_bytes` is the
    size without padding; for a type of unknown block size it is the distance to the next tensor.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    n_bytes: int
    shard: int = 0

    @property
    def is_supported(self) -> bool:
        return self.type_id in BY_ID

    @property
    def type_name(self) -> str:
        if self.is_supported:
            return BY_ID[self.type_id].name
        return OTHER_TYPES[self.type_id][0] if self.type_id in OTHER_TYPES else f"type {self.type_id}"

    @property
    def layout(self) -> Layout:
        """The block layout. Raises `UnsupportedError` for a type that has no decoder here."""
        if not self.is_supported:
            raise UnsupportedError(
                f"tensor {self.name!r} has type {self.type_name} (number {self.type_id}), which is not "
                f"supported; supported types: {' '.join(layout.name for layout in BY_ID.values())}"
            )
        return BY_ID[self.type_id]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row: the last dimension."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes(self.columns)


class StringArray(Sequence[str]):
    """An array of strings that stays in the file; an element is decoded when it is asked for.

    The text was checked to be UTF-8 when the file was opened. `to_list()` decodes everything at once, which
    is much faster than element by element.
    """

    def __init__(self, data: mmap, starts: np.ndarray, ends: np.ndarray):
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "StringArray": ...
    def __getitem__(self, index: int | slice) -> "str | StringArray":
        if isinstance(index, slice):
            return StringArray(self._data, self._starts[index], self._ends[index])
        return self._data[int(self._starts[index]) : int(self._ends[index])].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and self.to_list() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"

    def to_list(self) -> list[str]:
        if not len(self):
            return []
        first = int(self._starts.min())
        blob = self._data[first : int(self._ends.max())]
        starts, ends = (self._starts - first).tolist(), (self._ends - first).tolist()
        return [blob[start:end].decode() for start, end in zip(starts, ends)]


@dataclass
class Header:
    """What one file says about itself. `types` holds each key's type as text: `u32`, `str`, `arr[f32]`..."""

    version: int = 0
    alignment: int = DEFAULT_ALIGNMENT
    metadata: dict[str, Any] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)


class _Cursor:
    """A position in the mapped bytes. `what` names the thing being read, for the error message."""

    def __init__(self, data: mmap, path: str):
        self.data, self.path = data, path
        self.position, self.size = 0, len(data)

    def fail(self, what: str, problem: str) -> NoReturn:
        raise FileError(f"{self.path}: {what}: {problem}")

    def need(self, n_bytes: int, what: str) -> int:
        """Move past `n_bytes` bytes and return where they start; fails when the file is shorter than that."""
        start = self.position
        if n_bytes > self.size - start:
            self.fail(what, f"expected {n_bytes} bytes at byte {start}, the file ends at byte {self.size}")
        self.position = start + n_bytes
        return start

    def number(self, format: str, what: str) -> Any:
        return struct.unpack_from("<" + format, self.data, self.need(struct.calcsize("<" + format), what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        if length > MAX_ITEMS:
            self.fail(what, f"a string of {length} bytes, expected at most {MAX_ITEMS}")
        start = self.need(length, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(what, f"has byte 0x{raw[error.start]:02x} at {error.start}, expected valid UTF-8")

    def strings(self, count: int, what: str) -> StringArray:
        """`count` strings. Only the walk from length to length can't be done for all at once."""
        first, position, unpack = self.position, self.position, struct.Struct("<Q").unpack_from
        starts, data = array("q"), self.data
        append = starts.append
        try:
            for _ in repeat(None, count):
                (length,) = unpack(data, position)
                position += 8
                append(position)
                position += length
        except (struct.error, OverflowError):
            self.fail(
                f"{what}, string {len(starts)}",
                f"expected to end before byte {self.size}, the end of the file",
            )
        if position > self.size:
            self.fail(
                f"{what}, string {len(starts) - 1}",
                f"expected to end before byte {self.size}, the end of the file",
            )
        self.position = position
        begin = np.frombuffer(starts, np.int64) if count else np.zeros(0, np.int64)
        end = np.append(begin[1:] - 8, position) if count else begin
        self._check_text(first, begin, end, what)
        return StringArray(data, begin, end)

    def _check_text(self, first: int, begin: np.ndarray, end: np.ndarray, what: str) -> None:
        """All strings are UTF-8 if their concatenation is and none begins inside a character."""
        region = np.frombuffer(self.data, np.uint8, self.position - first, first)
        is_text = np.ones(len(region), bool)
        for i in range(1, 9):
            is_text[begin - first - i] = False
        heads = region[(begin - first)[begin < end]]
        try:
            region[is_text].tobytes().decode()
            valid = not ((heads & 0xC0) == 0x80).any()
        except UnicodeDecodeError:
            valid = False
        if valid:
            return
        for i, (start, stop) in enumerate(zip(begin.tolist(), end.tolist())):
            try:
                self.data[start:stop].decode()
            except UnicodeDecodeError:
                self.fail(f"{what}, string {i}", "expected valid UTF-8")


def parse_header(data: mmap, path: str) -> Header:
    """Read and check everything before the tensor data. Raises `FileError`; see the module's text."""
    cursor, header = _Cursor(data, path), Header()
    start = cursor.need(4, "magic")
    if data[start : start + 4] != MAGIC:
        cursor.fail("magic", f"found {data[start : start + 4]!r}, expected {MAGIC!r}: not a GGUF file")
    header.version = _version(cursor)
    n_tensors, n_keys = cursor.number("q", "tensor count"), cursor.number("q", "key count")
    # The smallest key is 1 + 8 bytes of name, its type and one byte; the smallest tensor has no dimension.
    for count, smallest, what in ((n_keys, 14, "key count"), (n_tensors, 24, "tensor count")):
        if not 0 <= count <= (cursor.size - cursor.position) // smallest:
            cursor.fail(what, f"found {count}, expected a number that fits a file of {cursor.size} bytes")
    for i in range(n_keys):
        key = cursor.string(f"name of key {i}")
        if not key:
            cursor.fail(f"name of key {i}", "is empty, expected at least one character")
        if key in header.metadata:
            cursor.fail(f"key {key!r}", "appears twice, expected unique keys")
        header.types[key], header.metadata[key] = _value(cursor, f"key {key!r}")
    header.alignment = _alignment(cursor, header)
    entries = [_tensor_entry(cursor, i) for i in range(n_tensors)]
    header.tensors = _place_tensors(cursor, entries, header.alignment)
    return header


def _version(cursor: _Cursor) -> int:
    version = cursor.number("I", "version")
    if version and version & 0xFFFF == 0:
        cursor.fail("version", f"found {version:#010x}: a big-endian file, expected little-endian")
    if version not in VERSIONS:
        cursor.fail("version", f"found {version}, expected {' or '.join(map(str, VERSIONS))}")
    return version


def _value_type(cursor: _Cursor, what: str) -> ValueType:
    number = cursor.number("i", what)
    if number not in VALUE_TYPE_BY_ID:
        cursor.fail(what, f"has value type {number}, expected 0 to {max(VALUE_TYPE_BY_ID)}")
    return VALUE_TYPE_BY_ID[number]


def _value(cursor: _Cursor, what: str) -> tuple[str, Any]:
    """One value and the text of its type. Numbers in arrays become a read-only numpy array."""
    kind = _value_type(cursor, what)
    if kind is STRING:
        return kind.name, cursor.string(what)
    if kind is BOOL:
        return kind.name, cursor.number("B", what) != 0
    if kind is not ARRAY:
        return kind.name, cursor.number(kind.format, what)
    element, count = _value_type(cursor, what), cursor.number("Q", what)
    if element is ARRAY:
        cursor.fail(what, "is an array of arrays, expected an array of numbers, booleans or strings")
    smallest = 8 if element is STRING else element.n_bytes
    if count > MAX_ITEMS or count * smallest > cursor.size - cursor.position:
        left = cursor.size - cursor.position
        cursor.fail(what, f"has {count} elements of type {element.name}, expected no more than fit {left} bytes")
    name = f"arr[{element.name}]"
    if element is STRING:
        return name, cursor.strings(count, what)
    start = cursor.need(count * smallest, what)
    values = np.frombuffer(cursor.data, np.dtype("u1") if element is BOOL else element.dtype, count, start)
    # A copy: unaligned views are slow, and a few small arrays are not worth keeping pages mapped for.
    values = values != 0 if element is BOOL else values.copy()
    values.flags.writeable = False
    return name, values


def _alignment(cursor: _Cursor, header: Header) -> int:
    what, value = "key 'general.alignment'", header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    kind = header.types.get("general.alignment", "u32")
    if kind != "u32":
        cursor.fail(what, f"has type {kind}, expected u32")
    if value == 0 or value & (value - 1):
        cursor.fail(what, f"is {value}, expected a power of two")
    return value


def _tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (PyTorch order), type number and offset of one tensor, each checked on its own."""
    name = cursor.string(f"name of tensor {index}")
    what = f"tensor {name!r}"
    if len(name.encode()) > MAX_NAME:
        cursor.fail(what, f"has a name of {len(name.encode())} bytes, expected at most {MAX_NAME}")
    n_dimensions = cursor.number("I", what)
    if n_dimensions > MAX_DIMENSIONS:
        cursor.fail(what, f"has {n_dimensions} dimensions, expected at most {MAX_DIMENSIONS}")
    ne = [cursor.number("q", what) for _ in range(n_dimensions)] or [1]
    if min(ne) < 1 or math.prod(ne) > MAX_ELEMENTS:
        cursor.fail(what, f"has dimensions {ne}, expected positive numbers whose product is below 2^63")
    return name, tuple(reversed(ne)), cursor.number("i", what), cursor.number("Q", what)


def _place_tensors(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> list[TensorInfo]:
    """Check sizes and offsets: tensors lie in table order, each padded to the alignment, inside the file."""
    data_start = _pad(cursor.position, alignment)
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    end = 0  # of the previous tensor, relative to the data; `is_exact` is False after a type of unknown size
    is_exact = True
    for i, (name, shape, type_id, offset) in enumerate(entries):
        what = f"tensor {name!r}"
        if name in names:
            cursor.fail(what, "appears twice, expected unique names")
        names.add(name)
        if is_exact and offset != end:
            cursor.fail(what, f"has offset {offset}, expected {end} (the end of the tensor before it)")
        if not is_exact and (offset < end or offset % alignment):
            cursor.fail(what, f"has offset {offset}, expected a multiple of {alignment} from {end} on")
        if type_id in BY_ID:
            block, block_bytes = BY_ID[type_id].n_elements, BY_ID[type_id].n_bytes
        else:
            _, block, block_bytes = OTHER_TYPES.get(type_id, ("", 1, 0))
        if shape[-1] % block:
            kind = TensorInfo(name, shape, type_id, 0, 0).type_name
            cursor.fail(what, f"has rows of {shape[-1]} elements, expected a multiple of {block} for {kind}")
        if block_bytes:
            n_bytes, is_exact = math.prod(shape) // block * block_bytes, True
        else:
            following = entries[i + 1][3] if i + 1 < len(entries) else cursor.size - data_start
            n_bytes, is_exact = max(0, following - offset), False
        start = data_start + offset
        if start + n_bytes > cursor.size:
            cut = f"expected at most {cursor.size}, the file's size: the file is cut short"
            cursor.fail(what, f"ends at byte {start + n_bytes}, {cut}")
        tensors.append(TensorInfo(name, shape, type_id, start, n_bytes))
        end = _pad(offset + n_bytes, alignment)
    return tensors


def _pad(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment
