"""A damaged file either opens and reads cleanly or is refused with one line; nothing else can happen."""

import random
from pathlib import Path

import numpy as np
import pytest
from raw_gguf import array_key, build, key, tensor

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.gguf_file import open_gguf


def small_file() -> tuple[bytes, int]:
    """A valid file with every kind of key and several tensor types, and where its last tensor's data ends."""
    keys = [key("general.architecture", "str", "toy"), key("general.alignment", "u32", 32)]
    keys += [key(f"k.{t}", t, 1) for t in ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "u64", "i64", "f64")]
    keys += [array_key(f"a.{t}", t, [1, 0, 1]) for t in ("u8", "i16", "u32", "f32", "bool", "i64")]
    keys += [array_key("a.str", "str", ["Ġthe", "é", "漢字", "", "x"])]
    sizes = [
        ("f32", [5, 2], 0, 40),
        ("f16", [8], 1, 16),
        ("q8", [64, 3], 8, 204),
        ("q4k", [256], 12, 144),
        ("i", [3], 27, 24),
    ]
    tensors, offset = [], 0
    for name, ne, type_id, n_bytes in sizes:
        tensors.append(tensor(name, ne, type_id, offset))
        last = offset + n_bytes
        offset += (n_bytes + 31) // 32 * 32
    data = np.random.default_rng(3).integers(0, 256, offset, np.uint8).tobytes()
    raw = build(keys, tensors, data)
    return raw, len(raw) - offset + last


def outcome(path: Path) -> str:
    """'clean' if the file opens and everything in it can be used, 'refused' for one proper line."""
    try:
        file = open_gguf(path)
        for value in file.metadata.values():
            str(value.to_list() if hasattr(value, "to_list") else value)
        for name in file.tensors:
            try:
                file.read(name).sum()
            except UnsupportedError as error:
                assert repr(name) in str(error)
        return "clean"
    except FileError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") and "\n" not in message and len(message) > len(f"{path}: ")
        return "refused"


def test_truncation_at_every_byte(tmp_path):
    raw, last = small_file()
    path = tmp_path / "m.gguf"
    for n in range(len(raw)):
        path.write_bytes(raw[:n])
        assert outcome(path) == ("clean" if n >= last else "refused"), n


@pytest.mark.parametrize("seed", range(4))
def test_random_damage(tmp_path, seed):
    """1500 files a seed with one to four bytes changed; both outcomes must occur."""
    raw, _ = small_file()
    pick, path = random.Random(seed), tmp_path / "m.gguf"
    counts = {"clean": 0, "refused": 0}
    for _ in range(1500):
        damaged = bytearray(raw)
        for _ in range(pick.randint(1, 4)):
            place = pick.randrange(len(raw))
            damaged[place] = pick.choice((damaged[place] ^ 1 << pick.randrange(8), 0, 0xFF, 0x7F, pick.randrange(256)))
        path.write_bytes(damaged)
        counts[outcome(path)] += 1
    assert min(counts.values()) > 100, counts


def test_every_header_byte_set_to_extremes(tmp_path):
    raw, _ = small_file()
    path = tmp_path / "m.gguf"
    for place in range(len(raw) - 500):
        for byte in (0x7F, 0xFF):
            path.write_bytes(raw[:place] + bytes([byte]) + raw[place + 1 :])
            outcome(path)


def test_damage_cut_and_pasted(tmp_path):
    """Pieces deleted, doubled or moved: lengths and counts that point to the wrong places."""
    raw, _ = small_file()
    pick, path = random.Random(9), tmp_path / "m.gguf"
    for _ in range(1000):
        a, b, c = sorted(pick.randrange(len(raw)) for _ in range(3))
        path.write_bytes(pick.choice((raw[:a] + raw[b:], raw[:b] + raw[a:], raw[:a] + raw[b:c] + raw[a:b] + raw[c:])))
        outcome(path)
