"""The policy alone in a simulated clock: never much slower than plain, close to the best fixed length, quick."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from simulated import Cost, Fixed, Run, block_cost, simulate, step_cost

from ggufspec.adaptive import Adaptive, Choice
from ggufspec.capture import n_entries
from ggufspec.costs import Costs

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
    assert sum(n > 0 for n in late) <= 0.2 * len(late) and all(n <= 2 for token, n in steps if 10 <= token <= 25)


@pytest.mark.parametrize("cost", list(COSTS))
def test_a_turn_for_the_worse_costs_three_percent_at_most(cost: str) -> None:
    """Right for 200 tokens, then always wrong: the whole time against plain decoding of the second part."""
    text = turning(1.0, 0.0, 200)
    run = simulate(Adaptive([N_MAX]), [text], COSTS[cost], 600)
    since = sum(ms for at, ms in zip(run.at, run.times) if at >= 200)
    assert since <= 1.03 * 400 * COSTS[cost](1, 0)


def comes_back(cost: str, n_streams: int, seed: int) -> int:
    """Tokens until a width is used that reaches 0.9 of the best one's tokens a millisecond. The seed moves the change
    against the looks as well."""
    of, at = COSTS[cost], 300 + seed
    rates = [(1 + n) / of(n_streams, n) for n in range(N_MAX + 1)]
    run = simulate(Adaptive([N_MAX]), [turning(0.0, 1.0, at)] * n_streams, of, at + 100, seed=seed)
    return next(token for token, n in after(run, at) if rates[n] >= 0.9 * max(rates))


@pytest.mark.parametrize("n_streams", [1, 12])
@pytest.mark.parametrize("cost", list(COSTS))
def test_drafts_that_turn_useful_are_taken_up_within_twenty_tokens(cost: str, n_streams: int) -> None:
    """A drafter that costs 0.38 plain steps a token is looked at every 13 tokens, as three percent allow: it needs as
    long in the middle, a few tokens more at worst."""
    took = sorted(comes_back(cost, n_streams, seed) for seed in range(13 if n_streams == 1 else 5))
    assert took[len(took) // 2] <= 20 and took[-1] <= (25 if cost == "slow step" else 20)


@pytest.mark.parametrize("cost", list(COSTS))
def test_a_text_that_turns_back_and_forth(cost: str) -> None:
    """Right or wrong for a while each: never slower than plain, and faster where it lasts a hundred tokens."""
    for period, gain in ((8, 0.0), (20, 0.0), (100, 0.15)):
        text: Callable[[int], float] = lambda token: float(token // period % 2)  # noqa: B023, E731
        plain = simulate(Fixed(0), [text], COSTS[cost], 1000)
        assert simulate(Adaptive([N_MAX]), [text], COSTS[cost], 1000).rate >= (1 + gain) / 1.03 * plain.rate


@pytest.mark.parametrize("cost", list(COSTS))
def test_one_stream_of_many_is_worth_drafting_for(cost: str) -> None:
    """Or not: it costs the other 23 at most three percent."""
    texts = [always(float(b == 0)) for b in range(24)]
    plain = simulate(Fixed(0), texts, COSTS[cost], 300)
    assert simulate(Adaptive([N_MAX]), texts, COSTS[cost], 300).rate >= plain.rate / 1.03


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("chance", [0.0, 0.15, 0.3])
def test_times_that_vary_by_ten_percent(chance: float, cost: str) -> None:
    texts = [always(chance)] * 3
    plain = simulate(Fixed(0), texts, COSTS[cost], 700)
    assert simulate(Adaptive([N_MAX]), texts, COSTS[cost], 700, noise=0.1).rate >= plain.rate / 1.03


@pytest.mark.parametrize("cost", list(COSTS))
def test_drafts_that_are_shorter_than_asked_for(cost: str) -> None:
    """Always right, never more than two tokens: a wider step computes rows for nothing."""
    fixed = [simulate(Fixed(n), [always(1.0)], COSTS[cost], 600, shorter=2).rate for n in range(N_MAX + 1)]
    run = simulate(Adaptive([N_MAX]), [always(1.0)], COSTS[cost], 600, shorter=2)
    assert run.rate >= 0.97 * max(fixed) and max(run.widths[-50:]) <= 3


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 100])
def test_a_step_that_takes_ten_times_as_long_once(at: int) -> None:
    """Wherever it falls, first times included: drafts that are always right are used all the same."""
    step, of = 0, COSTS["block"]

    def told(batch: int, n: int) -> float:
        nonlocal step
        step += 1
        return of(batch, n) * (10 if step == at else 1)

    run = simulate(Adaptive([N_MAX]), [always(1.0)], told, 800, noise=0.0)
    assert sum(n == N_MAX for n in run.widths) >= 0.7 * len(run.widths)


def test_streams_that_come_and_go() -> None:
    """Useless drafts, 1 to 24 streams that end after 5 to 60 tokens and are followed by others: three percent."""
    random, policy, of = Random(3), Adaptive([N_MAX]), COSTS["step"]
    policy.costs.entries = lambda n_streams, n: n_entries(n_streams, n + 1, 24)
    cost: Cost = lambda batch, n: of(policy.costs.entries(batch, n), n)  # noqa: E731
    left: dict[int, int] = {}
    ms = plain_ms = 0.0
    for step in range(1500):
        left = {job: n - 1 for job, n in left.items() if n > 1}
        while not left or (len(left) < 24 and random.random() < 0.3):
            left[1000 * step + len(left)] = random.randint(5, 60)
        jobs, nothing = list(left), [0] * len(left)
        choice = policy.choose(jobs, [N_MAX] * len(jobs))
        ms, plain_ms = ms + cost(len(jobs), choice.n), plain_ms + cost(len(jobs), 0)
        policy.record(jobs, choice, choice.lengths, nothing, nothing, cost(len(jobs), choice.n))
    assert ms <= 1.03 * plain_ms


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
    """But those that are long enough."""
    policy = Adaptive([N_MAX], n_min=4)
    assert policy.widths == [0, 4, 5, 6, 7]
    run = simulate(policy, [always(1.0)], COSTS["block"], 300)
    assert sum(n == N_MAX for n in run.widths) >= 0.7 * len(run.widths)


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
        for _ in range(12):
            costs.record(1, 1 if n else 0, n, 10.0)
    for _ in range(60):
        costs.record(1, 1, 5, 20.0)
    assert costs.of(1, 1, 5) == pytest.approx(20.0, rel=0.02)
    assert 13.5 < costs.of(1, 0, 0) < 15.0


def test_a_time_that_only_settles_moves_no_other() -> None:
    costs = Costs()
    for n, ms in ((0, 10.0), (0, 10.0), (5, 9.0), (5, 9.0), (5, 12.0), (5, 12.0)):
        costs.record(1, 1 if n else 0, n, ms)
    assert costs.of(1, 1, 5) > 10.0 and costs.of(1, 0, 0) == 10.0


def test_times_belong_to_the_entries_of_a_step() -> None:
    """17 to 24 streams are steps of 24 entries: what one took the others take, and the graph is captured once. With
    nine rows a stream 21 entries are all that narrow products can have."""
    costs = Costs(lambda n_streams, n: n_entries(n_streams, n + 1, 32))
    for n, ms in ((0, 20.0), (7, 30.0)):
        costs.record(24, 1 if n else 0, n, 999.0)
        costs.record(24, 1 if n else 0, n, ms)
    assert all(costs.known(b, 1, 7) and costs.of(b, 1, 7) == 30.0 for b in range(17, 25))
    assert costs.newness(17, 1, 7) == 0.0 and not costs.known(16, 1, 7)
    costs.record(18, 1, 7, 33.0)
    assert costs.of(24, 1, 7) > 30.0 and "7 drafted" in costs.shown(20)
    costs.record(20, 1, 8, 99.0)
    costs.record(20, 1, 8, 31.0)
    assert costs.known(21, 1, 8) and not costs.known(22, 1, 8) and costs.of(20, 0, 0) == 20.0


def test_a_new_number_of_streams_in_a_known_step_is_nothing_new() -> None:
    policy = Adaptive([N_MAX])
    policy.costs.entries = lambda n_streams, n: n_entries(n_streams, n + 1, 24)
    for n_streams in (24, 17, 20):
        jobs, most = list(range(n_streams)), [N_MAX] * n_streams
        for _ in range(40):
            choice = policy.choose(jobs, most)
            if n_streams < 24:
                assert choice.n == N_MAX
            policy.record(jobs, choice, choice.lengths, choice.lengths, [0] * n_streams, 20.0 + choice.n)
    assert {size for size, _, _ in policy.costs.n_seen} == {24}


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
    for ms in (99.0, 310.0):
        costs.record(1, 0, 0, 9.0)
        costs.record(1, 1, 7, ms)
    assert costs.of(1, 1, 7) < 30.0 and not costs.known(1, 1, 7)
    costs.record(1, 1, 7, 40.0)
    assert costs.of(1, 1, 7) == 40.0


def test_a_plain_step_takes_no_longer_than_one_with_drafts() -> None:
    """Its first times fell into a busy moment: drafts that are useless are given up all the same, not used for ever
    because they seem to be cheaper."""
    costs = Costs()
    for n, ms in ((0, 99.0), (0, 40.0), (3, 99.0), (3, 12.0)):
        costs.record(1, 1 if n else 0, n, ms)
    assert costs.of(1, 0, 0) == 12.0
    step, of = 0, COSTS["block"]

    def told(batch: int, n: int) -> float:
        nonlocal step
        step += 1
        return of(batch, n) * (4 if step <= 3 else 1)

    run = simulate(Adaptive([N_MAX]), [always(0.0)], told, 400)
    assert sum(n > 0 for n in run.widths) <= 0.2 * len(run.widths)


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


def test_tries_of_a_useless_second_drafter_do_not_keep_the_first_from_coming_back() -> None:
    """They are paid by what the first one wins: however long that goes on, looks have what they need afterwards."""
    policy = Adaptive([N_MAX, N_MAX])

    def take(good: int) -> Choice:
        choice = policy.choose([0], [N_MAX])
        source = choice.members[0][0] if choice.n else -1
        accepted = choice.n if source == good else 0
        ms = 10.0 + (4.0 if 1 in choice.asked else 2.0 if choice.n else 0.0)
        policy.record([0], choice, choice.lengths, [accepted], [source], ms)
        return choice

    for _ in range(3000):
        take(good=0)
    for _ in range(60):
        take(good=-1)
    assert any(take(good=0).n for _ in range(60))
