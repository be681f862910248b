"""GGUF bytes put together by hand, right or wrong: the tests' own view of the format, apart from the writer."""

import struct
from collections.abc import Sequence

KEY_TYPES = dict(u8=0, i8=1, u16=2, i16=3, u32=4, i32=5, f32=6, bool=7, str=8, arr=9, u64=10, i64=11, f64=12)
FORMATS = dict(u8="B", i8="b", u16="H", i16="h", u32="I", i32="i", f32="f", bool="?", u64="Q", i64="q", f64="d")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(type: str, item: object) -> bytes:
    return text(item) if type == "str" else struct.pack("<" + FORMATS[type], item)  # type: ignore[arg-type]


def key(name: str | bytes, type: str | int, item: object = b"") -> bytes:
    """A key; a numeric `type` is written as it is, followed by `item` as raw bytes."""
    if isinstance(type, int):
        return text(name) + struct.pack("<i", type) + item  # type: ignore[operator]
    return text(name) + struct.pack("<i", KEY_TYPES[type]) + value(type, item)


def array_key(name: str, type: str | int, items: Sequence[object], count: int | None = None) -> bytes:
    kind = type if isinstance(type, int) else KEY_TYPES[type]
    body = b"" if isinstance(type, int) else b"".join(value(type, item) for item in items)
    return text(name) + struct.pack("<iiQ", 9, kind, len(items) if count is None else count) + body


def tensor(name: str | bytes, ne: Sequence[int], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}qiQ", len(ne), *ne, type_id, offset)


def build(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    out = magic + struct.pack("<I", version)
    out += struct.pack("<q", len(tensors) if n_tensors is None else n_tensors)
    out += struct.pack("<q", len(keys) if n_keys is None else n_keys)
    out += b"".join(keys) + b"".join(tensors)
    return out + bytes(-len(out) % alignment) + data if tensors else out
