"""The command line: names, defaults, refusals and what is printed."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from files import importance, keys, make_file, weights, write_imatrix

from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_write import write_gguf
from ggufspec.tools.quantize import command


@pytest.fixture
def source(tmp_path):
    return make_file(tmp_path / "in.gguf", "F16")


def run(*words, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_default_output_name(source, tmp_path):
    run(source, "q4_k")
    assert (tmp_path / "ggml-model-Q4_K.gguf").exists()
    run(source, "7", "1")
    assert (tmp_path / "ggml-model-Q8_0.gguf").exists()
    run("--keep-split", source, "Q8_0")
    assert (tmp_path / "ggml-model-Q8_0-00001-of-00001.gguf").exists()


def test_output_and_tables(source, tmp_path):
    text = run(source, tmp_path / "o.gguf", "Q4_K_M", "1")
    assert "[   8/  32] token_embd.weight                    - [   512,     40,      1,      1], type =    f16" in text
    assert "converting to q4_K .. size =     0.04 MiB ->     0.01 MiB" in text
    assert "warning: markov_w1.weight - ncols  96 not divisible by 256 (required for type    q4_K)" in text
    assert "WARNING: 2 of 23 tensor(s) required fallback quantization" in text
    assert "model size  =" in text and "quant size  =" in text and "quantize time =" in text
    assert "MB/s of input" in text


def test_dry_run_writes_nothing(source, tmp_path):
    text = run("--dry-run", source, "Q6_K")
    assert "MiB ->     0.02 MiB (q6_K)" in text and "quant size  =" in text
    assert os.listdir(tmp_path) == ["in.gguf"]
    quantized = make_file(tmp_path / "q8.gguf", "Q8_0")
    assert "(q4_K)" in run("--dry-run", quantized, "Q4_K_M")
    assert "requires an imatrix" in run("--dry-run", source, "Q2_K_S")


def test_options_reach_the_file(source, tmp_path):
    entries = tmp_path / "types.txt"
    entries.write_text("attn_k=q8_0\nATTN_Q=q5_K\n")
    matrix = write_imatrix(tmp_path / "i.gguf", importance(weights()))
    text = run(
        "--output-tensor-type", "q5_0", "--token-embedding-type", "f16", "--tensor-type", "ffn_(up|gate)=iq4_nl",
        "--tensor-type-file", entries, "--override-kv", "a.b=int:-5", "--override-kv", "a.c=float:1.5",
        "--override-kv", "a.d=bool:true", "--override-kv", "a.e=str:x=y:z", "--imatrix", matrix,
        "--exclude-weights", "blk.0", "--prune-layers", "2", source, tmp_path / "o.gguf", "Q4_K_S", "2",
    )  # fmt: skip
    out = open_gguf(tmp_path / "o.gguf")
    kinds = {name: tensor.type_name for name, tensor in out.tensors.items()}
    assert kinds["output.weight"] == "Q5_0" and kinds["token_embd.weight"] == "F16"
    assert kinds["blk.0.ffn_gate.weight"] == "IQ4_NL" and kinds["blk.1.attn_k.weight"] == "Q8_0"
    assert kinds["blk.1.attn_q.weight"] == "Q5_K" and "blk.2.attn_q.weight" not in kinds
    assert [(k, out.metadata[k], out.types[k]) for k in ("a.b", "a.c", "a.d", "a.e")] == [
        ("a.b", 5, "u32"), ("a.c", 1.5, "f32"), ("a.d", True, "bool"), ("a.e", "x=y:z", "str"),
    ]  # fmt: skip
    assert "blk.0.ffn_gate.weight                - applying manual override: q4_K -> iq4_nl" in text
    assert "did not find weights for blk.0.attn_q.weight" in text
    assert "did not find weights for blk.1.attn_q.weight" not in text


def test_a_vocabulary_alone(tmp_path):
    write_gguf(tmp_path / "in.gguf", keys(), [], [])
    assert "0.00 MiB (0.00 BPW)" in run(tmp_path / "in.gguf", tmp_path / "o.gguf", "Q8_0", "1")
    assert open_gguf(tmp_path / "o.gguf").tensors == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{in}"], "expected INPUT [OUTPUT] TYPE"),
        (["--unknown", "{in}", "Q8_0"], "No such option"),
        (["{in}", "{out}"], "missing ftype"),
        (["{in}", "{out}", "Q9_9"], "invalid ftype 'Q9_9'"),
        (["{in}", "{out}", "IQ1_S"], "file type IQ1_S is not written here"),
        (["{in}", "{out}", "Q8_0", "two"], "invalid nthread 'two'"),
        (["{in}", "{out}", "Q8_0", "2", "--pure", "x"], "unexpected argument 'x'"),
        (["{in}", "{in}", "Q8_0"], "input and output files are the same"),
        (["{none}", "{out}", "Q8_0"], "cannot be opened"),
        (["--tensor-type", "attn=q9", "{in}", "Q8_0"], "unknown tensor type 'q9'"),
        (["--tensor-type", "attn", "{in}", "Q8_0"], "malformed tensor type 'attn'"),
        (["--tensor-type", "(=q8_0", "{in}", "Q8_0"], "is no regular expression"),
        (["--output-tensor-type", "q9", "{in}", "Q8_0"], "unknown tensor type 'q9'"),
        (["--override-kv", "a=int:x", "{in}", "Q8_0"], "'x' is no int"),
        (["--override-kv", "a=list:x", "{in}", "Q8_0"], "expected int:N"),
        (["--prune-layers", "a", "{in}", "Q8_0"], "expected block numbers"),
        (["--imatrix", "{none}", "{in}", "Q8_0"], "failed to load imatrix"),
        (["--include-weights", "a", "{in}", "Q8_0"], "need an importance matrix"),
        (["--max-buffer-size", "0", "{in}", "Q8_0"], "expected a positive number"),
        (["--device", "tpu", "{in}", "{out}", "Q8_0"], "device"),
        (["{in}", "{out}", "Q2_K_S"], "this quantization requires an imatrix!"),
    ],
)
def test_refusals(source, tmp_path, words, message):
    names = {"in": source, "out": tmp_path / "out.gguf", "none": tmp_path / "none.gguf"}
    assert message in run(*(word.format(**names) for word in words), code=1)
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_help_names_every_type():
    text = " ".join(run("--help").split())
    for kind in ("Q4_K_M (15)", "IQ4_XS (30)", "BF16 (32)", "COPY"):
        assert kind in text


def test_a_write_that_fails_midway_leaves_nothing(source, tmp_path):
    """A file size limit stands in for a disk that fills up while the file is written."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from ggufspec.tools.quantize import command; command()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "out.gguf", "Q8_0", "1"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "out.gguf: cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_interrupting_leaves_nothing(tmp_path):
    """Ctrl-C while two workers are busy: the command ends, without workers and without a file."""
    rng = np.random.default_rng(0)
    data = {"output.weight": rng.standard_normal((16384, 1024)).astype(np.float32)}
    source = make_file(tmp_path / "in.gguf", "F16", data, 1)
    run = subprocess.Popen(
        [sys.executable, "-c", "from ggufspec.tools.quantize import command; command()", "--pure", source,
         tmp_path / "out.gguf", "Q4_K_M", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode != 0
    assert os.listdir(tmp_path) == ["in.gguf"]
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # nobody of the group is left
        while time.monotonic() < deadline:
            os.killpg(run.pid, 0)
            time.sleep(0.05)


def test_a_pattern_that_matches_nothing_is_named(source, tmp_path):
    text = run("--dry-run", "--tensor-type", "no_such=q6_k", "--tensor-type", "ffn_down=q6_k", source, "Q8_0")
    assert "warning: --tensor-type no_such=...: no tensor has such a name" in text
    assert "--tensor-type ffn_down" not in text
