"""Captured steps of a few sizes: entries without rows change no stream and no slot, whatever these hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, n_ahead, outcome, replayed, same_slots, watch

from ggufspec.capture import entry_counts, n_entries
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.small_model import SmallModel
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length
from ggufspec.engine import Engine
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Job, Request
from ggufspec.kernels.matmul.cuda import NARROW_TOKENS
from ggufspec.sampling import SamplingParams

BIASED = SamplingParams(temperature=0.8, seed=9, logit_bias=((40, 1.5), (41, -2.0)), ignore_eos=True)


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def sizes(engine: Engine) -> set[int]:
    """Entries of the steps that were captured."""
    graphs = engine.decoder.graphs
    assert graphs is not None
    return {entry.inputs[0].shape[1] for entry in graphs.captured.values()}


def requests(family: Family, n: int, n_predict: int) -> list[Request]:
    """Different prompts, samplers and lengths."""
    samplers = (GREEDY, SAMPLED, BIASED, SAMPLED, GREEDY)
    return [
        Request([60 + b, *family.prompts[b % 3][: 12 + b]], samplers[b % 5], n_predict=n_predict + b % 4)
        for b in range(n)
    ]


def pair(family: Family, kind: str, n_slots: int, **options: Any) -> tuple[Engine, Engine]:
    """Steps as they are, and captured ones that run ahead."""
    return family.engine(kind, False, n_slots, **options), replayed(family.engine(kind, True, n_slots, **options))


def test_sizes() -> None:
    assert [n_entries(n, 1, 64) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33, 49)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 48, 64
    ]  # fmt: skip
    assert [n_entries(n, 1, 5) for n in range(1, 6)] == [1, 2, 3, 4, 5]
    for n_rows in (1, 4, 5, 8, 17):
        for n in range(1, 200):
            size = n_entries(n, n_rows, 200)
            assert n <= size <= max(n, 1.5 * n - 0.5)
            assert size * n_rows <= NARROW_TOKENS or n * n_rows > NARROW_TOKENS
        assert len(entry_counts(n_rows, 24)) <= 10
    assert entry_counts(1, 24) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_come_and_go(family: Family, kind: str) -> None:
    """Five streams of seven slots, then fewer, beside slots that are empty, that keep a text whose rows await their
    replay, and that are being given a prompt."""

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(request) for request in requests(family, 7, 2)]
        drain(engine)
        kept = [[*job.request.prompt, *job.generated] for job in jobs]
        jobs += [engine.submit(request) for request in requests(family, 5, 16)]
        for _ in range(9):
            engine.step()
        engine.cancel(jobs[-4])
        jobs.append(engine.submit(Request((family.prompts[1] * 4)[:75], SAMPLED, n_predict=6)))
        drain(engine)
        jobs += [engine.submit(Request([*text, 50 + b], GREEDY, n_predict=5)) for b, text in enumerate(kept[4:7])]
        drain(engine)
        return jobs

    plain, captured = pair(family, kind, 7, n_ubatch=16)
    launches = watch(captured)
    want, got = play(plain), play(captured)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert [job.n_prompt_cached for job in got] == [job.n_prompt_cached for job in want]
    assert max(job.n_prompt_cached for job in got[-3:]) > 10
    same_slots(captured, plain)
    assert {n for n, _ in launches} >= {1, 2, 3, 4, 5} and sizes(captured) <= {1, 2, 3, 4, 6, 7}
    assert 6 in sizes(captured) and n_ahead(launches) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_other_slots_changes(family: Family, kind: str) -> None:
    """Not even what nobody reads: every number that engine, cache and drafter hold of slots without a part."""
    engine = replayed(family.engine(kind, True, 6))
    for request in requests(family, 6, 4):
        engine.submit(request)
    drain(engine)
    running = [engine.submit(Request(family.prompts[b % 3], GREEDY, n_predict=40)) for b in range(5)]
    while not all(job.generated for job in running):
        engine.step()
    for _ in range(2):
        engine.step()
    (idle,) = (slot.id for slot in engine.slots if slot.job is None)
    before = held(engine, idle)
    n_steps = engine.stats.n_decode
    for _ in range(3):
        engine.step()
    assert engine.stats.n_decode == n_steps + 3 and sizes(engine) >= {6} and not sizes(engine) & {5}
    after = held(engine, idle)
    assert len(before) == len(after) > 3
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def held(engine: Engine, slot: int) -> list[torch.Tensor]:
    """Copies of all that belongs to a slot."""
    cache, drafter = engine.cache, engine.drafter
    kvs = [k for k in cache.kv if k is not None]
    kvs += getattr(drafter, "kvs", None) or ([drafter.kv] if hasattr(drafter, "kv") else [])
    tensors = [t[slot] for k in kvs for t in (k.k, k.v)]
    for state in cache.recurrent:
        if state is not None:
            windows = (state.window_u, state.window_k, state.window_v, state.window_g, state.window_beta, state.counts)
            tensors += [state.state[slot], state.arrived[slot], *(t[:, slot] for t in windows)]
    carried = ("pending", "verified", "verified_rows")
    tensors += [getattr(drafter, name)[slot] for name in carried if hasattr(drafter, name)]
    return [t.clone() for t in (*tensors, engine.decoder.values.values[:, slot])]


def test_a_small_model_that_drafts(family: Family) -> None:
    """A draft model with recurrent layers, here the target itself: its own states stay too."""

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(request) for request in requests(family, 5, 18)]
        drain(engine)
        jobs += [engine.submit(Request([*jobs[4].request.prompt, *jobs[4].generated, 50], GREEDY, n_predict=5))]
        drain(engine)
        return jobs

    def drafter() -> SmallModel:
        return SmallModel(family.model, DraftOptions(n_max=2), n_slots=6, n_ctx=256)

    plain = family.engine("plain", False, 6, drafter=drafter())
    captured = replayed(family.engine("plain", True, 6, drafter=drafter()))
    want, got = play(plain), play(captured)
    assert list(map(outcome, got)) == list(map(outcome, want))
    same_slots(captured, plain)
    assert 6 in sizes(captured) and 5 not in sizes(captured)


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_synthetic_acceptance(family: Family, kind: str) -> None:
    def play(engine: Engine) -> list[Job]:
        rates = rates_of_length(2.2, KINDS[kind][1])
        engine.decoder.synthetic = SyntheticAcceptance(rates, 6, torch.device("cpu"))
        seeded = SamplingParams(temperature=0.0, ignore_eos=True, seed=11)
        jobs = [engine.submit(Request([50 + b, *family.prompts[b % 3]], seeded, n_predict=16)) for b in range(5)]
        drain(engine)
        return jobs

    plain, captured = pair(family, kind, 6)
    want, got = play(plain), play(captured)
    assert list(map(outcome, got)) == list(map(outcome, want))
    same_slots(captured, plain)
    assert 6 in sizes(captured) and captured.stats.draft_n_accepted > 10


@pytest.mark.parametrize("kind", ["mtp", "ngram", "chain"])
def test_padding_of_a_verification_alone(family: Family, kind: str) -> None:
    """Steps in which the host has a part: penalties, a grammar, drafters of its own."""
    penalized = SamplingParams(temperature=0.7, seed=3, repeat_penalty=1.2, ignore_eos=True)
    grammar = GrammarSpec("gbnf", 'root ::= [a-z ]+')

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(request) for request in requests(family, 5, 4)]
        drain(engine)
        made = [Request([*job.request.prompt, *job.generated, 50], penalized, n_predict=18) for job in jobs[:4]]
        jobs += [engine.submit(request) for request in made]
        jobs.append(engine.submit(Request(family.prompts[1], GREEDY, n_predict=12, grammar=grammar)))
        drain(engine)
        return jobs

    def engine(ahead: bool) -> Engine:
        if kind in KINDS:
            return family.engine(kind, ahead, 6)
        types = ("ngram-simple",) if kind == "ngram" else ("ngram-simple", "draft-mtp")
        options = SpecOptions(types, DraftOptions(n_max=3))
        drafter = load_drafter(
            options, family.file, family.model, None, n_slots=6, n_ctx=256, target_weights=family.weights
        )
        return family.engine("plain", ahead, 6, drafter=drafter)

    plain, captured = engine(False), replayed(engine(True))
    want, got = play(plain), play(captured)
    assert list(map(outcome, got)) == list(map(outcome, want))
    same_slots(captured, plain)
    graphs = captured.decoder.graphs
    assert graphs is not None
    verified = {entry.inputs[0].shape[0] for key, entry in graphs.captured.items() if key[0][0] == "verify"}
    assert 6 in verified and verified <= {1, 2, 3, 4, 6}
