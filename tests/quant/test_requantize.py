"""Whole files: bytes against an independent computation and against files made by llama-quantize."""

import hashlib
import json
import os
import re
from pathlib import Path

import libgguf
import numpy as np
import pytest
from files import (
    importance,
    keys,
    make_file,
    make_split,
    shapes,
    weights,
    write_imatrix,
)

from ggufspec import bundled
from ggufspec.errors import ConfigError, FileError, UnsupportedError
from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_write import Key
from ggufspec.quant import layouts
from ggufspec.quant.imatrix import read_imatrix
from ggufspec.quant.policy import COPY, FILE_TYPES, Choices, file_type
from ggufspec.quant.requantize import Options, make_plan, run_plan

GOLDEN = json.loads(Path(__file__).with_name("golden_files.json").read_text())["sources"]


def requantize(source, out, kind="Q4_K_M", n_workers=1, dry_run=False, pattern=None, **options):
    choice_names = ("pure", "leave_output", "output_type", "embedding_type")
    chosen = {name: options.pop(name) for name in choice_names if name in options}
    if pattern:
        chosen["patterns"] = (pattern,)
    choices = Choices(
        COPY if kind == "COPY" else file_type(kind), has_imatrix=bool(options.get("imatrix")), **chosen
    )
    plan = make_plan(open_gguf(source), Options(choices, **options), dry_run=dry_run)
    run_plan(plan, out, n_workers=n_workers)
    return open_gguf(out)


def reference(x: np.ndarray, kind: str, qw: np.ndarray | None = None) -> bytes:
    layout = layouts.BY_NAME[kind]
    if not layout.is_quantized:
        return np.asarray(libgguf.store_rows(x, layout.id)).tobytes()
    if x.ndim == 3 and qw is not None:
        return b"".join(reference(part, kind, w) for part, w in zip(x, qw.reshape(len(x), -1)))
    return np.asarray(libgguf.quantize_rows(x.reshape(-1, x.shape[-1]), layout.id, qw)).tobytes()


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_unknown_type_is_refused_where_it_would_only_be_copied(tmp_path, dry_run):
    raw = bytearray(make_file(tmp_path / "in.gguf").read_bytes())
    name = next(name for name, x in weights().items() if x.ndim == 1)
    at = raw.index(name.encode()) + len(name)
    n_dims, type_id = raw[at], at + 4 + 8
    assert n_dims == 1
    raw[type_id] = 91
    (tmp_path / "in.gguf").write_bytes(raw)
    with pytest.raises(UnsupportedError, match=f"{name}.*type 91"):
        requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", dry_run=dry_run)


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_L", "Q2_K", "IQ4_XS", "Q5_1", "BF16"])
def test_tensors_equal_reference(tmp_path, kind):
    out = requantize(make_file(tmp_path / "in.gguf"), tmp_path / "out.gguf", kind)
    data = weights()
    assert set(out.tensors) == set(data)  # nothing is dropped
    for name, tensor in out.tensors.items():
        if name == "d2t":
            assert tensor.type_name == "I64" and (out.read(name).view(np.int64) == data[name]).all()
        else:
            assert out.read(name).tobytes() == reference(data[name], tensor.type_name), name
    assert out.tensors["blk.0.attn_q.weight"].type_name == file_type(kind).default
    assert out.tensors["odd.weight"].type_name == ("BF16" if kind == "BF16" else "F16")


def test_imatrix_weighs_the_columns(tmp_path):
    data = weights()
    entries = importance(data)
    matrix = read_imatrix(write_imatrix(tmp_path / "i.gguf", entries))
    out = requantize(make_file(tmp_path / "in.gguf"), tmp_path / "out.gguf", imatrix=matrix)
    for name in ("blk.1.ffn_down.weight", "experts.weight", "markov_w1.weight", "output.weight"):
        sums, counts = entries[name]
        kind = out.tensors[name].type_name
        assert out.read(name).tobytes() == reference(data[name], kind, (sums / counts[:, None]).reshape(-1)), name
    assert out.read("token_embd.weight").tobytes() == reference(data["token_embd.weight"], "Q4_K")
    tail = list(out.metadata.items())[-6:]
    assert tail == [
        ("general.quantization_version", 2), ("general.file_type", 15),
        ("quantize.imatrix.file", str(tmp_path / "i.gguf")), ("quantize.imatrix.dataset", "calibration.txt"),
        ("quantize.imatrix.entries_count", len(entries)), ("quantize.imatrix.chunks_count", 12),
    ]  # fmt: skip


def test_keys_and_order(tmp_path):
    overrides = (Key("dflash.attention.head_count", "u32", 16), Key("note", "str", "x"))
    out = requantize(make_file(tmp_path / "in.gguf"), tmp_path / "out.gguf", overrides=overrides)
    expected = [key.name for key in keys() if key.name not in ("general.file_type", "dflash.attention.head_count")]
    expected += ["general.quantization_version", "general.file_type", "dflash.attention.head_count", "note"]
    assert list(out.metadata) == expected
    assert out.metadata["general.file_type"] == 15 and out.metadata["dflash.attention.head_count"] == 16
    names = list(out.tensors)
    plain = [name for name in names if not name.startswith("blk.")]
    assert plain == sorted(plain) and names[: len(plain)] == plain
    assert out.tensors["conf_proj.weight"].shape == (512,)  # one row is stored as a vector


def golden_sources() -> dict[str, Path]:
    """Files at hand by the hash of their content: the bundled models and a folder of the user's choice."""
    folder = os.environ.get("GGUFSPEC_GOLDEN_MODELS")
    files = list(Path(folder).glob("*.gguf")) if folder else []
    files += list(Path(bundled.__file__).parent.glob("*.gguf"))
    return {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in files}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_files_equal_llama_quantize(tmp_path, name):
    source = golden_sources().get(GOLDEN[name]["sha256"])
    if source is None:
        pytest.skip(f"{name} is neither bundled nor in the folder GGUFSPEC_GOLDEN_MODELS")
    for line, (size, digest) in GOLDEN[name]["outputs"].items():
        *flags, kind = line.split()
        options = {
            "--allow-requantize": {"allow_requantize": True}, "--pure": {"pure": True},
            "--leave-output-tensor": {"leave_output": True},
            "--output-tensor-type": {"output_type": "Q8_0", "embedding_type": "Q8_0"},
            "--tensor-type": {"pattern": (re.compile("ffn_down"), "Q6_K")}, "": {},
        }[flags[0] if flags else ""]  # fmt: skip
        requantize(source, tmp_path / "out.gguf", kind, n_workers=2, **options)
        raw = (tmp_path / "out.gguf").read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (size, digest), line


def test_workers_and_buffer_do_not_change_the_bytes(tmp_path):
    rng = np.random.default_rng(2)
    data = {"output.weight": rng.standard_normal((4096, 1024)).astype(np.float32),
            "blk.0.ffn_down.weight": rng.standard_normal((4096, 1024)).astype(np.float32)}  # fmt: skip
    source = make_file(tmp_path / "in.gguf", "F16", data, 1)
    plan = make_plan(open_gguf(source), Options(Choices(file_type("Q4_K_M"))))
    seen: list[int] = []
    run_plan(plan, tmp_path / "a.gguf")
    run_plan(plan, tmp_path / "b.gguf", n_workers=2, max_buffer_bytes=1 << 20, on_bytes=seen.append)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sum(seen) == plan.n_bytes_in and len(seen) > 100


def test_requantizing_needs_permission(tmp_path):
    source = make_file(tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="'experts.weight': requantizing from type q8_0 is disabled"):
        requantize(source, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    requantize(source, tmp_path / "same.gguf", "Q8_0")  # no type changes
    out = requantize(source, tmp_path / "out.gguf", allow_requantize=True)
    x = np.asarray(libgguf.dequantize_rows(open_gguf(source).read("blk.0.attn_q.weight"), 8, n_per_row=512))
    assert out.read("blk.0.attn_q.weight").tobytes() == reference(x, "Q4_K")


def test_copy_keeps_types_and_file_type(tmp_path):
    source = make_file(tmp_path / "in.gguf", "Q8_0")
    out = requantize(source, tmp_path / "out.gguf", "COPY")
    assert out.metadata["general.file_type"] == 1
    assert {n: t.type_name for n, t in out.tensors.items()} == {
        n: t.type_name for n, t in open_gguf(source).tensors.items()
    }


def test_pruning_renumbers(tmp_path):
    source = make_file(tmp_path / "in.gguf")
    out = requantize(source, tmp_path / "out.gguf", "F16", prune=(1,))
    assert sorted({n.split(".")[1] for n in out.tensors if n.startswith("blk.")}) == ["0", "1"]
    assert out.metadata["dflash.block_count"] == 2 and list(out.metadata)[-1] == "dflash.block_count"
    x = weights()["blk.2.attn_q.weight"]
    assert out.read("blk.1.attn_q.weight").tobytes() == reference(x, "F16")
    with pytest.raises(ConfigError, match="block 7 is to be pruned, but the file has blocks 0 to 2"):
        requantize(source, tmp_path / "no.gguf", prune=(7,))


def test_pruning_the_mtp_block_takes_back_its_promise(tmp_path):
    """Else the trunk's last block would pass for the MTP block, and no longer take part in the text."""
    source = open_gguf(bundled.target_path())
    n = source.metadata["qwen35.block_count"]
    assert source.metadata["qwen35.nextn_predict_layers"] == 1
    for pruned, left in (((n - 1,), 0), ((n - 1, n - 2), 0), ((0,), 1)):
        plan = make_plan(source, Options(Choices(COPY), prune=pruned))
        keys = {key.name: key.value for key in plan.keys}
        assert keys["qwen35.block_count"] == n - len(pruned) and keys["qwen35.nextn_predict_layers"] == left


@pytest.mark.parametrize("kind", [kind.name for kind in FILE_TYPES if kind is not COPY])
def test_the_mtp_block_is_kept_and_has_no_fewer_bits_than_the_trunk(kind):
    """Its tensors have as many a weight as those of the trunk's last attention block, eh_proj as many as the gate."""
    source = open_gguf(bundled.target_path())
    plan = make_plan(source, Options(Choices(file_type(kind)), allow_requantize=True), dry_run=True)
    bits = {t.name: layouts.BY_NAME[t.target].bits_per_weight for t in plan.tensors}
    assert set(bits) == set(source.tensors)
    n = source.metadata["qwen35.block_count"]
    mtp, trunk = ({name.split(".", 2)[2]: b for name, b in bits.items() if name.startswith(f"blk.{i}.")}
                  for i in (n - 1, n - 2))  # fmt: skip
    assert len(mtp) == 15
    for name, own in mtp.items():
        if name.endswith("norm.weight"):
            assert own == 32
        else:
            assert own >= trunk["ffn_gate.weight" if name.startswith("nextn") else name], name


def test_split_input(tmp_path):
    first = make_split(tmp_path / "in", 3)
    joined = requantize(first, tmp_path / "joined.gguf")
    assert not any(key.startswith("split.") for key in joined.metadata)
    plan = make_plan(open_gguf(first), Options(Choices(file_type("Q4_K_M")), keep_split=True))
    paths = run_plan(plan, tmp_path / "kept").paths
    assert [p.name for p in paths] == [f"kept-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    kept = open_gguf(paths[0])
    source = open_gguf(first)
    for name, tensor in kept.tensors.items():
        assert tensor.shard == source.tensors[name].shard
    by_place = sorted(source.tensors, key=lambda n: (source.tensors[n].shard, source.tensors[n].offset))
    assert list(kept.tensors) == by_place
    assert set(kept.tensors) == set(shapes())


def test_nan_is_named(tmp_path):
    data = weights()
    data["blk.1.attn_k.weight"][3, 17] = np.nan
    source = make_file(tmp_path / "in.gguf", "F16", data)
    with pytest.raises(FileError, match=r"'blk.1.attn_k.weight' holds nan at element 1553 \(row 3, column 17\)"):
        requantize(source, tmp_path / "out.gguf")
    data = weights()
    data["output_norm.weight"][5] = np.inf  # also in tensors that are only copied
    with pytest.raises(FileError, match="'output_norm.weight' holds inf at element 5"):
        requantize(make_file(tmp_path / "in.gguf", "F16", data), tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_numbers_too_large_for_the_type(tmp_path):
    data = weights()
    data["blk.1.attn_k.weight"][2, 40] = 1e8
    with pytest.raises(FileError, match="'blk.1.attn_k.weight': numbers from element 1056 on are too large for Q8_0"):
        requantize(make_file(tmp_path / "in.gguf", "F32", data), tmp_path / "out.gguf", "Q8_0")


def test_output_must_differ_from_input(tmp_path):
    source = make_file(tmp_path / "in.gguf")
    (tmp_path / "link.gguf").symlink_to(source)
    for out in (source, tmp_path / "link.gguf", tmp_path / "." / "in.gguf"):
        with pytest.raises(ConfigError, match="input and output files are the same"):
            requantize(source, out)
    first = make_split(tmp_path / "s", 2)
    with pytest.raises(ConfigError, match="input and output files are the same"):
        plan = make_plan(open_gguf(first), Options(Choices(file_type("Q8_0")), keep_split=True))
        run_plan(plan, tmp_path / "s.gguf")


def test_types_that_do_not_fit_are_refused(tmp_path):
    data = {"output.weight": np.ones((4, 96), np.float32)}
    source = make_file(tmp_path / "in.gguf", "F32", data)
    with pytest.raises(ConfigError, match="rows of 96 elements, not a multiple of 256"):
        requantize(source, tmp_path / "out.gguf", output_type="Q6_K")


def test_imatrix_is_required(tmp_path):
    source = make_file(tmp_path / "in.gguf")
    with pytest.raises(ConfigError, match="'experts.weight': this quantization requires an imatrix!"):
        requantize(source, tmp_path / "out.gguf", "Q2_K_S")
    assert make_plan(open_gguf(source), Options(Choices(file_type("Q2_K_S"))), dry_run=True).missing_imatrix


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    source = make_file(tmp_path / "in.gguf")
    plan = make_plan(open_gguf(source), Options(Choices(file_type("Q8_0"))))
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and _Usage())
    with pytest.raises(FileError, match="has 0 MiB free"):
        run_plan(plan, tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["in.gguf"]


class _Usage:
    free = 1000
