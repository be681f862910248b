"""Running one step ahead with captured steps: the same streams and slots as without, times that make sense."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import (  # noqa: E402
    GREEDY,
    KINDS,
    SAMPLED,
    Family,
    both,
    drain,
    n_ahead,
    outcome,
    same_slots,
    watch,
)

from ggufspec.adaptive import adaptive_for  # noqa: E402
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length  # noqa: E402
from ggufspec.job import Request  # noqa: E402
from ggufspec.sampling import SamplingParams  # noqa: E402
from ggufspec.shapes import Shape  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def family():
    return Family("cuda:0")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_streams_and_slots(family, kind, sampling):
    """Three streams of different lengths, a second turn on each; then one that is cancelled and replaced in flight."""

    def play(engine):
        jobs = [engine.submit(Request(p, sampling, n_predict=n)) for p, n in zip(family.prompts, (60, 90, 45))]
        drain(engine)
        for p, first in zip(family.prompts, list(jobs)):
            jobs.append(engine.submit(Request([*p, *first.generated, 40, 41, 42], sampling, n_predict=20)))
            drain(engine)
        going = [engine.submit(Request(p, sampling, n_predict=40)) for p in family.prompts]
        for _ in range(9):
            engine.step()
        engine.cancel(going[1])
        going.append(engine.submit(Request(family.prompts[2][::-1], sampling, n_predict=12)))
        drain(engine)
        return jobs + going

    engine, launches = both(family, kind, play, n_slots=3)
    assert n_ahead(launches) > 0.5 * engine.stats.n_decode


@pytest.mark.parametrize("kind", KINDS)
def test_padded_steps(family, kind):
    """Five streams of seven slots, beside texts that are kept: captured steps of six entries, eager of five."""
    engines, played = [], []
    for use_graphs in (True, False):
        engine = family.engine(kind, use_graphs, n_slots=7, use_graphs=use_graphs)
        jobs = [engine.submit(Request([60 + b, *family.prompts[b % 3]], SAMPLED, n_predict=5)) for b in range(7)]
        drain(engine)
        jobs += [engine.submit(Request([80 + b, *family.prompts[b % 3]], GREEDY, n_predict=40 + b)) for b in range(5)]
        drain(engine)
        for job in jobs[5:7]:
            jobs.append(engine.submit(Request([*job.request.prompt, *job.generated, 50], GREEDY, n_predict=9)))
        drain(engine)
        engines.append(engine), played.append(list(map(outcome, jobs)))
    assert played[0] == played[1]
    same_slots(*engines)
    sizes = {name.size for name in engines[0].decoder.graphs.names() if isinstance(name, Shape)}  # not of prompts
    assert 6 in sizes and 5 not in sizes


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_that_nobody_foresaw(family, kind):
    free = family.engine("plain", False)
    job = free.submit(Request(family.prompts[0], GREEDY, n_predict=60))
    drain(free)
    end = job.generated[31]

    def play(engine):
        engine.tokenizer.eog = frozenset({end})
        engine.chooser.is_eog.zero_()[end] = True
        ending = Request(family.prompts[0], SamplingParams(temperature=0.0), n_predict=60)
        jobs = [engine.submit(ending), engine.submit(Request(family.prompts[1], GREEDY, n_predict=60))]
        drain(engine)
        jobs.append(engine.submit(Request([*family.prompts[0], *jobs[0].generated, 50], GREEDY, n_predict=6)))
        drain(engine)
        return jobs

    before = family.tokenizer.eog
    try:
        engine, launches = both(family, kind, play, n_slots=2)
    finally:
        family.tokenizer.eog = before
    assert engine.stats.n_slots_decoded < sum(n for n, _ in launches)


@pytest.mark.parametrize("kind", ["mtp", "dspark", "dflash2"])
def test_synthetic_acceptance_uses_each_number_once(family, kind):
    def play(engine):
        engine.decoder.synthetic = SyntheticAcceptance(rates_of_length(2.2, KINDS[kind][1]), 2, engine.device)
        seeded = SamplingParams(temperature=0.0, ignore_eos=True, seed=11)
        jobs = [engine.submit(Request(p, seeded, n_predict=60)) for p in family.prompts[:2]]
        drain(engine)
        return jobs

    _, launches = both(family, kind, play, n_slots=2)
    assert n_ahead(launches) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_phases_are_those_of_their_step(family, kind):
    """Times are read while the next step runs: every phase took some, together no more than the steps took."""
    engine = family.engine(kind, True, n_ctx=1024)
    launches = watch(engine)
    for _ in range(2):  # the first one captures
        engine.stats = type(engine.stats)()
        engine.submit(Request(family.prompts[0], GREEDY, n_predict=300, cache_prompt=False))
        drain(engine)
    stats = engine.stats
    assert stats.verify_ms > 0 and stats.sample_ms > 0 and (stats.draft_ms > 0 or kind == "plain")
    assert stats.draft_ms + stats.verify_ms + stats.sample_ms <= 1.02 * stats.decode_ms
    assert n_ahead(launches) > 0.8 * stats.n_decode


def test_lengths_that_the_policy_chooses(family):
    """Widths alternate, each captured twice; the text is the plain one."""
    plain = family.engine("plain", False, n_ctx=1024)
    want = plain.submit(Request(family.prompts[0], GREEDY, n_predict=300))
    drain(plain)
    drafter = family.drafter("mtp", 1, 1024)
    engine = family.engine("mtp", True, n_ctx=1024, drafter=drafter, policy=adaptive_for(drafter))
    engine.policy.forced.extend(engine.policy.start_steps())
    job = engine.submit(Request(family.prompts[0], GREEDY, n_predict=300))
    drain(engine)
    assert job.generated == want.generated
