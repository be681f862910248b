"""Saved slots: written whole, read exactly, refused when anything is off."""

from dataclasses import replace

import pytest
import torch
from families import make_qwen3

from ggufspec.cache import SlotState
from ggufspec.errors import FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import read_config
from ggufspec.slot import Checkpoint
from ggufspec.slot_file import read_slot, write_slot
from ggufspec.tools.server.load import digest_of


def sample():
    torch.manual_seed(0)
    kv = (torch.randint(0, 255, (5, 2, 34), dtype=torch.uint8), torch.randn(5, 2, 16).to(torch.bfloat16))
    state = SlotState(5, [kv, None], [None, torch.randn(7)])
    point = Checkpoint(3, [None, torch.randn(7)], {"h": torch.zeros(0, 4), "n": 3})
    drafter = ("draft-mtp", torch.arange(3))
    return {"tokens": [1, 2, 3, 4, 5], "cache": state, "drafter": drafter, "checkpoints": [point]}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dict__"):
        return type(a) is type(b) and equal(vars(a), vars(b))
    return a == b


def test_round_trip(tmp_path):
    path = tmp_path / "slot.bin"
    n = write_slot(path, sample(), "m")
    data, n_read = read_slot(path, "m")
    assert n == n_read == path.stat().st_size
    assert equal(data, sample())
    assert [p.name for p in tmp_path.iterdir()] == ["slot.bin"]


def test_every_cut_and_every_flip_is_refused(tmp_path):
    path = tmp_path / "slot.bin"
    write_slot(path, sample(), "m")
    raw = path.read_bytes()
    for n in range(0, len(raw), 37):
        path.write_bytes(raw[:n])
        with pytest.raises(FileError, match="slot.bin"):
            read_slot(path, "m")
    for i in range(0, len(raw), 41):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 0x10]) + raw[i + 1 :])
        with pytest.raises(FileError, match="slot.bin"):
            read_slot(path, "m")


def test_another_model_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "slot.bin"
    write_slot(path, sample(), "one")
    with pytest.raises(FileError, match="made for model one, not for two"):
        read_slot(path, "two")
    with pytest.raises(FileError, match="nope.bin: cannot be read"):
        read_slot(tmp_path / "nope.bin", "one")


def test_models_of_one_shape_are_told_apart(tmp_path):
    """A fine-tune has the sizes and types of its origin; so has the same model with another rotation."""
    def digest(*seeds, name="m.gguf", **config):
        files = [open_gguf(make_qwen3(tmp_path / name, seed=seed, n_layers=1)) for seed in seeds]
        return digest_of(files, replace(read_config(files[0]), **config))

    base = read_config(open_gguf(make_qwen3(tmp_path / "b.gguf", n_layers=1))).rope
    own = digest(1)
    assert own == digest(1, name="copy.gguf") and len(own) == 16
    others = {digest(2), digest(1, 1), digest(1, 2), digest(1, rope=replace(base, base=5e5))}
    assert len(others) == 4 and own not in others


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "slot.bin"
    write_slot(path, sample(), "m")
    before = path.read_bytes()
    with pytest.raises(TypeError, match="no file form"):
        write_slot(path, {"x": object()}, "m")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_file_cannot_name_a_class_outside_the_package(tmp_path, monkeypatch):
    path = tmp_path / "slot.bin"
    write_slot(path, sample(), "m")
    import hashlib

    raw = path.read_bytes()[:-32].replace(b"ggufspec.cache:SlotState", b"subprocess:Popenzzzzzzzz")
    path.write_bytes(raw + hashlib.blake2b(raw, digest_size=32).digest())
    with pytest.raises(FileError, match="does not know"):
        read_slot(path, "m")
