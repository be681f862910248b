"""A slot as a file: what `Engine.save_slot` gives, written whole or not at all, read without running anything in it.

    8 bytes  magic "GGUFSLOT"          u32  version          u64  length of the header
    header   JSON: the value, its tensors replaced by (type, shape, offset); the model it belongs to
    data     the tensors' bytes, one after the other
    32 bytes BLAKE2b of everything before

A file that was cut, changed or made for another model is refused with one line.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import FileError

MAGIC = b"GGUFSLOT"
VERSION = 2
_FIXED = struct.Struct("<8sIQ")
_DIGEST = 32
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip


def write_slot(path: Path, data: Any, model: str = "") -> int:
    """Write to a temporary name, then rename; returns the file's bytes. `model` names what may read it back."""
    tensors: list[Tensor] = []
    offset = 0

    def pack(value: Any) -> Any:
        nonlocal offset
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            at, offset = offset, offset + host.numel() * host.element_size()
            tensors.append(host)
            return {"t": [str(host.dtype).removeprefix("torch."), list(host.shape), at]}
        if isinstance(value, list | tuple):
            return {"l" if isinstance(value, list) else "u": [pack(item) for item in value]}
        if isinstance(value, dict):
            return {"d": [[pack(key), pack(item)] for key, item in value.items()]}
        kind = type(value)
        if is_dataclass(value) and kind.__module__.startswith("ggufspec."):
            name = f"{kind.__module__}:{kind.__qualname__}"
            return {"c": [name, {f.name: pack(getattr(value, f.name)) for f in fields(value)}]}
        raise TypeError(f"a slot's state holds a {kind.__module__}.{kind.__qualname__}, which has no file form")

    header = json.dumps({"model": model, "value": pack(data)}, separators=(",", ":")).encode()
    digest = hashlib.blake2b(digest_size=_DIGEST)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            parts: Iterator[bytes | memoryview] = itertools.chain(
                (_FIXED.pack(MAGIC, VERSION, len(header)), header), map(_bytes, tensors)
            )
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def read_slot(path: Path, model: str = "") -> tuple[Any, int]:
    """(the value, the file's bytes). FileError for anything but a whole file made for this model."""
    try:
        raw = bytearray(path.read_bytes())
    except OSError as e:
        raise FileError(f"{path.name}: cannot be read ({e.strerror})") from None
    if len(raw) < _FIXED.size + _DIGEST or raw[:8] != MAGIC:
        raise FileError(f"{path.name}: not a saved slot (it does not begin with {MAGIC.decode()})")
    _, version, n_header = _FIXED.unpack_from(raw)
    if version != VERSION:
        raise FileError(f"{path.name}: version {version} of the slot format; this program reads version {VERSION}")
    whole = memoryview(raw)[:-_DIGEST]
    if hashlib.blake2b(whole, digest_size=_DIGEST).digest() != raw[-_DIGEST:]:
        raise FileError(f"{path.name}: the file is damaged (its checksum does not match)")
    header = json.loads(bytes(whole[_FIXED.size : _FIXED.size + n_header]))
    if header["model"] != model:
        raise FileError(f"{path.name}: made for model {header['model'] or 'unknown'}, not for {model or 'unknown'}")
    blob = whole[_FIXED.size + n_header :]

    def unpack(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((form, content),) = value.items()
        if form == "t":
            dtype, shape, at = _DTYPES[content[0]], content[1], content[2]
            if math.prod(shape) == 0:
                return torch.empty(shape, dtype=dtype)
            n = math.prod(shape) * dtype.itemsize
            # a copy of its own: frombuffer needs alignment, and a view would keep the whole file alive
            return torch.frombuffer(bytearray(blob[at : at + n]), dtype=dtype).reshape(shape)
        if form == "l":
            return [unpack(item) for item in content]
        if form == "u":
            return tuple(unpack(item) for item in content)
        if form == "d":
            return {unpack(key): unpack(item) for key, item in content}
        return _class(path, content[0])(**{name: unpack(item) for name, item in content[1].items()})

    return unpack(header["value"]), len(raw)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _class(path: Path, name: str) -> Any:
    """Only dataclasses of this package: a file cannot name anything else to be called."""
    module, _, qualified = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), qualified) if module.startswith("ggufspec.") else None
    except (ImportError, AttributeError):
        kind = None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise FileError(f"{path.name}: holds a {name}, which this program does not know")
    return kind
