"""`ggufspec inspect` in both forms."""

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from families import make_qwen3
from raw_gguf import array_key, build, key, tensor

from ggufspec.errors import FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.tools.inspect import command


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def small(folder: Path) -> Path:
    keys = [
        key("general.architecture", "str", "toy"), key("toy.eps", "f32", 1e-6), key("toy.nan", "f64", float("nan")),
        key("toy.text", "str", "line\none\x1b[31m" + "x" * 200), key("toy.yes", "bool", True),
        array_key("toy.words", "str", [f"w{i}" for i in range(20)]), array_key("toy.flags", "bool", [True, False]),
    ]  # fmt: skip
    tensors = [tensor("a", [64, 2], 8, 0), tensor("b", [256], 19, 160), tensor("c", [3], 0, 224)]
    path = folder / "m.gguf"
    path.write_bytes(build(keys, tensors, bytes(256)))
    return path


def test_the_human_form(tmp_path):
    path = small(tmp_path)
    out = run(str(path))
    lines = out.splitlines()
    assert lines[0] == f"{path}: GGUF version 3, toy"
    assert lines[1] == "3 tensors, 387 parameters, 198 B, 4.09 bits per weight"
    assert "  IQ1_S        1 tensors        50 B  (not supported)" in lines
    rows = {line.split()[0]: line.split(None, 2)[1:] for line in lines if line and line[0] != " "}
    assert rows["toy.eps"] == ["f32", "1e-06"] and rows["toy.nan"] == ["f64", "NaN"]
    assert rows["toy.text"][1].startswith("line\\none\\x1b[31mxxx") and "\x1b" not in out
    assert rows["toy.text"][1].endswith("… (217 characters)")
    assert rows["toy.words"][1].endswith('"w7", … (20 elements)]') and rows["toy.flags"][1] == "[true, false]"
    assert rows["a"][0] == "Q8_0" and rows["a"][1].split("  ")[0] == "2 x 64" and rows["a"][1].endswith("136 B")
    assert rows["b"][1].startswith("(not supported)")
    full = run(str(path), "--full")
    assert "x" * 200 in full and '"w19"]' in full
    assert "b      IQ1_S" not in run(str(path), "--no-tensors") and "toy.eps" in run(str(path), "--no-tensors")


def test_json_holds_everything(tmp_path):
    path = make_qwen3(tmp_path / "m.gguf", n_layers=1, type="Q4_K")
    file, got = open_gguf(path), json.loads(run(str(path), "--json"))
    assert got["architecture"] == "qwen3" and got["shards"] == [str(path)] and got["version"] == 3
    assert got["n_bytes"] == file.n_bytes
    assert list(got["metadata"]) == list(file.metadata)
    assert got["metadata"]["tokenizer.ggml.tokens"]["value"] == list(file.metadata["tokenizer.ggml.tokens"])
    assert got["metadata"]["qwen3.attention.layer_norm_rms_epsilon"] == {"type": "f32", "value": 1e-6}
    for row, tensor_info in zip(got["tensors"], file.tensors.values(), strict=True):
        assert row["name"] == tensor_info.name and row["shape"] == list(tensor_info.shape)
        assert row["type"] == tensor_info.type_name and row["n_bytes"] == tensor_info.n_bytes and row["supported"]


def test_json_of_odd_values(tmp_path):
    got = json.loads(run(str(small(tmp_path)), "--json"))
    assert got["metadata"]["toy.nan"]["value"] == "NaN" and got["metadata"]["toy.flags"]["value"] == [True, False]
    assert got["metadata"]["toy.text"]["value"].startswith("line\none\x1b")
    assert [t["supported"] for t in got["tensors"]] == [True, False, True]


def test_a_file_without_architecture_is_shown(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(build([key("general.architecture", "u32", 7)]))
    assert run(str(path)).splitlines()[0].endswith("GGUF version 3, no architecture")


def test_a_wrong_file_is_the_loader_s_error(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 9))
    with pytest.raises(FileError, match="version: found 9"):
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)
