"""Synthetic acceptance: the rates of a length, the checks, the random stream and the counts of a long run."""

import pytest
import torch
from families import make_dflash, make_qwen3
from hypothesis import given
from hypothesis import strategies as st
from loop import load_target, make_drafter
from peer import Peer
from small_vocabulary import twelve_letters

from ggufspec.drafters.synth import (
    SyntheticAcceptance,
    Uniforms,
    check_rates,
    conditional,
    rates_of_length,
)
from ggufspec.engine import Engine
from ggufspec.errors import ConfigError
from ggufspec.job import Request
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer

SMALL = dict(type="F32", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12)
PROMPT = [5, 6, 7, 8, 9, 10, 1, 3, 4, 2, 3, 2, 2, 5, 1, 7]


@given(st.integers(1, 16), st.floats(0, 1))
def test_rates_have_the_length_asked_for(n_max, share):
    length = 1 + share * n_max
    rates = rates_of_length(length, n_max)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-6)
    assert check_rates(rates, n_max) == rates


def test_ends_are_exact():
    assert rates_of_length(1, 3) == [0, 0, 0] and rates_of_length(4, 3) == [1, 1, 1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: rates_of_length(0.5, 3), r"--spec-synth-len is 0.5; expected 1 to 4"),
        (lambda: rates_of_length(4.01, 3), r"is 4.01; expected 1 to 4"),
        (lambda: rates_of_length(float("nan"), 3), r"is nan"),
        (lambda: check_rates([0.5], 2), r"has 1 values; expected 2"),
        (lambda: check_rates([0.5, 1.5], 2), r"value 2 is 1.5; expected 0 to 1"),
        (lambda: check_rates([0.5, 0.6], 2), r"value 2 is 0.6, above the one before it, 0.5"),
    ],
)
def test_refusals_say_what_was_expected(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_conditional_rates():
    assert conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


def test_the_twister_is_the_standard_one():
    """Outputs 1 and 2 of mt19937 seeded 5489 are 3499211612 and 581869302; the 10,000th is 4123659995."""
    twister = Uniforms(5489)
    assert twister.peek(1)[0] == (3499211612 + 2.0**32 * 581869302) / 2.0**64
    assert int(twister.peek(5000)[-1] * 2**32) == 4123659995


def settle(synth, drafts, sampled, n_rows, eog=()):
    rows = Rows(
        torch.cat([torch.zeros(len(drafts), 1, dtype=torch.int64), drafts], 1),
        torch.arange(len(drafts)), torch.zeros(len(drafts), dtype=torch.int64), n_rows, True,
    )  # fmt: skip
    is_eog = torch.zeros(100, dtype=torch.bool)
    is_eog[list(eog)] = True
    return synth.settle(rows, sampled, synth.draw(range(len(drafts)), drafts.shape[1]), is_eog)


def test_accepted_drafts_replace_the_targets_choice():
    synth = SyntheticAcceptance([1.0, 1.0, 0.0], 3, torch.device("cpu"))
    drafts = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    sampled = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    tokens, n = settle(synth, drafts, sampled, torch.tensor([4, 2, 4]), eog=(31,))
    assert n.tolist() == [2, 1, 0]
    assert tokens.tolist() == [[11, 12, 3, 4], [21, 6, 7, 8], [9, 10, 11, 12]]


def test_a_long_run_has_the_mean_length():
    synth = SyntheticAcceptance(rates_of_length(3.0, 5), 1, torch.device("cpu"))
    synth.start(0, 42)
    drafts, sampled = torch.full((1, 5), 7), torch.full((1, 6), 8)
    total, n_steps = 0, 4000
    for _ in range(n_steps):
        _, n = settle(synth, drafts, sampled, torch.tensor([6]))
        synth.used(0, 5, int(n))
        total += 1 + int(n)
    assert total / n_steps == pytest.approx(3.0, abs=0.1)


def test_a_request_repeats_its_stream():
    synth = SyntheticAcceptance([0.5, 0.25], 2, torch.device("cpu"))
    synth.start(0, 9)
    synth.start(1, 9)
    first = synth.draw([0], 4).tolist()
    assert synth.draw([1], 4).tolist() == first
    synth.used(0, n_drafted=2, n_accepted=0)
    assert synth.draw([0], 3).tolist() == [first[0][1:]]


@pytest.mark.peer
@pytest.mark.parametrize("seed, length", [(42, 3.0), (123, 5.5)])
def test_the_engine_accepts_what_llama_accepts(tmp_path, seed, length):
    """Same seed, same twister: the same counts, whatever the models say."""
    paths = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    make_qwen3(paths[0], seed=3, vocabulary=twelve_letters(), **SMALL)
    make_dflash(paths[1], seed=5, vocabulary=twelve_letters(mask=True), **SMALL)
    file, target = load_target(paths[0])
    drafter = make_drafter(file, target, paths[1], ["draft-dflash"], n_max=5)
    synthetic = SyntheticAcceptance(rates_of_length(length, 5), 1, torch.device("cpu"))
    tokenizer = Tokenizer.from_metadata(file.metadata)
    engine = Engine(target, tokenizer, drafter=drafter, n_ctx=512, synthetic=synthetic)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, seed=seed)
    for event in engine.generate(Request(PROMPT, sampling, n_predict=100)):
        job = event.job
    params = {"speculative.synth_len": length}
    with Peer(paths[0], draft=paths[1], kinds=["draft-dflash"], n_max=5, n_threads=1, params=params) as peer:
        answer = peer.complete(PROMPT, 100, ignore_eos=True, seed=seed)
    assert (job.stats.draft_n, job.stats.draft_n_accepted) == (answer.n_drafted, answer.n_accepted)
