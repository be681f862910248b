"""The automatic draft length against simulated drafters: chances and costs known, the best length known."""

import random

import pytest

from ggufspec.drafters.adaptive import AUTO_N_MAX, Chances, DraftLength, StepTimes


def simulate(chances, cost, n_steps=1500, n_max=8, seed=0):
    """Lengths chosen over a run where position i is right with chances[i] and a step of n costs cost(n) ms."""
    rng, lengths, chosen = random.Random(seed), DraftLength(n_max), []
    for _ in range(n_steps):
        n = lengths.choose(0)
        accepted = 0
        while accepted < n and rng.random() < chances[accepted]:
            accepted += 1
        lengths.record(0, n, accepted)
        lengths.record_step(n, cost(n) * rng.uniform(0.95, 1.05))
        chosen.append(n)
    return chosen


def best_length(chances, cost, n_max=8):
    def rate(n):
        total = chance = 1.0
        for p in chances[:n]:
            chance *= p
            total += chance
        return total / cost(n)

    return max(range(n_max + 1), key=rate), rate


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.15, 0.4])
def test_it_comes_within_five_percent_of_the_best_fixed_length(p, slope):
    chances = [p] * 8
    cost = lambda n: 10.0 * (1 + slope * n)  # noqa: E731
    _, rate = best_length(chances, cost)
    chosen = simulate(chances, cost)[500:]
    mean = sum(rate(n) for n in chosen) / len(chosen)
    assert mean > 0.95 * max(rate(n) for n in range(9))


def test_useless_drafts_are_given_up_and_taken_up_again():
    lengths = DraftLength(4)
    for n in range(5):
        for _ in range(4):
            lengths.record_step(n, 10 + 3 * n)
    for _ in range(300):
        lengths.record(0, lengths.choose(0), 0)
    assert lengths.best(0) == 0
    for _ in range(1500):  # the text turns: probes find it
        n = lengths.choose(0)
        lengths.record(0, n, n)
    assert lengths.best(0) == 4


def test_slots_learn_apart_and_start_over():
    lengths = DraftLength(4)
    for n in range(5):
        for _ in range(4):
            lengths.record_step(n, 10 + 2 * n)
    for _ in range(100):
        for slot, right in ((0, 4), (1, 0)):
            n = lengths.choose(slot)
            lengths.record(slot, n, min(n, right))
    assert lengths.best(0) == 4 and lengths.best(1) == 0
    lengths.start(1)
    assert lengths.best(1) > 0


def test_tokens_of_a_step():
    chances = Chances([1.0, 1.0, 0.0], [2.0, 1.0, 1.0])
    assert [chances.tokens(n) for n in range(4)] == [1.0, 1.5, 2.0, 2.0]


def test_times_between_measured_lengths():
    times = StepTimes()
    for n in (1, 3):
        for ms in (500.0, 500.0, 10.0 + n):  # the first steps of a length are not counted
            times.record(n, ms)
    assert times.of(1) == 11 and times.of(3) == 13
    assert times.of(2) == pytest.approx(12) and times.of(8) == pytest.approx(18)


def test_a_drafter_without_a_limit_gets_one():
    assert DraftLength(1000).n_max == AUTO_N_MAX and DraftLength(3).n_max == 3
