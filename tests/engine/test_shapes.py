"""A server's steps go through the graphs there are: other shapes, the same streams, and no capture in between."""

from __future__ import annotations

import pytest
import torch
from test_padding import held
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, n_ahead, replayed, same_slots, watch

from ggufspec.adaptive import Adaptive
from ggufspec.capture import entry_counts
from ggufspec.engine import Engine
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Job, Request
from ggufspec.sampling import SamplingParams
from ggufspec.shapes import CAPTURE_STEPS, Lacks, Shape, is_end, nearest, wishes

BIASED = SamplingParams(temperature=0.8, top_k=20, seed=9, logit_bias=((40, 1.5), (41, -2.0)), ignore_eos=True)
NARROWER = SamplingParams(temperature=0.7, top_k=5, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def shapes(engine: Engine) -> set[Shape]:
    graphs = engine.decoder.graphs
    assert graphs is not None
    return {name for name in graphs.names() if isinstance(name, Shape)}


def serving(family: Family, kind: str, n_slots: int, n_captured: int | None = None) -> Engine:
    """As a server is after its warm-up: n_captured shapes of those that it wishes for, None: all."""
    engine = replayed(family.engine(kind, True, n_slots))
    engine.serve([SAMPLED])
    while (n_captured is None or len(shapes(engine)) < n_captured) and engine.capture_one():
        pass
    return engine


def joining(family: Family, n: int, samplers: tuple[SamplingParams, ...], length: int = 16):
    """Streams that join one after the other, leave, and one that is cancelled."""

    def play(engine: Engine) -> list[Job]:
        jobs = []
        for b in range(n):
            prompt = [60 + b, *family.prompts[b % 3][: 10 + b]]
            jobs.append(engine.submit(Request(prompt, samplers[b % len(samplers)], n_predict=length + 2 * b)))
            for _ in range(2):
                engine.step()
        engine.cancel(jobs[1])
        drain(engine)
        return jobs

    return play


def generated(jobs: list[Job]) -> list[tuple]:
    """Texts and ends: what does not depend on how many tokens were drafted. Of a cancelled one what both have."""
    return [(job.generated, job.finish_reason) for job in jobs if job.finish_reason != "cancelled"]


def test_the_shape_that_serves_best() -> None:
    step = [Shape("step", n, size) for n in (0, 3, 7) for size in (1, 4, 24)]
    assert nearest(step, Shape("step", 7, 2), 2) == Shape("step", 3, 4)
    assert nearest(step, Shape("step", 5, 4), 3) == Shape("step", 3, 4)
    assert nearest(step, Shape("step", 2, 2), 2) == Shape("step", 0, 4)
    assert nearest(step, Shape("step", 0, 6), 6) == Shape("step", 0, 24)
    assert nearest(step, Shape("step", 7, 12), 12) == Shape("step", 0, 24)  # 192 rows would take too long
    assert nearest(step, Shape("verify", 3, 4), 3) is None
    # rows that are multiplied exactly do not become more than can be: 12 x 16
    wide = [Shape("step", 15, 24), Shape("step", 0, 24)]
    assert nearest(wide, Shape("step", 15, 12), 12) == Shape("step", 0, 24)


def test_graphs_that_sample_serve_those_who_need_less() -> None:
    here = [Shape("step", 3, 4, 40), Shape("step", 3, 4, 64), Shape("step", 3, 4, 100_000)]
    assert nearest(here, Shape("step", 3, 4), 4) == here[0]
    assert nearest(here, Shape("step", 3, 4, 50), 4) == here[1]
    assert nearest(here, Shape("step", 3, 4, 100), 4) is None
    assert nearest(here, Shape("step", 3, 4, 100_000), 4) == here[2]
    assert nearest(here, Shape("step", 3, 4, 40, n_biases=2), 4) is None
    biased = Shape("step", 3, 4, 40, n_biases=2)
    assert nearest([biased], Shape("step", 3, 4), 4) == biased
    assert nearest([Shape("step", 3, 4, 40, n_biases=1024)], biased, 4) is None


def test_wishes_begin_with_what_the_others_can_be_replaced_by() -> None:
    found = wishes("step", range(8), 24, [(40, 0), (0, 0)], lambda n: 0)
    assert len(found) == len(set(found)) == 2 * 8 * 9
    assert {s[1:4] for s in found[:8]} == {(n, size, k) for n in (0, 7) for size in (1, 24) for k in (40, 0)}
    assert all(is_end(s, range(8), 24) for s in found[:8]) and not any(is_end(s, range(8), 24) for s in found[8:])
    assert all(s.n_candidates == 40 for s in found[8:76]) and not any(s.n_candidates for s in found[76:])
    every = {(n, size) for n in range(8) for size in entry_counts(n + 1, 24)}
    assert {s[1:3] for s in found if s.n_candidates} == {s[1:3] for s in found if not s.n_candidates} == every
    assert wishes("verify", [0, 0], 1, [(0, 0)], lambda n: 0) == [Shape("verify", 0, 1)]


def test_a_shape_is_due_when_it_has_cost_a_capture() -> None:
    lacks, wanted = Lacks(), Shape("step", 7, 12)
    assert lacks.worst() is None
    for found, most in ((Shape("step", 7, 24), 40), (Shape("step", 7, 16), 128), (None, 128)):
        lacks = Lacks()
        n = 0
        while not lacks.is_due(wanted):
            lacks.went_without(wanted, found)
            n += 1
        assert 2 <= n <= most and lacks.worst() == wanted
    assert CAPTURE_STEPS > 1


@pytest.mark.parametrize("kind", ["plain", "mtp", "dspark"])
def test_nothing_is_captured_while_streams_join_and_leave(family: Family, kind: str) -> None:
    """The warm-up has all wishes: every step has its own graph, steps run ahead."""
    engine = serving(family, kind, 6)
    before = shapes(engine)
    launches = watch(engine)
    play = joining(family, 5, (SAMPLED, GREEDY, NARROWER))
    got, want = play(engine), play(family.engine(kind, False, 6))
    assert generated(got) == generated(want)
    assert shapes(engine) == before and n_ahead(launches) > 4
    assert not engine.capture_one()


@pytest.mark.parametrize("kind", ["plain", "mtp", "dspark"])
def test_a_few_graphs_serve_all(family: Family, kind: str) -> None:
    """One stream and all slots are captured, nothing else: everything goes through these. Slots end up the same."""
    engine = serving(family, kind, 6, n_captured=0)
    before = shapes(engine)
    assert {shape.size for shape in before} == {1, 6} and {shape.n for shape in before} == {0, engine.n_max}
    play, twin = joining(family, 5, (GREEDY, SAMPLED), 12), family.engine(kind, False, 6)
    launches = watch(engine)
    got, want = play(engine), play(twin)
    assert generated(got) == generated(want)
    assert shapes(engine) == before and {n for n, _ in launches} >= {1, 2, 3}
    assert engine.decoder.forms.lacks.worst() is not None
    assert engine.capture_one() and len(shapes(engine) - before) == 1  # what was missed most comes first


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_changes_no_slot(family: Family, kind: str) -> None:
    """Slots that keep texts whose rows await their replay, captured beside, are what they are in a twin."""
    engine, twin = serving(family, kind, 4, n_captured=0), family.engine(kind, False, 4)
    jobs = []
    for e in (engine, twin):
        jobs.append([e.submit(Request(p, GREEDY, n_predict=9)) for p in family.prompts])
        drain(e)
    before = [held(engine, slot) for slot in range(4)]
    n = len(shapes(engine))
    while engine.capture_one():
        pass
    assert len(shapes(engine)) >= n + 4
    for slot, tensors in enumerate(before):
        assert all(torch.equal(a, b) for a, b in zip(tensors, held(engine, slot), strict=True))
    for e, own in zip((engine, twin), jobs):
        own += [e.submit(Request([*j.request.prompt, *j.generated, 50], GREEDY, n_predict=7)) for j in own[:2]]
        drain(e)
    assert generated(jobs[0]) == generated(jobs[1])
    same_slots(engine, twin)


def test_what_no_graph_serves_runs_as_it_is_until_it_has_cost_a_capture(family: Family) -> None:
    engine = serving(family, "mtp", 3)
    before = shapes(engine)
    play = joining(family, 2, (BIASED, GREEDY), 80)
    got, want = play(engine), play(family.engine("mtp", False, 3))
    assert generated(got) == generated(want)
    new = shapes(engine) - before
    assert 1 <= len(new) <= 3 and {shape.n_biases for shape in new} == {4}


def test_a_grammar_beside_others(family: Family) -> None:
    """The host takes part: the verification alone has graphs, which are captured when nobody waits."""
    engine, twin = serving(family, "dspark", 3), family.engine("dspark", False, 3)
    before, played = shapes(engine), []
    for e in (engine, twin):
        grammar = GrammarSpec("gbnf", 'root ::= "a"{3} [b-z]{3}')
        jobs = [e.submit(Request(family.prompts[0], GREEDY, n_predict=12))]
        jobs.append(e.submit(Request(family.prompts[1], GREEDY, n_predict=12, grammar=grammar)))
        drain(e)
        played.append(generated(jobs))
    assert played[0] == played[1]
    assert shapes(engine) == before and engine.capture_one()
    assert {shape.stage for shape in shapes(engine) - before} == {"verify"}


def test_lengths_of_a_policy(family: Family) -> None:
    """The policy asks for widths that have no graph: it is told what was drafted. The texts are the same."""
    engine = replayed(family.engine("dspark", True, 4, policy=Adaptive([5])))
    with torch.inference_mode():
        engine.decoder.forms.serve([0, 2], [])
    while engine.capture_one():
        pass
    seen = []
    policy = engine.policy
    assert policy is not None
    record = policy.record
    policy.record = lambda jobs, choice, *rest: (seen.append(choice), record(jobs, choice, *rest))  # type: ignore
    policy.forced.extend((n, (0,)) for n in (5, 3, 1, 4, 2, 0) for _ in range(2))
    before = shapes(engine)
    play = joining(family, 3, (GREEDY,), 30)
    got, want = play(engine), play(family.engine("plain", False, 4))
    assert generated(got) == generated(want)
    assert shapes(engine) == before and {choice.n for choice in seen} == {0, 2}
    assert all(length <= choice.n for choice in seen for length in choice.lengths)


def test_times_are_kept_by_the_entries_that_steps_have(family: Family) -> None:
    engine = serving(family, "plain", 6, n_captured=0)
    entries = engine.decoder.n_entries
    assert (entries(1, 0), entries(3, 0), entries(5, 0)) == (1, 6, 6)
    while engine.capture_one():
        pass
    assert (entries(1, 0), entries(3, 0), entries(5, 0)) == (1, 3, 6)


def test_captures_wait_for_requests(family: Family) -> None:
    engine = serving(family, "plain", 3, n_captured=0)
    engine.submit(Request(family.prompts[0], GREEDY, n_predict=5))
    assert not engine.capture_one()
    drain(engine)
    assert engine.capture_one()
