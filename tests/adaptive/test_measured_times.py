"""The policy with times that one H200 took: a 27B target at Q4_K_M with DSpark. They are neither smooth nor in
proportion: of 12 streams a drafted token costs half a plain step, two cost one and a half."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated import Fixed, Run, simulate

from ggufspec.adaptive import Adaptive, Choice

N_MAX = 7
MS = {  # by streams: milliseconds of a step with 0 to 7 drafted tokens
    1: (5.28, 5.99, 6.18, 6.32, 6.56, 6.71, 6.86, 7.06),
    12: (8.49, 13.23, 21.21, 22.68, 24.11, 31.94, 33.62, 36.17),
    24: (13.71, 23.23, 32.76, 35.94, 45.14, 54.98, 65.43, 68.95),
}
PLAIN = {1: 5.223, 12: 8.42, 24: 13.68}  # of an engine without a drafter, which has nothing to observe
N_TOKENS = {1: 1500, 12: 400, 24: 400}


def took(n_streams: int, n: int) -> float:
    return MS[n_streams][n]


def take(policy: Adaptive, jobs: list[int], accepted: Callable[[int], int]) -> Choice:
    """One step; accepted: of so many drafted tokens of a stream."""
    choice = policy.choose(jobs, [N_MAX] * len(jobs))
    counted = [accepted(n) for n in choice.lengths]
    sources = [0 if n else -1 for n in choice.lengths]
    policy.record(jobs, choice, choice.lengths, counted, sources, took(len(jobs), choice.n))
    return choice


def warm(*crowds: int) -> Adaptive:
    """A policy that knows all times of these crowds, and no text."""
    policy = Adaptive([N_MAX])
    for n_streams in crowds:
        policy.forced.extend(policy.start_steps(every_width=True))
        while policy.forced:
            take(policy, list(range(n_streams)), lambda n: 0)
    policy.forget_texts()
    return policy


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("chance", [0.9, 0.6, 0.15])
@pytest.mark.parametrize("n_streams", list(MS))
def test_it_comes_close_to_the_best_fixed_length(n_streams: int, chance: float, is_warm: bool) -> None:
    texts, reached, n_tokens = [lambda token: chance] * n_streams, [], N_TOKENS[n_streams]
    for seed in (1, 2, 3):
        fixed = [simulate(Fixed(n), texts, took, n_tokens, seed=seed).rate for n in range(N_MAX + 1)]
        policy = warm(n_streams) if is_warm else Adaptive([N_MAX])
        reached.append(simulate(policy, texts, took, n_tokens, seed=seed).rate / max(fixed))
    assert sum(reached) / len(reached) >= 0.97


@pytest.mark.parametrize("n_streams, best", [(12, 4), (24, 3)])
def test_texts_like_code_are_drafted_for_at_once(n_streams: int, best: int) -> None:
    """Although the first width that pays may lose more than one plain step."""
    run = simulate(warm(n_streams), [lambda token: 0.9] * n_streams, took, 120)
    assert best in run.widths[:5] and run.widths[12:].count(best) >= 0.8 * len(run.widths[12:])


@pytest.mark.parametrize("n_tokens", [256, 1000])
@pytest.mark.parametrize("n_streams", list(MS))
def test_useless_drafts_cost_three_percent_at_most(n_streams: int, n_tokens: int) -> None:
    """With times from the start also of an engine that has no drafter, which need not observe."""
    texts = [lambda token: 0.0] * n_streams
    assert simulate(warm(n_streams), texts, took, n_tokens).ms <= 1.03 * n_tokens * PLAIN[n_streams]
    assert simulate(Adaptive([N_MAX]), texts, took, n_tokens).ms <= 1.03 * n_tokens * took(n_streams, 0)


@pytest.mark.parametrize("n_streams", [12, 24])
def test_what_one_stream_has_shown_counts_in_a_crowd(n_streams: int) -> None:
    """Acceptance does not depend on the load: streams that join one that is easy to draft for are drafted for."""
    policy = warm(1, n_streams)
    for _ in range(40):
        take(policy, [0], lambda n: min(n, 5))
    widths = [take(policy, list(range(n_streams)), lambda n: min(n, 5)).n for _ in range(6)]
    assert min(widths[1:]) > 1  # the first one may be a plain one, for its time


@pytest.mark.parametrize("n_streams", [12, 24])
def test_a_crowd_after_one_that_was_hard_is_looked_at(n_streams: int) -> None:
    policy = warm(1, n_streams)
    for _ in range(200):
        take(policy, [0], lambda n: 0)
    crowd = list(range(1, n_streams + 1))
    widths = [take(policy, crowd, lambda n: min(n, 5)).n for _ in range(60)]
    first = next(i for i, n in enumerate(widths) if n)
    assert first <= {12: 20, 24: 35}[n_streams] and min(widths[first + 3:]) > 1


def turn(n_streams: int, seed: int) -> int:
    """Tokens until a crowd drafts again that was wrong for 300 tokens and then always right."""
    at = 300 + seed
    text: Callable[[int], float] = lambda token: float(token >= at)  # noqa: E731
    run: Run = simulate(warm(n_streams), [text] * n_streams, took, at + 120, seed=seed)
    return next(token - at for token, n in zip(run.at, run.widths) if token >= at and n > 1)


@pytest.mark.parametrize("n_streams", list(MS))
def test_it_comes_back(n_streams: int) -> None:
    """A look at one stream costs 0.13: within twenty tokens. One at a crowd costs 0.56 or 0.69: 1.85 % of the time
    pay for one every 31 or 38 steps."""
    tokens = [turn(n_streams, seed) for seed in range(0, 40, 5)]
    assert max(tokens) <= {1: 20, 12: 40, 24: 45}[n_streams]
