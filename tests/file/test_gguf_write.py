"""Writing GGUF files: round trips, the reference reader, shards, and nothing left behind after a failure."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from families import make_qwen3
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_gguf import FORMATS, array_key, build, key, tensor

from ggufspec.errors import FileError
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.gguf_write import Entry, Key, keys_of, write_gguf, write_split
from ggufspec.quant.layouts import ALL, F16, F32, Q8_0

INTEGERS = [t for t in FORMATS if t[0] in "ui"]


def copy(file: GGUFFile, path: Path) -> None:
    entries = [Entry(t.name, t.shape, t.layout) for t in file.tensors.values()]
    write_gguf(path, keys_of(file), entries, (file.read(name) for name in file.tensors), version=file.version)


def integers(type: str) -> st.SearchStrategy[int]:
    limits = np.iinfo(np.dtype(FORMATS[type]))
    return st.integers(int(limits.min), int(limits.max))


def values() -> st.SearchStrategy[tuple[str, object]]:
    """(type, value) of any key."""
    text = st.text(st.characters(codec="utf-8"), max_size=20)
    numbers = {t: integers(t) for t in INTEGERS}
    numbers |= {"f32": st.floats(width=32), "f64": st.floats(), "bool": st.booleans()}
    scalars = [st.tuples(st.just(t), s) for t, s in (numbers | {"str": text}).items()]
    arrays = [st.tuples(st.just(f"arr[{t}]"), st.lists(s, max_size=5)) for t, s in (numbers | {"str": text}).items()]
    return st.one_of(*scalars, *arrays)


def names(max_bytes: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), min_size=1, max_size=max_bytes // 4)


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[Entry, bytes]]:
    made = []
    for name in draw(st.lists(names(63), max_size=4, unique=True)):
        layout = draw(st.sampled_from(ALL))
        rows = draw(st.lists(st.integers(1, 3), max_size=3))
        entry = Entry(name, (*rows, layout.n_elements * draw(st.integers(1, 2))), layout)
        made.append((entry, np.random.default_rng(len(made)).bytes(entry.n_bytes)))
    return made


@settings(deadline=None, max_examples=80)
@given(
    keys=st.dictionaries(
        names(80).filter(lambda n: n != "general.alignment" and n[:6] != "split."), values(), max_size=6
    ),
    tensors=tensors(),
    alignment=st.sampled_from([None, 1, 8, 32, 256]),
    version=st.sampled_from([2, 3]),
)
def test_what_is_written_is_read(tmp_path_factory, keys, tensors, alignment, version):
    path = tmp_path_factory.mktemp("w") / "m.gguf"
    listed = [Key(name, *value) for name, value in keys.items()]
    if alignment:
        listed.append(Key("general.alignment", "u32", alignment))
    n_bytes = write_gguf(path, listed, [e for e, _ in tensors], (raw for _, raw in tensors), version=version)
    assert n_bytes == path.stat().st_size
    file = open_gguf(path)
    assert file.version == version and file.alignment == (alignment or 32)
    assert list(file.metadata) == [k.name for k in listed] and [file.types[k.name] for k in listed] == [
        k.type for k in listed
    ]
    for k in listed:
        stored = file.metadata[k.name]
        stored = list(stored) if k.type.startswith("arr[") else stored
        assert (
            np.array_equal(stored, k.value, equal_nan=True)
            if k.type[-4:-1] in ("f32", "f64")
            else stored == k.value or (stored != stored and k.value != k.value)
        )
    assert list(file.tensors) == [e.name for e, _ in tensors]
    for entry, raw in tensors:
        assert file.read(entry.name).tobytes() == raw and file.tensors[entry.name].shape == entry.shape
    copy(file, path.with_name("copy.gguf"))
    assert path.with_name("copy.gguf").read_bytes() == path.read_bytes()


def test_bytes_of_a_small_file(tmp_path):
    """Against bytes put together by hand from the format's description."""
    write_gguf(
        tmp_path / "m.gguf",
        [Key("general.architecture", "str", "toy"), Key("a", "arr[i16]", [1, -2]), Key("s", "arr[str]", ["é", ""])],
        [Entry("x", (2, 3), F32), Entry("y", (4,), F16)],
        [np.arange(6, dtype=np.float32).reshape(2, 3), b"\1\2\3", b"\4\5\6\7\x08"],
    )
    data = np.arange(6, dtype="<f4").tobytes() + bytes(8) + bytes(range(1, 9)) + bytes(24)
    keys = [key("general.architecture", "str", "toy"), array_key("a", "i16", [1, -2]), array_key("s", "str", ["é", ""])]
    expected = build(keys, [tensor("x", [3, 2], 0, 0), tensor("y", [4], 1, 32)], data)
    assert (tmp_path / "m.gguf").read_bytes() == expected


def test_the_reference_reader_agrees(tmp_path):
    path = make_qwen3(tmp_path / "m.gguf", n_layers=1, type="Q8_0")
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert tuple(reversed(t.shape.tolist())) == info.shape and t.data_offset == info.offset
        assert t.tensor_type.name == info.type_name and (t.data.view(np.uint8) == ours.read(t.name)).all()
    for name, value in ours.metadata.items():
        field = theirs.fields[name].contents()
        assert field == (list(value) if ours.types[name].startswith("arr[") else value)


def test_split_set(tmp_path):
    file = open_gguf(make_qwen3(tmp_path / "m.gguf", n_layers=1))
    entries = [Entry(t.name, t.shape, t.layout) for t in file.tensors.values()]
    shards = [entries[:2], entries[2:3], entries[3:]]
    n_bytes = write_split(tmp_path / "s", keys_of(file), shards, (file.read(e.name) for e in entries))
    paths = sorted(tmp_path.glob("s-*.gguf"))
    assert [p.name for p in paths] == [f"s-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert n_bytes == sum(p.stat().st_size for p in paths)
    joined = open_gguf(paths[0])
    assert list(joined.tensors) == list(file.tensors)
    assert all((joined.read(n) == file.read(n)).all() for n in file.tensors)
    second = open_gguf_alone(paths[1])
    assert second == ["split.no", "split.count", "split.tensors.count"]
    assert list(joined.metadata)[:-3] == list(file.metadata)


def open_gguf_alone(path: Path) -> list[str]:
    return [name for name in gguf.GGUFReader(path).fields if not name.startswith("GGUF.")]


ENTRY = Entry("t", (32,), Q8_0)


@pytest.mark.parametrize(
    "keys, entries, chunks, expected",
    [
        ([Key("a", "u8", 256)], [], [], "key 'a' cannot be stored as u8"),
        ([Key("a", "u8", "x")], [], [], "key 'a' cannot be stored as u8"),
        ([Key("a", "arr[u8]", [1, -1])], [], [], "key 'a' cannot be stored as arr[u8]"),
        ([Key("a", "arr[u8]", np.array([300]))], [], [], "key 'a' cannot be stored as arr[u8]"),
        ([Key("a", "arr[i32]", [1.5])], [], [], "key 'a' cannot be stored as arr[i32]"),
        ([Key("a", "str", 5)], [], [], "key 'a' cannot be stored as str"),
        ([Key("a", "bool", 1)], [], [], "key 'a' cannot be stored as bool"),
        ([Key("a", "number", 1)], [], [], "there is no type number"),
        ([Key("a", "arr[arr]", [])], [], [], "there is no type arr[arr]"),
        ([Key("a", "u8", 1), Key("a", "u8", 1)], [], [], "key 'a' is empty or appears twice"),
        ([Key("", "u8", 1)], [], [], "key '' is empty or appears twice"),
        ([Key("general.alignment", "u32", 24)], [], [], "expected a u32 power of two"),
        ([], [ENTRY, ENTRY], [], "tensor 't' appears twice"),
        ([], [Entry("n" * 64, (32,), Q8_0)], [], "expected at most 63"),
        ([], [Entry("t", (33,), Q8_0)], [], "rows of 33 elements, expected a multiple of 32 for Q8_0"),
        ([], [Entry("t", (0,), F32)], [], "has shape (0,)"),
        ([], [Entry("t", (1,) * 5, F32)], [], "expected 1 to 4 positive sizes"),
        ([], [ENTRY], [bytes(33)], "tensor 't' was given 33 bytes of data, expected 34"),
        ([], [ENTRY], [bytes(20), bytes(20)], "tensor 't' was given 40 bytes of data, expected 34"),
        ([], [ENTRY], [bytes(34), bytes(1)], "more tensor data than the table"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path, keys, entries, chunks, expected):
    with pytest.raises(FileError) as error:
        write_gguf(tmp_path / "m.gguf", keys, entries, chunks)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_iterator_keeps_the_old_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def chunks():
        yield bytes(10)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_gguf(path, [], [ENTRY], chunks())
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"] and path.read_bytes() == b"old"


def test_a_folder_in_the_way_or_missing_is_told(tmp_path):
    with pytest.raises(FileError, match="cannot be written: is a directory"):
        write_gguf(tmp_path, [], [], [])
    with pytest.raises(FileError, match="cannot be written: No such file or directory"):
        write_gguf(tmp_path / "none" / "m.gguf", [], [], [])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="cannot be written: is a device or pipe"):
        write_gguf(tmp_path / "pipe", [], [], [])
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"] and (tmp_path / "pipe").is_fifo()


def test_a_split_set_appears_as_a_whole_or_not_at_all(tmp_path):
    with pytest.raises(FileError, match="tensor 'u' was given 0 bytes"):
        write_split(tmp_path / "s", [], [[ENTRY], [Entry("u", (32,), Q8_0)]], [bytes(34)])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for the disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    script = (
        "import sys; from ggufspec.gguf_write import *; from ggufspec.quant.layouts import F32\n"
        "try: write_gguf(sys.argv[1], [], [Entry('t', (1 << 20,), F32)], (bytes(1 << 16) for _ in range(64)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    path = tmp_path / "m.gguf"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], preexec_fn=limit, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"FileError {path}: cannot be written: File too large\n", done
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    script = (
        "import sys, os, signal; from ggufspec.gguf_write import *; from ggufspec.quant.layouts import F32\n"
        "def chunks():\n"
        "    yield bytes(1 << 16)\n"
        "    print(os.listdir(os.path.dirname(sys.argv[1])))\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    yield bytes(1 << 16)\n"
        "try: write_gguf(sys.argv[1], [], [Entry('t', (1 << 20,), F32)], chunks())\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m.gguf")], capture_output=True, text=True, timeout=60
    )
    seen, said = done.stdout.splitlines()
    assert ".tmp" in seen and said == "interrupted" and os.listdir(tmp_path) == []


def test_large_unsigned_numbers_keep_every_bit(tmp_path):
    values = [0, 2**63 + 1, 2**64 - 1]
    write_gguf(tmp_path / "m.gguf", [Key("k", "arr[u64]", values)], [], iter(()))
    assert open_gguf(tmp_path / "m.gguf").metadata["k"].tolist() == values
