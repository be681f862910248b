"""Both importance matrix formats, against the reference reader, and what is refused."""

import struct

import libgguf
import numpy as np
import pytest
from files import importance, weights, write_imatrix, write_legacy_imatrix

from ggufspec.errors import ConfigError, FileError
from ggufspec.quant.imatrix import importance_of, read_imatrix


@pytest.fixture
def entries():
    return importance(weights())


def test_gguf_equals_reference(tmp_path, entries):
    entries["blk.0.attn_q.weight"][1][:] = 0  # never reached by the calibration text
    path = write_imatrix(tmp_path / "i.gguf", entries)
    ours, theirs = read_imatrix(path), libgguf.load_imatrix(path)
    assert ours.values.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours.values[name], np.asarray(values).reshape(-1))
    assert (ours.values["blk.0.attn_q.weight"] == 1).all()
    assert (ours.file, ours.dataset, ours.n_chunks) == (str(path), "calibration.txt", 12)


@pytest.mark.parametrize("tail", [True, False])
def test_legacy_equals_reference(tmp_path, entries, tail):
    path = write_legacy_imatrix(tmp_path / "i.dat", entries, tail)
    ours, theirs = read_imatrix(path), libgguf.load_imatrix(path)
    assert ours.values.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours.values[name], np.asarray(values).reshape(-1))
    assert (ours.dataset, ours.n_chunks) == (("wiki.txt", 7) if tail else (None, 0))


def test_include_and_exclude(tmp_path, entries):
    path = write_imatrix(tmp_path / "i.gguf", entries)
    only = read_imatrix(path, include=["attn_q", "ffn"]).values
    assert only and all("attn_q" in name or "ffn" in name for name in only)
    rest = read_imatrix(path, exclude=["attn_q", "ffn"]).values
    assert sorted([*only, *rest]) == sorted(entries)
    with pytest.raises(ConfigError, match="exclude one another"):
        read_imatrix(path, include=["a"], exclude=["b"])
    with pytest.raises(ConfigError, match="no imatrix entry is left"):
        read_imatrix(path, include=["nothing"])


def test_importance_of_a_tensor(tmp_path, entries):
    matrix = read_imatrix(write_imatrix(tmp_path / "i.gguf", entries))
    assert importance_of(matrix, "experts.weight", 512, 3).shape == (3, 512)
    assert importance_of(matrix, "no.weight", 512, 1) is None
    with pytest.raises(ConfigError, match="imatrix size 512 is different from tensor size 256 for output.weight"):
        importance_of(matrix, "output.weight", 256, 1)
    matrix.values["token_embd.weight"] = np.ones(7, np.float32)
    assert importance_of(matrix, "token_embd.weight", 512, 1) is None


@pytest.mark.parametrize("key", ["datasets", "chunk_count", "chunk_size"])
def test_missing_metadata(tmp_path, entries, key):
    with pytest.raises(FileError, match=f"missing imatrix metadata .*imatrix.{key}"):
        read_imatrix(write_imatrix(tmp_path / "i.gguf", entries, **{key: True}))


def test_refusals(tmp_path, entries):
    with pytest.raises(FileError, match="failed to load imatrix"):
        read_imatrix(tmp_path / "none.dat")
    entries["output.weight"][0][0, 3] = np.nan
    with pytest.raises(FileError, match="non-finite value nan for 'output.weight' at index 3"):
        read_imatrix(write_imatrix(tmp_path / "nan.gguf", entries))
    cut = tmp_path / "cut.dat"
    cut.write_bytes(write_legacy_imatrix(tmp_path / "i.dat", entries).read_bytes()[:-500])
    with pytest.raises(FileError, match="failed to load imatrix"):
        read_imatrix(cut)
    (tmp_path / "zero.dat").write_bytes(struct.pack("<i", 0))
    with pytest.raises(FileError, match="0 entries"):
        read_imatrix(tmp_path / "zero.dat")
