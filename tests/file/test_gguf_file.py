"""Opening GGUF files: what is read, and what each kind of wrong file is told."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from raw_gguf import array_key, build, key, tensor, text

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_header import OTHER_TYPES
from ggufspec.quant.layouts import ALL

NUMBERS = {
    "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5, "bool": True,
    "u64": 2**64 - 1, "i64": -(2**63), "f64": 1e-300,
}  # fmt: skip


def written(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path, version):
    keys = [key(f"k.{name}", name, value) for name, value in NUMBERS.items()] + [key("k.str", "str", "naïve 漢字 🙂")]
    keys += [array_key(f"a.{name}", name, [value, value]) for name, value in NUMBERS.items()]
    keys += [array_key("a.str", "str", ["", "x", "é"]), array_key("a.empty", "str", []), array_key("a.none", "u32", [])]
    file = open_gguf(written(tmp_path, build(keys, version=version)))
    assert file.version == version and file.alignment == 32 and file.tensors == {}
    for name, value in NUMBERS.items():
        assert file.metadata[f"k.{name}"] == value and file.types[f"k.{name}"] == name
        assert file.metadata[f"a.{name}"].tolist() == [value, value] and file.types[f"a.{name}"] == f"arr[{name}]"
        assert not file.metadata[f"a.{name}"].flags.writeable
    assert file.metadata["k.str"] == "naïve 漢字 🙂"
    assert list(file.metadata["a.str"]) == ["", "x", "é"] and file.metadata["a.str"][-1] == "é"
    assert file.metadata["a.str"][1:] == ["x", "é"]
    assert list(file.metadata["a.empty"]) == [] and file.metadata["a.none"].tolist() == []


def test_a_boolean_is_true_for_any_byte_but_zero(tmp_path):
    raw = build([key("b", 7, b"\x02"), text("a") + struct.pack("<iiQ", 9, 7, 2) + b"\x00\x80"])
    file = open_gguf(written(tmp_path, raw))
    assert file.metadata["b"] is True and file.metadata["a"].tolist() == [False, True]


@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_every_tensor_type_and_its_bytes(tmp_path, layout):
    shape = (2, 3, 2 * layout.n_elements)
    n_bytes = 6 * layout.row_bytes(shape[-1])
    data = np.random.default_rng(layout.id).integers(0, 256, n_bytes, np.uint8)
    raw = build([], [tensor("a", shape[::-1], layout.id, 0)], data.tobytes())
    file = open_gguf(written(tmp_path, raw))
    info = file.tensors["a"]
    assert info.shape == shape and info.layout is layout and info.n_bytes == n_bytes
    assert (info.rows, info.columns, info.n_elements) == (6, shape[-1], 6 * shape[-1])
    view = file.read("a")
    assert view.shape == (2, 3, info.row_bytes) and not view.flags.writeable and not view.flags.owndata
    assert (view.reshape(-1) == data).all()


def test_the_reference_writer_s_file(tmp_path):
    """A file by the gguf package, with its own alignment, reads back in every key and tensor."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(64)
    writer.add_block_count(3)
    writer.add_array("llama.list", ["a", "bc", "déf"])
    writer.add_array("llama.numbers", [1, 2, 3])
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.standard_normal((3, 5 + i)).astype(np.float32) for i in range(4)}
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert file.architecture == "llama" and file.alignment == 64
    assert file.get("llama.list", list[str]) == ["a", "bc", "déf"]
    assert file.get("llama.numbers", list[int]) == [1, 2, 3]
    for name, data in tensors.items():
        assert (file.read(name).view("<f4") == data).all()


def test_sizes_of_the_types_without_a_decoder_are_the_reference_s():
    for number, (name, n_elements, n_bytes) in OTHER_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        # The gguf package gives a Q8_1 block 40 bytes; ggml stores scale and sum as halves, 36 in all.
        expected = (32, 36) if name == "Q8_1" else gguf.GGML_QUANT_SIZES[known]
        assert known.name == name and (n_elements, n_bytes) == expected


ONE = tensor("t", [4], 0, 0)
DATA = bytes(32)
WRONG = {
    "empty file": (b"", "the file is empty"),
    "magic": (build(magic=b"GGML"), "magic: found b'GGML', expected b'GGUF'"),
    "version 0": (build(version=0), "version: found 0, expected 2 or 3"),
    "version 1": (build(version=1), "version: found 1, expected 2 or 3"),
    "version 4": (build(version=4), "version: found 4, expected 2 or 3"),
    "big-endian": (build(version=3 << 24), "big-endian file, expected little-endian"),
    "negative tensor count": (build(n_tensors=-1), "tensor count: found -1"),
    "negative key count": (build(n_keys=-5), "key count: found -5"),
    "huge tensor count": (build(n_tensors=2**60), "tensor count: found 1152921504606846976"),
    "huge key count": (build(n_keys=2**60), "key count: found 1152921504606846976"),
    "empty key": (build([key("", "u32", 1)]), "name of key 0: is empty"),
    "key twice": (build([key("a", "u32", 1), key("a", "u8", 2)]), "key 'a': appears twice"),
    "key type": (build([key("a", 13, bytes(8))]), "key 'a': has value type 13, expected 0 to 12"),
    "negative key type": (build([key("a", -1, bytes(8))]), "key 'a': has value type -1"),
    "element type": (build([array_key("a", 77, [], 1), bytes(32)], n_keys=1), "key 'a': has value type 77"),
    "array of arrays": (build([array_key("a", 9, [], 1), bytes(32)], n_keys=1), "key 'a': is an array of arrays"),
    "huge array": (build([array_key("a", "u8", [], 2**40)]), "key 'a': has 1099511627776 elements of type u8"),
    "array past the end": (build([array_key("a", "u64", [1, 2], 3)]), "key 'a': has 3 elements of type u64"),
    "strings past the end": (build([array_key("a", "str", ["x"], 2), bytes(7)], n_keys=1), "key 'a', string 1"),
    "huge string": (build([key("a", 8, struct.pack("<Q", 2**63))]), "key 'a': a string of 9223372036854775808 bytes"),
    "string past the end": (build([key("a", 8, struct.pack("<Q", 2**20))]), "key 'a': expected 1048576 bytes"),
    "string of an array too long": (
        build([array_key("a", "str", ["ok", "no"])])[:-10] + struct.pack("<Q", 2**64 - 1) + b"no",
        "key 'a', string 1: expected to end before byte",
    ),
    "key name in latin-1": (build([key(b"na\xefve", "u32", 1)]), "name of key 0: has byte 0xef at 2, expected valid"),
    "value in latin-1": (build([key("a", "str", b"\xff")]), "key 'a': has byte 0xff at 0, expected valid UTF-8"),
    "array text": (build([array_key("a", "str", ["é", b"\xc3"])]), "key 'a', string 1: expected valid UTF-8"),
    "character cut in two": (build([array_key("a", "str", [b"\xc3", b"\xa9"])]), "key 'a', string 0: expected valid"),
    "alignment type": (build([key("general.alignment", "u64", 32)]), "has type u64, expected u32"),
    "alignment 0": (build([key("general.alignment", "u32", 0)]), "is 0, expected a power of two"),
    "alignment 48": (build([key("general.alignment", "u32", 48)]), "is 48, expected a power of two"),
    "tensor name": (build([], [tensor("n" * 64, [4], 0, 0)], DATA), "has a name of 64 bytes, expected at most 63"),
    "tensor twice": (build([], [ONE, tensor("t", [4], 0, 32)], bytes(64)), "tensor 't': appears twice"),
    "five dimensions": (build([], [tensor("t", [1] * 5, 0, 0)], DATA), "tensor 't': has 5 dimensions"),
    "dimension 0": (build([], [tensor("t", [4, 0], 0, 0)], DATA), "tensor 't': has dimensions [4, 0]"),
    "negative dimension": (build([], [tensor("t", [-4], 0, 0)], DATA), "tensor 't': has dimensions [-4]"),
    "dimension product": (build([], [tensor("t", [2**40, 2**40], 0, 0)], DATA), "whose product is below 2^63"),
    "block": (build([], [tensor("t", [48], 8, 0)], bytes(64)), "48 elements, expected a multiple of 32 for Q8_0"),
    "block of an unsupported type": (build([], [tensor("t", [48], 19, 0)], bytes(64)), "multiple of 256 for IQ1_S"),
    "offset": (build([], [tensor("t", [4], 0, 32)], bytes(64)), "tensor 't': has offset 32, expected 0"),
    "gap": (build([], [ONE, tensor("u", [4], 0, 64)], bytes(96)), "tensor 'u': has offset 64, expected 32"),
    "overlap": (build([], [ONE, tensor("u", [4], 0, 0)], bytes(96)), "tensor 'u': has offset 0, expected 32"),
    "offset outside": (build([], [tensor("t", [4], 0, 2**63)], DATA), "has offset 9223372036854775808, expected 0"),
    "data past the end": (build([], [tensor("t", [9], 0, 0)], DATA), "tensor 't': ends at byte 100, expected at most"),
    "control characters": (build([key("a\n\x1b[2J", "u64", 1)])[:-1], "key 'a\\n\\x1b[2J': expected 8 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_told_in_one_line(tmp_path, case):
    raw, expected = WRONG[case]
    path = written(tmp_path, raw)
    with pytest.raises(FileError) as error:
        open_gguf(path)
    message = str(error.value)
    assert expected in message and message.startswith(f"{path}: ") and "\n" not in message


@pytest.mark.parametrize(
    "case", ["huge tensor count", "huge key count", "huge array", "huge string", "dimension product"]
)
def test_no_allocation_follows_an_unchecked_number(tmp_path, case):
    path = written(tmp_path, WRONG[case][0] + bytes(1000))
    tracemalloc.start()
    with pytest.raises(FileError):
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileError, match="cannot be opened: No such file or directory"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(FileError, match="cannot be opened: Is a directory"):
        open_gguf(tmp_path)


@pytest.mark.parametrize("type_id, name", [(19, "IQ1_S"), (39, "MXFP4"), (31, "type 31"), (-7, "type -7")])
def test_an_unsupported_type_leaves_the_rest_readable(tmp_path, type_id, name):
    n_bytes = {19: 50, 39: 8 * 17}.get(type_id, 64)
    end = (n_bytes + 31) // 32 * 32
    raw = build([], [tensor("odd", [256], type_id, 0), tensor("t", [8], 0, end)], bytes(end) + b"\1" * 32)
    file = open_gguf(written(tmp_path, raw))
    assert file.tensors["odd"].type_name == name and not file.tensors["odd"].is_supported
    assert (file.read("t") == 1).all()
    with pytest.raises(UnsupportedError, match=f"tensor 'odd' has type {name}.*not supported"):
        file.read("odd")


def test_missing_padding_after_the_last_tensor_is_accepted(tmp_path):
    """llama.cpp reads such files too: no tensor reaches past the end."""
    file = open_gguf(written(tmp_path, build([], [ONE], b"\1" * 16)))
    assert file.read("t").tolist() == [1] * 16


def test_typed_getters(tmp_path):
    keys = [
        key("general.architecture", "str", "toy"), key("toy.n", "u32", 7), key("toy.f", "f32", 0.5),
        key("toy.yes", "bool", True), array_key("toy.sizes", "i32", [3, 4]), array_key("toy.words", "str", ["a", "b"]),
    ]  # fmt: skip
    file = open_gguf(written(tmp_path, build(keys)))
    assert file.key("n") == "toy.n"
    assert file.get("toy.n", int) == 7 and file.get("toy.f", float) == 0.5 and file.get("toy.yes", bool) is True
    assert file.get("toy.sizes", list[int]) == [3, 4] and file.get("toy.words", list[str]) == ["a", "b"]
    assert file.get("toy.none", int, 5) == 5 and file.get("toy.none", int, None) is None
    assert file.get_per_block("toy.n", int, 3) == [7, 7, 7] and file.get_per_block("toy.sizes", int, 2) == [3, 4]
    assert file.get_per_block("toy.none", int, 2, 9) == [9, 9]
    for wrong, expected in (
        (lambda: file.get("toy.none", int), "key 'toy.none' is missing, expected a value of type integer"),
        (lambda: file.get("toy.n", float), "key 'toy.n' has type u32, expected float"),
        (lambda: file.get("toy.yes", int), "key 'toy.yes' has type bool, expected integer"),
        (lambda: file.get("toy.n", str, "x"), "key 'toy.n' has type u32, expected str"),
        (lambda: file.get("toy.sizes", int), r"key 'toy.sizes' has type arr\[i32\], expected integer"),
        (lambda: file.get("toy.words", list[int]), r"has type arr\[str\], expected array of integer"),
        (lambda: file.get_per_block("toy.sizes", int, 3), "has 2 entries, expected 3"),
        (lambda: file.tensor("t"), "tensor 't' is missing"),
        (lambda: file.read("t"), "tensor 't' is missing"),
    ):  # fmt: skip
        with pytest.raises(FileError, match=expected):
            wrong()


def shard(number: int, count: int, names: list[str], total: int | None, extra: list[bytes] = []) -> bytes:  # noqa: B006
    keys = [*extra, key("split.no", "u16", number), key("split.count", "u16", count)]
    if total is not None:
        keys.append(key("split.tensors.count", "i32", total))
    tensors = [tensor(name, [8], 0, 32 * i) for i, name in enumerate(names)]
    return build(keys, tensors, b"".join(name[:1].encode() * 32 for name in names))


def write_shards(folder: Path, shards: list[bytes]) -> Path:
    for i, raw in enumerate(shards):
        (folder / f"m-{i + 1:05d}-of-{len(shards):05d}.gguf").write_bytes(raw)
    return folder / f"m-00001-of-{len(shards):05d}.gguf"


def test_split_files(tmp_path):
    first = [key("general.architecture", "str", "toy")]
    shards = [shard(0, 3, [], 3, first), shard(1, 3, ["a", "b"], 3), shard(2, 3, ["c"], 3)]
    file = open_gguf(write_shards(tmp_path, shards))
    assert len(file.shards) == 3 and file.architecture == "toy" and list(file.tensors) == ["a", "b", "c"]
    for name in "abc":
        assert (file.read(name) == ord(name)).all()


@pytest.mark.parametrize(
    "shards, start, expected",
    [
        ([shard(0, 2, ["a"], 2), shard(1, 2, ["b"], 2)], 1, "is shard 2 of 2, expected the first one: open "),
        ([shard(0, 2, ["a"], 3), shard(1, 2, ["b"], 3)], 0, "'split.tensors.count' is 3, expected the 2"),
        ([shard(0, 2, ["a"], 2), shard(1, 2, ["a"], 2)], 0, "tensor 'a' is also in"),
        ([shard(0, 2, ["a"], 2), shard(0, 2, ["b"], 2)], 0, "key 'split.no' is 0, expected 1"),
        ([shard(0, 2, ["a"], 2), build([], [ONE], DATA)], 0, "key 'split.no' is missing"),
        ([shard(0, 3, ["a"], 2), shard(1, 3, ["b"], 2)], 0, "expected a name like PREFIX-00001-of-00003.gguf"),
        ([build([key("split.count", "u32", 2)]), b"x"], 0, "'split.count' has type u32, expected u16"),
        ([build([key("split.count", "u16", 2)]), b"x"], 0, "key 'split.no' is missing"),
        ([shard(0, 2, ["a"], 2), b"GGU"], 0, "magic: expected 4 bytes at byte 0"),
    ],
)
def test_wrong_split_files(tmp_path, shards, start, expected):
    write_shards(tmp_path, shards)
    with pytest.raises(FileError) as error:
        open_gguf(tmp_path / f"m-{start + 1:05d}-of-00002.gguf")
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    path = write_shards(tmp_path, [shard(0, 2, ["a"], 2), shard(1, 2, ["b"], 2)])
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileError, match="m-00002-of-00002.gguf: cannot be opened: No such file"):
        open_gguf(path)


def test_a_real_sized_vocabulary_opens_in_time(tmp_path):
    """248,320 tokens and as many merges, opened and decoded; `tests/bench/bench_open.py` prints the times."""
    from bench.bench_open import make_vocabulary, measure

    make_vocabulary(tmp_path / "v.gguf", 248320)
    opening, decoding = measure(tmp_path / "v.gguf", 2)
    assert opening + decoding < 1.5
