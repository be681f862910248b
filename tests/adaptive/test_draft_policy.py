"""The policy alone in a simulated clock: never much slower than plain, close to the best fixed length, quick."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated import Cost, Fixed, Run, block_cost, simulate, step_cost

from ggufspec.adaptive import Adaptive, Costs

N_MAX = 7
COSTS = {"block": block_cost(), "step": step_cost(), "slow step": step_cost(draft=0.2, row=0.18)}


def always(chance: float) -> Callable[[int], float]:
    return lambda token: chance


def turning(first: float, then: float, at: int) -> Callable[[int], float]:
    return lambda token: first if token < at else then


def after(run: Run, token: int) -> list[tuple[int, int]]:
    """(tokens since `token`, width) of the steps from there on."""
    return [(at - token, n) for at, n in zip(run.at, run.widths) if at >= token]


@pytest.mark.parametrize("n_streams", [1, 12])
@pytest.mark.parametrize("chance", [0.15, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("cost", COSTS)
def test_it_comes_close_to_the_best_fixed_length(cost: str, chance: float, n_streams: int) -> None:
    """In hindsight, over three texts: at least 0.97 of it."""
    n_tokens = 1500 if n_streams == 1 else 700
    texts, reached = [always(chance)] * n_streams, []
    for seed in (1, 2, 3):
        fixed = [simulate(Fixed(n), texts, COSTS[cost], n_tokens, seed=seed).rate for n in range(N_MAX + 1)]
        rate = simulate(Adaptive([N_MAX]), texts, COSTS[cost], n_tokens, seed=seed).rate
        reached.append(rate / max(fixed))
        assert rate >= fixed[0] / 1.03
    assert sum(reached) / len(reached) >= 0.97


@pytest.mark.parametrize("cost", [*COSTS, "dear"])
@pytest.mark.parametrize("n_tokens", [256, 2000])
@pytest.mark.parametrize("n_streams", [1, 4, 24])
def test_useless_drafts_cost_three_percent_at_most(n_streams: int, n_tokens: int, cost: str) -> None:
    """Whatever they cost: at 2.9 plain steps a draft and its verification ('dear') few are made."""
    of = COSTS[cost] if cost in COSTS else block_cost(draft=0.8, row=0.15)
    texts = [always(0.0)] * n_streams
    plain = simulate(Fixed(0), texts, of, n_tokens)
    assert simulate(Adaptive([N_MAX]), texts, of, n_tokens).ms <= 1.03 * plain.ms


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cost", list(COSTS))
def test_drafts_that_turn_useless_are_dropped_within_twenty_tokens(cost: str, seed: int) -> None:
    run = simulate(Adaptive([N_MAX]), [turning(1.0, 0.0, 200)], COSTS[cost], 400, seed=seed)
    steps = after(run, 200)
    assert max(n for _, n in steps[:1]) >= 4
    late = [n for token, n in steps if 20 <= token]
    assert sum(n > 0 for n in late) <= 0.2 * len(late) and all(n <= 2 for token, n in steps if 12 <= token <= 20)


@pytest.mark.parametrize("cost", list(COSTS))
def test_a_turn_for_the_worse_costs_three_percent_at_most(cost: str) -> None:
    """Right for 200 tokens, then always wrong: the whole time against plain decoding of the second part."""
    text = turning(1.0, 0.0, 200)
    run = simulate(Adaptive([N_MAX]), [text], COSTS[cost], 600)
    since = sum(ms for at, ms in zip(run.at, run.times) if at >= 200)
    assert since <= 1.03 * 400 * COSTS[cost](1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_turn_useful_are_taken_up_again(seed: int) -> None:
    run = simulate(Adaptive([N_MAX]), [turning(0.0, 1.0, 300)], COSTS["block"], 400, seed=seed)
    first = next(token for token, n in after(run, 300) if n >= 6)
    assert first <= 20


def test_streams_that_differ_are_weighed_together() -> None:
    """Half of the streams are code, half are noise: one width for all, the one with the most tokens in all."""
    texts = [always(1.0 if b % 2 else 0.0) for b in range(8)]
    cost = COSTS["block"]
    fixed = [simulate(Fixed(n), texts, cost, 300).rate for n in range(N_MAX + 1)]
    assert simulate(Adaptive([N_MAX]), texts, cost, 300).rate >= 0.97 * max(fixed)


def test_what_costs_more_with_more_streams_is_dropped_there() -> None:
    """Alone a draft pays; in a crowd whose verification is dear it does not."""
    cost: Cost = lambda batch, n: 10.0 * (1 + (0.2 if n else 0) + n * 0.02 * batch)  # noqa: E731
    alone = simulate(Adaptive([N_MAX]), [always(0.6)], cost, 600)
    crowd = simulate(Adaptive([N_MAX]), [always(0.6)] * 24, cost, 200)
    assert sum(alone.widths[-50:]) / 50 > 2 and sum(crowd.widths[-50:]) / 50 < 1.5


def test_a_request_may_ask_for_less() -> None:
    policy = Adaptive([N_MAX])
    for _ in range(30):
        choice = policy.choose([4, 9], [2, N_MAX])
        assert choice.lengths[0] <= 2 and choice.lengths[1] <= N_MAX
        ms = 10.0 + 0.1 * choice.n
        policy.record([4, 9], choice, choice.lengths, choice.lengths, [0, 0], ms)
    assert choice.lengths == [2, N_MAX]
    assert policy.choose([4, 9], [0, 0]).n == 0


def test_short_drafts_that_would_be_thrown_away_are_not_asked_for() -> None:
    policy = Adaptive([N_MAX], n_min=4)
    assert policy.widths == [0, 4, 5, 6, 7]


def test_widths_without_a_time_lie_on_the_line_through_the_others() -> None:
    costs = Costs()
    for n, ms in ((0, 10.0), (2, 14.0), (6, 18.0)):
        costs.record(1, 1 if n else 0, n, 999.0)  # the first time is not believed
        costs.record(1, 1 if n else 0, n, ms)
    assert [costs.of(1, 1, n) for n in (0, 1, 2, 4, 6, 7)] == [10, 12, 14, 16, 18, 19]
    assert costs.of(3, 1, 4) == 16  # no step of three streams yet: as with one
    costs.record(3, 0, 0, 999.0)
    costs.record(3, 0, 0, 20.0)
    assert costs.of(3, 1, 6) == 36  # in proportion to what is known


def test_a_lasting_change_of_one_time_moves_the_others() -> None:
    costs = Costs()
    for n in (0, 5):
        for _ in range(3):
            costs.record(1, 1 if n else 0, n, 10.0)
    for _ in range(60):
        costs.record(1, 1, 5, 20.0)
    assert costs.of(1, 1, 5) == pytest.approx(20.0, rel=0.02)
    assert 13.5 < costs.of(1, 0, 0) < 15.0


def test_a_time_that_stands_alone_counts_for_nothing() -> None:
    """A step that also captured (another way of sampling) is no step's price; two in a row are."""
    costs = Costs()
    for _ in range(3):
        costs.record(1, 1, 3, 10.0)
    for ms in (300.0, 10.0, 300.0, 10.0):
        costs.record(1, 1, 3, ms)
    assert costs.of(1, 1, 3) == pytest.approx(10.0)
    costs.record(1, 1, 3, 300.0)
    costs.record(1, 1, 3, 300.0)
    assert costs.of(1, 1, 3) > 11.0
    for ms in (99.0, 310.0, 10.0):  # the second time of a width, the first that counts, was one of those
        costs.record(1, 1, 5, ms)
    assert costs.of(1, 1, 5) == 10.0


def test_a_width_that_has_to_be_captured_must_win_that_back() -> None:
    """The first step of a width costs 300 ms more: of two that promise the same, the one that was used is kept."""
    costs = Costs()
    for n in (0, 3, 7):
        costs.record(1, 1 if n else 0, n, 310.0 + n)
        for _ in range(3):
            costs.record(1, 1 if n else 0, n, 10.0 + n / 10)
    assert costs.newness(1, 1, 5) == pytest.approx(300 / 2000, rel=0.1)
    assert costs.newness(1, 1, 3) == costs.newness(1, 0, 0) == 0.0
    assert Costs().newness(1, 1, 3) == 0.0  # nothing is known of what captures cost


def test_where_times_were_taken_before_drafts_begin_at_once() -> None:
    policy = Adaptive([N_MAX])
    policy.forced.extend(policy.start_steps())
    while policy.forced:
        choice = policy.choose([0], [N_MAX])
        policy.record([0], choice, choice.lengths, [0], [0], COSTS["block"](1, choice.n))
    policy.forget_texts()
    assert policy.choose([1], [N_MAX]).n > 0


def test_a_new_text_is_looked_at_sooner() -> None:
    """After a long useless one; each of many short useless texts still costs three percent at most."""
    policy, ms = Adaptive([N_MAX]), 0.0
    texts, n_tokens, cost = 30, 40, COSTS["block"]
    for text in range(texts):
        for _ in range(n_tokens):
            choice = policy.choose([text], [N_MAX])
            ms += cost(1, choice.n)
            policy.record([text], choice, choice.lengths, [0], [0], cost(1, choice.n))
    assert ms <= 1.03 * texts * n_tokens * cost(1, 0)
    steps = 0
    while policy.choose([texts], [N_MAX]).n == 0:
        policy.record([texts], policy.choice, [0], [0], [-1], cost(1, 0))
        steps += 1
    assert steps <= 10


def test_several_drafters_are_chosen_among_per_stream() -> None:
    """Drafter 0 (free, seldom has a draft) is right on stream 0, drafter 1 on stream 1; both are needed."""
    policy = Adaptive([N_MAX, N_MAX], can_be_silent=True)
    right = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 1.0}
    wins = 0
    for _ in range(400):
        choice = policy.choose([0, 1], [N_MAX, N_MAX])
        sources, drafted, accepted = [], [], []
        for b in range(2):
            members = choice.members[b]
            source = members[0] if members and choice.n else -1
            sources.append(source)
            drafted.append(choice.lengths[b] if source >= 0 else 0)
            accepted.append(int(drafted[b] * right.get((b, source), 0.0)))
        ms = 10.0 + sum((0.1, 2.0)[m] for m in choice.asked) + 0.1 * choice.n
        policy.record([0, 1], choice, drafted, accepted, sources, ms)
        wins += sources == [0, 1]
    assert wins > 300 and choice.members == [(0,), (1,)]
