"""A server that is warm captures nothing while streams join and leave; what it lacks it captures between requests."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, n_ahead, outcome, same_slots, watch  # noqa: E402

from ggufspec.adaptive import adaptive_for  # noqa: E402
from ggufspec.job import Request  # noqa: E402
from ggufspec.prefill import WIDTHS  # noqa: E402
from ggufspec.shapes import Shape  # noqa: E402
from ggufspec.tools import warm_up  # noqa: E402

pytestmark = pytest.mark.gpu
N_SLOTS, N_CTX = 8, 512


@pytest.fixture(scope="module")
def family():
    return Family("cuda:0")


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Other tests may have the card at the same time."""
    monkeypatch.setattr(warm_up, "PROMPT_SECONDS", 300.0)


def warm(engine, seconds):
    """As the server's start does it."""
    warm_up.capture_prompts(engine, 0)
    warm_up.run_all(engine, 0)
    warm_up.capture_steps(engine, [SAMPLED], seconds)
    return engine


def shapes(engine):
    return {name for name in engine.decoder.graphs.names() if isinstance(name, Shape)}


def play(engine, family, n_streams=7, n_predict=40):
    """Streams that join one after the other, of two ways of sampling; one is cancelled."""
    jobs = []
    for b in range(n_streams):
        prompt = [60 + b, *family.prompts[b % 3]]
        jobs.append(engine.submit(Request(prompt, (SAMPLED, GREEDY)[b % 2], n_predict=n_predict + 3 * b)))
        for _ in range(3):
            engine.step()
    engine.cancel(jobs[2])
    drain(engine)
    return jobs


def texts(jobs):
    return [job.generated for job in jobs if job.finish_reason != "cancelled"]


@pytest.mark.parametrize("seconds", [60.0, 0.0], ids=["all", "few"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_captured_while_streams_run(family, kind, seconds):
    """With graphs of all shapes, and with those of one stream and of all slots alone."""
    engine = warm(family.engine(kind, True, N_SLOTS, N_CTX), seconds)
    if seconds == 0:
        engine.decoder.forms.is_due = lambda form: False  # whatever it costs to go without
    before = len(engine.decoder.graphs.captured)
    launches = watch(engine)
    got = play(engine, family)
    assert len(engine.decoder.graphs.captured) == before
    eager = family.engine(kind, False, N_SLOTS, N_CTX, use_graphs=False)
    assert texts(got) == texts(play(eager, family))
    assert n_ahead(launches) > 5 and {n for n, _ in launches} >= {1, 2, 3, 4, 5}
    if seconds > 0:
        assert not engine.capture_one()


def test_nothing_is_captured_for_a_policy(family):
    drafter = family.drafter("dspark", N_SLOTS, N_CTX)
    engine = warm(family.engine("dspark", True, N_SLOTS, N_CTX, drafter=drafter, policy=adaptive_for(drafter)), 60.0)
    assert {shape.n for shape in shapes(engine)} == set(engine.policy.widths)
    before = len(engine.decoder.graphs.captured)
    got = play(engine, family, n_predict=80)
    assert len(engine.decoder.graphs.captured) == before
    plain = family.engine("plain", False, N_SLOTS, N_CTX, use_graphs=False)
    assert texts(got) == texts(play(plain, family, n_predict=80))


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_between_requests_changes_no_slot(family, kind):
    engine, twin = (family.engine(kind, True, 4, N_CTX) for _ in range(2))
    played = []
    for e in (engine, twin):
        jobs = [e.submit(Request(p, SAMPLED, n_predict=21)) for p in family.prompts]
        drain(e)
        if e is engine:
            n = len(e.decoder.graphs.captured)
            e.serve([SAMPLED])
            while e.capture_one():
                pass
            assert len(e.decoder.graphs.captured) > n + 2
            torch.cuda.synchronize()
        jobs += [e.submit(Request([*j.request.prompt, *j.generated, 50], GREEDY, n_predict=9)) for j in jobs]
        drain(e)
        played.append(list(map(outcome, jobs)))
    assert played[0] == played[1]
    same_slots(engine, twin)


def test_what_captures_cost(family, capsys):
    """Not a limit but a figure: milliseconds a shape, and that prompts have all their widths."""
    engine = warm(family.engine("mtp", True, N_SLOTS, N_CTX), 0.0)
    n, times = len(shapes(engine)), []
    while True:
        began = time.perf_counter()
        if not engine.capture_one():
            break
        times.append(1000 * (time.perf_counter() - began))
    assert len(times) == len(shapes(engine)) - n > 4
    prompts = {key[0][1] for key in engine.prefill.graphs.captured if key[0][0] == "prompt"}
    assert prompts == {width for width in WIDTHS if width <= 512}
    with capsys.disabled():
        print(f"\n{len(times)} captures, {sorted(times)[len(times) // 2]:.0f} ms each, {max(times):.0f} ms at most")
