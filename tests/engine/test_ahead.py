"""Running one step ahead: the same streams, counts and slots as without, whatever ends while a step is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import families
import pytest
import torch
from two_engines import (
    GREEDY,
    KINDS,
    SAMPLED,
    Family,
    both,
    drain,
    n_ahead,
    outcome,
    replayed,
    same_slots,
    watch,
)  # fmt: skip

from ggufspec.adaptive import Choice
from ggufspec.choose import Plan
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length
from ggufspec.engine import Engine
from ggufspec.flight import Flight
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Job, Request
from ggufspec.models import load_model
from ggufspec.placement import Placement
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_streams_and_slots(family: Family, kind: str, sampling: SamplingParams) -> None:
    """Three streams of different lengths; then a second turn on what the first one left."""

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request(p, sampling, n_predict=n)) for p, n in zip(family.prompts, (14, 23, 9))]
        drain(engine)
        for p, first in zip(family.prompts, list(jobs)):
            job = engine.submit(Request([*p, *first.generated, 40, 41, 42], sampling, n_predict=8))
            drain(engine)
            assert job.n_prompt_cached == len(p) + len(first.generated) - 1
            jobs.append(job)
        return jobs

    engine, launches = both(family, kind, play, n_slots=3)
    assert n_ahead(launches) > 0.5 * engine.stats.n_decode


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_take_turns(family: Family, kind: str) -> None:
    """Through the graphs' fixed inputs and outputs: what did not change is not copied, every step has two outputs."""
    biased = SamplingParams(temperature=0.8, seed=9, logit_bias=((40, 1.5), (41, -2.0)), ignore_eos=True)

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request(p, s, n_predict=n)) for p, s, n in
                zip(family.prompts, (SAMPLED, GREEDY, biased), (14, 20, 9))]  # fmt: skip
        drain(engine)
        jobs += [engine.submit(Request(p, SAMPLED, n_predict=12)) for p in family.prompts[1:]]
        drain(engine)
        return jobs

    plain, captured = family.engine(kind, False, n_slots=3), replayed(family.engine(kind, True, n_slots=3))
    launches = watch(captured)
    want, got = play(plain), play(captured)
    assert list(map(outcome, got)) == list(map(outcome, want))
    same_slots(captured, plain)
    assert n_ahead(launches) > 5
    graphs = captured.decoder.graphs
    assert graphs is not None and all(len(entry.graphs) == 2 for entry in graphs.captured.values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_that_nobody_foresaw(family: Family, kind: str) -> None:
    """The stream ends while the next step is on its way: it leaves no trace, the neighbour goes on."""
    free = family.engine("plain", False)
    job = free.submit(Request(family.prompts[0], GREEDY, n_predict=30))
    drain(free)
    end = job.generated[11]
    tokenizer = Tokenizer.from_metadata(family.file.metadata)
    tokenizer.eog = frozenset({end})

    def play(engine: Engine) -> list[Job]:
        ending = Request(family.prompts[0], SamplingParams(temperature=0.0), n_predict=60)
        jobs = [engine.submit(ending), engine.submit(Request(family.prompts[1], GREEDY, n_predict=30))]
        drain(engine)
        jobs.append(engine.submit(Request([*family.prompts[0], *jobs[0].generated, 50], GREEDY, n_predict=6)))
        drain(engine)
        return jobs

    before, family.tokenizer = family.tokenizer, tokenizer
    try:
        engine, launches = both(family, kind, play, n_slots=2)
    finally:
        family.tokenizer = before
    assert engine.stats.n_slots_decoded < sum(n for n, _ in launches)  # something was thrown away
    assert n_ahead(launches) > 5


@pytest.mark.parametrize("n_prompt", [30, 490, 600])
def test_a_window_keeps_no_trace_of_what_was_dropped(family: Family, n_prompt: int) -> None:
    """A sliding layer's cells are a ring: the draft of a step that nobody reads stands in the middle of it."""

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request((family.prompts[k] * 40)[: n_prompt + k], GREEDY, n_predict=9 + k, slot=k))
                for k in range(3)]  # fmt: skip
        drain(engine)
        return jobs

    dropped: list[int] = []
    with_it, without = (family.engine("dflash2", ahead, 3, 1024) for ahead in (True, False))
    assert any(own.ring for own in with_it.drafter.kvs)  # type: ignore[union-attr]
    drop = with_it.decoder.drop
    with_it.decoder.drop = lambda slot: (dropped.append(slot), drop(slot))[1]  # type: ignore
    got, want = play(with_it), play(without)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert dropped
    same_slots(with_it, without)


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_end(family: Family, kind: str) -> None:
    def play(engine: Engine) -> list[Job]:
        job = engine.submit(Request((family.prompts[0] * 40)[:235], GREEDY))
        drain(engine)
        assert job.truncated
        return [job]

    engine, launches = both(family, kind, play, n_ctx=256)
    assert n_ahead(launches) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_come_and_go(family: Family, kind: str) -> None:
    """Cancelled in flight, replaced at once, others beside it."""

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request(p, GREEDY, n_predict=30)) for p in family.prompts]
        for _ in range(7):
            engine.step()
        engine.cancel(jobs[1])
        jobs.append(engine.submit(Request(family.prompts[2][::-1], SAMPLED, n_predict=12)))
        for _ in range(4):
            engine.step()
        engine.cancel(jobs[0])
        drain(engine)
        return jobs

    engine, launches = both(family, kind, play, n_slots=3)
    assert n_ahead(launches) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(family: Family, kind: str) -> None:
    """With drafts a stop string can end a stream inside what was accepted: no step is launched before that is known."""
    free = family.engine("plain", False)
    job = free.submit(Request(family.prompts[0], GREEDY, n_predict=40))
    drain(free)
    stop = job.text[25:29]

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request(family.prompts[0], GREEDY, n_predict=40, stop=(stop,)))]
        drain(engine)
        jobs.append(engine.submit(Request([*family.prompts[0], *jobs[0].generated, 50], GREEDY, n_predict=6)))
        drain(engine)
        assert jobs[0].stop_kind == "word"
        assert jobs[1].n_prompt_cached == len(family.prompts[0]) + len(jobs[0].generated) - 1
        return jobs

    _, launches = both(family, kind, play)
    assert n_ahead(launches) > 0


def test_what_needs_the_host_waits_for_it(family: Family) -> None:
    def play(engine: Engine) -> list[Job]:
        probabilities = SamplingParams(temperature=0.0, n_probs=2, ignore_eos=True)
        grammar = GrammarSpec("gbnf", 'root ::= [a-z ]+')
        jobs = [engine.submit(Request(family.prompts[0], probabilities, n_predict=6))]
        drain(engine)
        jobs.append(engine.submit(Request(family.prompts[1], GREEDY, n_predict=6, grammar=grammar)))
        drain(engine)
        penalized = SamplingParams(temperature=0.5, seed=3, repeat_penalty=1.3, ignore_eos=True)
        jobs.append(engine.submit(Request(family.prompts[2], penalized, n_predict=6)))
        drain(engine)
        return jobs

    _, launches = both(family, "mtp", play)
    assert n_ahead(launches) == 0


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_synthetic_acceptance_uses_each_number_once(family: Family, kind: str) -> None:
    """How many random numbers a step uses is known on the device only when the next one is launched."""
    n_max = KINDS[kind][1]

    def play(engine: Engine) -> list[Job]:
        engine.decoder.synthetic = SyntheticAcceptance(rates_of_length(2.2, n_max), 2, torch.device("cpu"))
        seeded = SamplingParams(temperature=0.0, ignore_eos=True, seed=11)
        jobs = [engine.submit(Request(p, seeded, n_predict=40)) for p in family.prompts[:2]]
        drain(engine)
        return jobs

    engine, launches = both(family, kind, play, n_slots=2)
    assert n_ahead(launches) > 5 and engine.stats.draft_n_accepted > 10


def test_lengths_that_change_from_step_to_step(family: Family) -> None:
    """A policy is asked and told in the same order, so it decides the same."""

    class Turns:
        """0, 1, 2, 3, 0, ...; remembers what it was told."""

        def __init__(self) -> None:
            self.n, self.told = -1, []  # type: ignore[var-annotated]

        def choose(self, jobs: Sequence[int], most: Sequence[int], pending: Choice | None) -> Choice:
            self.n += 1
            n = self.n % 4
            return Choice(n, [min(n, m) for m in most], [(0,)] * len(jobs))

        def record(self, jobs: Any, choice: Choice, n_drafted: Any, n_accepted: Any, sources: Any, ms: Any) -> None:
            self.told.append((list(jobs), choice, list(n_drafted), list(n_accepted), ms is None))

    told = []
    for ahead in (True, False):
        policy = Turns()
        engine = family.engine("mtp", ahead, policy=policy)
        launches = watch(engine)
        job = engine.submit(Request(family.prompts[0], GREEDY, n_predict=40))
        drain(engine)
        told.append((policy.told, job.generated))
        assert (n_ahead(launches) > 0.8 * engine.stats.n_decode) == ahead
    assert told[0] == told[1]


def test_without_recurrent_layers(family: Family, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = families.make_qwen3(tmp_path_factory.mktemp("m") / "m.gguf", seed=11)
    file = open_gguf(path)
    n = int(file.metadata[f"{file.architecture}.block_count"])
    model, tokenizer = load_model(file, Placement.single("cpu", n)), Tokenizer.from_metadata(file.metadata)
    streams = []
    for ahead in (True, False):
        engine = Engine(model, tokenizer, n_ctx=256, n_slots=2, ahead=ahead)
        jobs = [engine.submit(Request([40 + b, 41, 42], SAMPLED, n_predict=20 + b)) for b in range(2)]
        drain(engine)
        streams.append([outcome(job) for job in jobs])
    assert streams[0] == streams[1]


def test_closing_a_stream_leaves_the_engine_idle(family: Family) -> None:
    engine = family.engine("mtp", True)
    stream = engine.generate(Request(family.prompts[0], GREEDY, n_predict=40))
    for _ in range(6):
        next(stream)
    stream.close()
    assert engine.idle and engine.slots[0].job is None
    n = engine.slots[0].n_past
    other = family.engine("mtp", False)
    again = [e.submit(Request([*engine.slots[0].tokens, 9], GREEDY, n_predict=10)) for e in (engine, other)]
    drain(engine), drain(other)
    assert again[0].n_prompt_cached == n and again[0].generated == again[1].generated


def test_an_interrupt_between_launch_and_results(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are on their way and will not be read: the slot is empty afterwards, and right."""
    engine = family.engine("mtp", True)
    job = engine.submit(Request(family.prompts[0], GREEDY, n_predict=40))
    for _ in range(5):
        engine.step()

    def interrupted(flight: Flight) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.cancel(job)
    engine.step()
    assert engine.idle and engine.slots[0].tokens == []
    again = engine.submit(Request(family.prompts[0], GREEDY, n_predict=10))
    drain(engine)
    n = min(10, len(job.generated))
    assert n > 5 and again.generated[:n] == job.generated[:n]


def test_another_plan_has_another_number() -> None:
    a, b = Plan(None, 1), Plan(None, 1)
    assert a.serial != b.serial
