"""Captured, padded prompt chunks: the bits of eager ones, whatever their width, for streams, slots and drafters."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, outcome, same_slots  # noqa: E402

from ggufspec.job import Request  # noqa: E402
from ggufspec.prefill import WIDTHS  # noqa: E402

pytestmark = pytest.mark.gpu
TOKENS = [40 + 7 * i % 400 for i in range(1100)]


@pytest.fixture(scope="module")
def family():
    return Family("cuda:0")


def captured_widths(engine):
    return {key[0][1] for key in engine.prefill.graphs.captured if key[0][0] == "prompt"}


@torch.inference_mode()
def chunk(engine, start, stop):
    """Logits of the last token and hidden rows of a chunk in slot 0, which stands at `start`."""
    output = engine.prefill.run(TOKENS[start:stop], 0, start, is_last=True)
    engine.prefill.join()
    engine.slots[0].tokens = TOKENS[:stop]
    return output.logits.clone(), output.hidden[:, : stop - start].clone()


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_all_widths(family, kind):
    """A graph's bits are those of eager launches; up to 192 rows also those of a chunk that is not padded at all."""
    captured, eager, exact = (family.engine(kind, False, 1, 2048, use_graphs=g) for g in (True, False, False))
    assert eager.prefill.graphs is None and eager.prefill.is_padded
    exact.prefill.is_padded = False
    lengths = (1, 2, 9, 16, 18, 31, 32, 33, 64, 65, 97, 130, 161, 192, 193, 300, 400, 512)
    for n in lengths:
        engines = [captured, eager] + ([exact] if n <= 192 else [])
        for engine in engines:
            engine.erase_slot(0)
        for start, stop in ((0, n), (n, 2 * n)):
            first, *others = [chunk(engine, start, stop) for engine in engines]
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(first, other)), (n, start)
        for other in engines[1:]:
            same_slots(captured, other)
    assert captured_widths(captured) == set(WIDTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_past_the_last_cell(family, kind):
    """A chunk whose padding would stand behind the end of the context, and behind all cells there are."""
    captured, exact = (family.engine(kind, False, 1, 500, use_graphs=g) for g in (True, False))
    exact.prefill.is_padded = False
    results = [[chunk(e, a, b) for a, b in ((0, 190), (190, 380), (380, 482), (482, 499))] for e in (captured, exact)]
    assert all(torch.equal(a, b) for mine, theirs in zip(*results) for a, b in zip(mine, theirs))
    same_slots(captured, exact)
    assert captured_widths(captured) == {192, 128, 32}  # the last one to position 513, of 512 cells


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_slots(family, kind, sampling):
    """Prompts of all kinds of lengths beside one another, second turns included, steps captured or not."""

    def play(engine):
        jobs = [engine.submit(Request(TOKENS[k : k + n], sampling, n_predict=20, slot=k % 3))
                for k, n in enumerate((1, 14, 17, 40, 144, 200, 530, 700))]  # fmt: skip
        drain(engine)
        for k, job in enumerate(jobs[-3:]):
            text = [*job.request.prompt, *job.generated, 50, 51]
            jobs.append(engine.submit(Request(text, sampling, n_predict=6, slot=(5 + k) % 3)))
        jobs.append(engine.submit(Request([*TOKENS[6:500], 60, 61], sampling, n_predict=6, slot=0)))
        drain(engine)
        return jobs

    engines = [family.engine(kind, g, 3, 1024, use_graphs=g) for g in (True, False)]
    got, want = (play(engine) for engine in engines)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert [job.n_prompt_cached for job in got] == [job.n_prompt_cached for job in want]
    same_slots(*engines)
    assert len(captured_widths(engines[0])) > 4


def test_a_graph_captured_while_others_decode(family):
    """Widths that are first needed in the middle of other streams: these go on as if nothing had happened."""

    def play(engine):
        jobs = [engine.submit(Request(p, SAMPLED, n_predict=150)) for p in family.prompts[:2]]
        for n in (20, 70, 260):
            for _ in range(7):
                engine.step()
            jobs.append(engine.submit(Request(TOKENS[:n], GREEDY, n_predict=5, cache_prompt=False)))
        drain(engine)
        return jobs

    engines = [family.engine("mtp", g, 3, 1024, use_graphs=g) for g in (True, False)]
    got, want = (play(engine) for engine in engines)
    assert list(map(outcome, got)) == list(map(outcome, want))
    same_slots(*engines)
