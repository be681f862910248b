"""`ggufspec perplexity`: the scores of a small random model by another way, the file of logits, the statistics."""

import io
import math
import random
import re
import statistics
import struct
import sys

import families
import numpy as np
import pytest
import torch

from ggufspec.errors import FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model
from ggufspec.rows import prompt_rows
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools import logits_file
from ggufspec.tools.main import run
from ggufspec.tools.perplexity_stats import Comparison, percentile

N_CTX, N_CHUNKS = 32, 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("".join(rng.choice("abcdefgh \n<>|") for _ in range(N_CTX * N_CHUNKS + 9)) + "\n")
    return str(path)


@pytest.fixture(scope="module", params=["qwen35", "gemma3"])
def model(request, tmp_path_factory):
    """gemma3's vocabulary wants a BOS token at the start of each chunk, qwen35's does not."""
    make = {"qwen35": families.make_qwen35, "gemma3": families.make_gemma3}[request.param]
    return str(make(tmp_path_factory.mktemp("ppl") / "m.gguf", seed=2))


@pytest.fixture
def ggufspec(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))

    def call(*argv):
        status = run(["perplexity", *argv])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


def nll_by_hand(path, text_path):
    """Every scored token's -ln p: one forward per position, nothing shared with the command."""
    file = open_gguf(path)
    tokenizer, model = Tokenizer.from_metadata(file.metadata), load_model(file)
    ids = tokenizer.encode(open(text_path).read().removesuffix("\n"), add_special=True, parse_special=False)
    out = []
    for start in range(0, len(ids) // N_CTX * N_CTX, N_CTX):
        chunk = ids[start : start + N_CTX]
        target = list(chunk)
        if tokenizer.add_bos:
            chunk = [tokenizer.bos, *chunk[1:]]
        cache = model.new_cache(1, 256)
        model.forward(prompt_rows(torch.tensor(chunk[: N_CTX // 2]), 0, 0), cache, logits="none")
        for at in range(N_CTX // 2, N_CTX - 1):
            rows = prompt_rows(torch.tensor(chunk[at : at + 1]), 0, at)
            logits = model.forward(rows, cache, logits="last").logits[0, 0].double()
            out.append(-float(torch.log_softmax(logits, 0)[target[at + 1]]))
    return out


@torch.inference_mode()
def test_perplexity(ggufspec, model, text):
    status, out, err = ggufspec("-m", model, "-f", text, "-c", str(N_CTX))
    nll = nll_by_hand(model, text)
    n = len(nll) // (N_CTX // 2 - 1)
    assert status == 0 and f"over {n} chunks, n_ctx={N_CTX}" in err and n >= N_CHUNKS
    per_chunk = N_CTX // 2 - 1
    running = [float(x) for x in re.findall(r"\[\d+\]([\d.]+),", out)]
    assert running == [pytest.approx(math.exp(statistics.mean(nll[: (i + 1) * per_chunk])), rel=1e-3) for i in range(n)]
    ppl, error = map(float, re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", out).groups())
    assert ppl == pytest.approx(running[-1], abs=2e-4)
    spread = statistics.pstdev(nll) / math.sqrt(len(nll) - 1)
    assert error == pytest.approx(ppl * spread, rel=1e-2)


def test_output_type_and_chunk_limit(ggufspec, model, text):
    _, out, _ = ggufspec("-m", model, "-f", text, "-c", str(N_CTX), "--chunks", "2", "--ppl-output-type", "1")
    lines = out.splitlines()[:2]
    assert [line.split()[0] for line in lines] == ["0", str(N_CTX)]
    assert float(lines[1].split()[1]) == pytest.approx(math.exp(float(lines[1].split()[2])), rel=1e-3)


def test_divergence_from_itself_is_nothing_and_from_another_is_not(ggufspec, model, text, tmp_path):
    base = str(tmp_path / "base.bin")
    assert ggufspec("-m", model, "-f", text, "-c", str(N_CTX), "--kl-divergence-base", base)[0] == 0
    _, out, _ = ggufspec("-m", model, "--kl-divergence", "--kl-divergence-base", base)
    assert abs(number(out, "Mean    KLD:")) < 1e-4 and number(out, "Same top p:") > 99
    # the file ends 16 below the largest logit, and some of this text's tokens lie beyond that
    assert number(out, r"Mean PPL\(Q\)/PPL\(base\) +:") == pytest.approx(1, abs=0.05)
    file = open_gguf(model)
    make = {"qwen35": families.make_qwen35, "gemma3": families.make_gemma3}[file.architecture]
    other = str(make(tmp_path / "other.gguf", seed=9))
    _, out, _ = ggufspec("-m", other, "--kl-divergence", "--kl-divergence-base", base, "--chunks", "2")
    assert number(out, "Mean    KLD:") > 0.01 and out.count(" %\n") >= 2


def number(out, before):
    return float(re.search(before + r" +(-?[\d.]+)", out).group(1))


def test_errors(ggufspec, model, text, tmp_path):
    def error(*argv):
        status, _, err = ggufspec(*argv)
        lines = [line for line in err.splitlines() if line and not line.startswith("perplexity:")]
        assert status == 1 and len(lines) == 1
        return lines[0]

    assert "there is no text" in error("-m", model)
    assert "you need at least 4096 tokens" in error("-m", model, "-f", text, "-c", "2048")
    assert "--model is required" in error("-f", text)
    assert "needs the base model's logits" in error("-m", model, "--kl-divergence")
    bad = tmp_path / "bad.bin"
    bad.write_bytes(b"nonsense" * 9)
    assert "not a file of logits" in error("-m", model, "--kl-divergence", "--kl-divergence-base", str(bad))
    assert "--hellaswag is not supported" in error("-m", model, "--hellaswag")


def test_a_full_disk_leaves_no_file(ggufspec, model, text, tmp_path, monkeypatch):
    """Neither half a file nor an empty one, and an older one stays what it was."""
    path = tmp_path / "base.bin"
    path.write_bytes(b"older")

    def full(logits):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ggufspec.tools.logits_file.encode", full)
    status, _, err = ggufspec("-m", model, "-f", text, "-c", "32", "--chunks", "2", "--kl-divergence-base", str(path))
    assert status == 1
    assert f"error: --kl-divergence-base {path}: No space left on device; nothing was kept of it" in err
    assert [p.name for p in tmp_path.iterdir()] == ["base.bin"] and path.read_bytes() == b"older"
    status, _, err = ggufspec("-m", model, "-f", text, "-c", "32", "--kl-divergence-base", "/dev/full")
    assert status == 1 and "/dev/full: No space left on device" in err


def test_logits_file_layout(tmp_path):
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) * 9
    logits[0] = 1.0
    path = tmp_path / "l.bin"
    with open(path, "wb") as file:
        logits_file.write_header(file, tokens, 5)
        file.write(logits_file.encode(logits).tobytes())
    raw = path.read_bytes()
    assert raw[:8] == b"_logits_" and struct.unpack("<3i", raw[8:20]) == (6, 5, 2)
    assert struct.unpack("<12i", raw[20:68]) == tuple(range(12))
    assert len(raw) == 68 + 4 * 2 * (6 + 4)  # five values padded to six, and two floats
    read = logits_file.open_logits(str(path))
    assert read.rows_per_chunk == 2 and np.array_equal(read.tokens, tokens)
    got = np.concatenate([read.chunk(0), read.chunk(1)])
    exact = logits - logits.max(1, keepdims=True)
    exact = np.maximum(exact, -16) - np.log(np.exp(exact.astype(np.float64)).sum(1, keepdims=True))
    step = (exact.max(1) - exact.min(1)) / 65535
    assert (np.abs(got - exact) <= step[:, None] * 0.51 + 1e-5).all()
    path.write_bytes(raw[:-1])
    with pytest.raises(FileError, match="cut off"):
        logits_file.open_logits(str(path))
    path.write_bytes(raw[:8] + struct.pack("<3i", 2**30, 5, 2) + raw[20:])
    with pytest.raises(FileError, match="do not fit"):
        logits_file.open_logits(str(path))


def test_statistics():
    rng = np.random.default_rng(1)
    a, noise = rng.exponential(2.0, 500), rng.normal(size=500) * 0.1
    c = Comparison(a + noise, a, np.abs(noise), noise / 10, rng.random(500) < 0.75)
    ratio, error = c.log_ratio()
    differences = (c.nll - c.nll_base).tolist()
    assert ratio == pytest.approx(statistics.mean(differences))
    assert error == pytest.approx(statistics.pstdev(differences) / math.sqrt(499), rel=1e-6)
    assert c.correlation() == pytest.approx(np.corrcoef(c.nll, c.nll_base)[0, 1])
    ordered = np.sort(c.kld)
    for percent in (0.1, 10, 50, 99, 99.9):
        assert percentile(ordered, percent) == pytest.approx(np.percentile(ordered, percent))
    assert c.p_rms()[0] == pytest.approx(math.sqrt(statistics.mean(x * x for x in c.p_diff)))
    share = c.same_top.mean()
    assert c.top() == (share, pytest.approx(math.sqrt(share * (1 - share) / 499)))
    assert f"Same top p: {100 * share:6.3f}" in c.report()


def test_a_tensor_split_is_one_of_whole_layers(ggufspec, model, text):
    """It runs in one process, and says what it does instead."""
    line = ["-m", model, "-f", text, "-c", str(N_CTX), "--device", "CPU0,CPU1"]
    status, out, err = ggufspec(*line, "-sm", "tensor")
    assert status == 0 and "--split-mode tensor" in err and "whole layers are split" in err
    assert ggufspec(*line)[:2] == (0, out) and "whole layers" not in ggufspec(*line)[2]
