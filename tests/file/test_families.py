"""The test models themselves: llama.cpp loads and runs each, and gives the published numbers on the formula ones."""

import re

import numpy as np
import pytest
from families import make_dflash, make_gemma3, make_llama, make_qwen2, make_qwen3, make_qwen35
from fixtures import LOGPROBS, N_GENERATED, PROMPT, RUNS, make_fixture
from peer import Peer, complete

from ggufspec.gguf_file import open_gguf

TEXT = "the and of (x) = ret"
F32_CACHES = dict(type_k="f32", type_v="f32", draft_type_k="f32", draft_type_v="f32", flash_attention="off", n_ctx=256)


def test_the_same_seed_makes_the_same_file(tmp_path):
    a, b = (make_qwen35(tmp_path / name, seed=3, n_layers=2, n_embd=64, n_ff=64) for name in "ab")
    c = make_qwen35(tmp_path / "c", seed=4, n_layers=2, n_embd=64, n_ff=64)
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


def test_the_formula(tmp_path):
    """Two elements of fx_q3, worked out by hand from the formula with Python's integers."""
    import zlib

    file = open_gguf(make_fixture(tmp_path / "m", "fx_q3"))
    for name, scale, offset in (("output_norm.weight", 0.25, 1.0), ("blk.1.attn_q.weight", 5 / 64**0.5, 0.0)):
        stored = file.read(name).reshape(-1).view("<f4")
        for k in (0, 37):
            a = (zlib.crc32(name.encode()) + k * 0x9E3779B9) % 2**32
            a ^= a >> 16
            a = a * 0x85EBCA6B % 2**32
            a ^= a >> 13
            a = a * 0xC2B2AE35 % 2**32
            a ^= a >> 16
            assert stored[k] == np.float32(offset + scale * (a / 2**31 - 1))


@pytest.mark.peer
@pytest.mark.parametrize("name", LOGPROBS)
def test_published_log_probabilities(tmp_path, name):
    with Peer(make_fixture(tmp_path / "m", name), **F32_CACHES) as peer:
        answer = peer.complete(PROMPT, 3, top=12, ignore_eos=True)
    for got, expected in zip(answer.top, LOGPROBS[name], strict=True):
        for token in range(1, 12):  # token 0 is forbidden
            assert got[token] == pytest.approx(expected[token], abs=2e-4)


@pytest.mark.peer
@pytest.mark.parametrize("name", RUNS)
def test_published_drafts(tmp_path, name):
    run = RUNS[name]
    target = make_fixture(tmp_path / "t", run.target)
    drafter = make_fixture(tmp_path / "d", run.drafter) if run.drafter else None
    options = dict(kinds=[run.kind], draft=drafter, n_max=run.n_max, p_min=run.p_min, verbosity=4, **F32_CACHES)
    with Peer(target, **options) as peer:
        answer = peer.complete(PROMPT, N_GENERATED, ignore_eos=True)
        steps = [int(n) for n in re.findall(r"accepted +(\d+)/ *\d+ draft tokens", peer.log())]
    assert (answer.n_drafted, answer.n_accepted) == (run.n_drafted, run.n_accepted)
    if run.accepted_at is not None:
        assert {i: n for i, n in enumerate(steps) if n} == run.accepted_at
    drafted = [accepted for _, accepted in run.first_steps if accepted is not None]
    assert steps[: len(drafted)] == drafted


TARGETS = {
    "qwen3": make_qwen3, "qwen2": make_qwen2, "llama": make_llama, "gemma3": make_gemma3, "qwen35": make_qwen35,
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("type", ["F16", "Q4_K"])
@pytest.mark.parametrize("name", TARGETS)
def test_llama_cpp_runs_each_target(tmp_path, name, type):
    path = TARGETS[name](tmp_path / "m", seed=1, type=type)
    (answer,) = complete(path, [TEXT], 12, top=3, ignore_eos=True, n_ctx=256)
    assert len(answer.tokens) == len(answer.top) == 12 and all(len(row) == 3 for row in answer.top)
    assert len(set(answer.tokens)) > 1 and max(answer.logprobs) > -3.5  # neither stuck nor flat


DRAFTERS = {
    "v1": dict(), "v1 window": dict(window=8), "v1 causal": dict(causal=True), "v1 sinks": dict(sinks=True),
    "v1 own ends": dict(own_embedding=True, own_head=True), "v1 reduced": dict(d2t=range(0, 320, 2)),
    "dspark": dict(kind="dspark"), "dspark no confidence": dict(kind="dspark", confidence=False),
    "dspark after anchor": dict(kind="dspark", sample_from_anchor=False),
    "dspark reduced": dict(kind="dspark", d2t=range(0, 320, 2)), "dflash2": dict(kind="dflash2"),
    "dflash2 window": dict(kind="dflash2", window=8), "dflash2 Q4_K": dict(kind="dflash2", type="Q4_K"),
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", DRAFTERS)
def test_llama_cpp_runs_each_drafter(tmp_path, name):
    target = make_qwen35(tmp_path / "t")
    drafter = make_dflash(tmp_path / "d", **DRAFTERS[name])
    kind = "draft-dspark" if name.startswith("dspark") else "draft-dflash"
    (answer,) = complete(target, [TEXT], 8, ignore_eos=True, draft=drafter, kinds=[kind], n_max=5, n_ctx=256)
    assert len(answer.tokens) == 8 and answer.n_drafted > 15


@pytest.mark.peer
@pytest.mark.parametrize("options", [dict(), dict(mtp_own_ends=True), dict(mtp_only=True)])
def test_llama_cpp_runs_each_form_of_mtp(tmp_path, options):
    target = make_qwen35(tmp_path / "t")
    drafter = make_qwen35(tmp_path / "d", **options)
    (answer,) = complete(target, [TEXT], 8, ignore_eos=True, draft=drafter, kinds=["draft-mtp"], n_ctx=256)
    assert len(answer.tokens) == 8 and answer.n_drafted > 8


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["draft-mtp", "draft-dspark"])
def test_leaning_models_accept_some_drafts_and_reject_others(tmp_path, kind):
    target = make_qwen35(tmp_path / "t", follow=0.15, seed=5)
    drafter = make_dflash(tmp_path / "d", kind="dspark", follow=0.15) if kind == "draft-dspark" else None
    (answer,) = complete(target, [TEXT], 32, ignore_eos=True, draft=drafter, kinds=[kind], n_max=4, n_ctx=256)
    assert 4 < answer.n_accepted < answer.n_drafted - 4
