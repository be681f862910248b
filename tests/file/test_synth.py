"""`ggufspec bench synth`: shapes, types, reproducibility, and files that llama.cpp runs."""

import base64

import numpy as np
import pytest
from click.testing import CliRunner
from peer import complete

from ggufspec.errors import ConfigError, FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.quant.dequantize import dequantize
from ggufspec.tools.synth import command, plan
from ggufspec.tools.synth_models import changed, make_recipe

SMALL = (
    "--embd 512 --ff 512 --heads 4 --kv-heads 2 --head-dim 64 --vocab 600 --ctx 2048 --layers 4 --key-heads 2 "
    "--value-heads 4 --state-size 64 --taps 1,3"
).split()


def synth(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "kind, file_type, mib",
    [
        ("target", "Q4_K_M", 16021.46), ("target", "Q8_0", 27690.97), ("dspark", "Q4_K_M", 757.74),
        ("dspark", "Q8_0", 1377.5), ("dflash2", "Q4_K_M", 1079.61), ("dflash2", "IQ4_XS", 979.77),
    ],
)  # fmt: skip
def test_default_files_have_the_size_that_llama_quantize_gives(kind, file_type, mib):
    """Totals of llama-quantize --dry-run on files of these shapes."""
    entries = plan(make_recipe(kind, changed(kind), None), file_type)
    assert round(sum(entry.n_bytes for entry in entries) / 2**20, 2) == mib


def test_a_seed_gives_one_file_and_another_seed_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        said = synth("dspark", "-o", tmp_path / name, "--seed", seed, *SMALL)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b and a != c and len(a) == len(c)
    assert said == f"{tmp_path / 'c'}: {len(c) / 1e6:.2f} MB, {len(open_gguf(tmp_path / 'c').tensors)} tensors\n"


@pytest.mark.parametrize("file_type", ["q4_k_m", "q8_0", "Q2_K", "iq4_xs", "f16", "f32"])
def test_weights_have_the_deviation_asked_for(tmp_path, file_type):
    synth("target", "-o", tmp_path / "m", "--type", file_type, "--std", 0.05, *SMALL)
    file = open_gguf(tmp_path / "m")
    for name in ("output.weight", "blk.0.attn_qkv.weight", "blk.3.ffn_down.weight", "blk.4.nextn.eh_proj.weight"):
        info = file.tensors[name]
        values = dequantize(file.read(name), info.layout.name)
        assert values.shape == info.shape and abs(values.std() / 0.05 - 1) < 0.15
        assert len(np.unique(file.read(name), axis=0)) == info.rows  # no two rows predict the same
    assert (file.read("output_norm.weight").view("<f4") == 1).all()


def test_vocabulary_from_a_file_of_ranked_tokens(tmp_path):
    words = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" the", b"h"]
    (tmp_path / "v").write_bytes(b"".join(base64.b64encode(w) + b" %d\n" % i for i, w in enumerate(words[:-1])))
    synth("dflash2", "-o", tmp_path / "m", "--tokens", tmp_path / "v", *SMALL)
    file = open_gguf(tmp_path / "m")
    tokens = file.get("tokenizer.ggml.tokens", list[str])
    assert tokens[256:260] == ["th", "the", "Ġt", "Ġthe"] and len(tokens) == 600
    assert file.get("tokenizer.ggml.merges", list[str]) == ["t h", "th e", "Ġ t", "Ġ the"]
    assert tokens[file.get("tokenizer.ggml.mask_token_id", int)] == "<|mask|>"


def test_wrong_options(tmp_path):
    for options, error, expected in (
        (["--heads", "3"], ConfigError, "3 heads and 2 KV heads"),
        (["--type", "q9"], ConfigError, "invalid ftype 'q9'"),
        (["--vocab", "100"], ConfigError, "a vocabulary of 100 tokens, expected at least 262"),
        (["--tokens", str(tmp_path / "none")], FileError, "cannot be opened"),
    ):
        with pytest.raises(error, match=expected):
            synth("target", "-o", tmp_path / "m", *SMALL, *options)
    (tmp_path / "v").write_text("dGhl 0\n!!! 1\n")
    with pytest.raises(FileError, match="line 2: expected a token in base64"):
        synth("target", "-o", tmp_path / "m", *SMALL, "--tokens", tmp_path / "v")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v"]
    result = CliRunner().invoke(command, ["dspark", "-o", str(tmp_path / "m"), "--taps", "a"])
    assert result.exit_code == 2 and "layer numbers separated by commas" in result.output


@pytest.mark.peer
@pytest.mark.parametrize(
    "kind, drafter", [("draft-mtp", None), ("draft-dspark", "dspark"), ("draft-dflash", "dflash2")]
)
def test_llama_cpp_runs_the_pair(tmp_path, kind, drafter):
    synth("target", "-o", tmp_path / "t", *SMALL)
    if drafter:
        synth(drafter, "-o", tmp_path / "d", *SMALL)
    (answer,) = complete(
        tmp_path / "t", ["abc"], 8, ignore_eos=True, n_ctx=256, kinds=[kind], draft=tmp_path / "d" if drafter else None
    )
    assert len(answer.tokens) == 8 and answer.n_drafted >= 8
