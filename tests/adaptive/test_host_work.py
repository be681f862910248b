"""What deciding costs the host at every step, counted in calls: where steps take a third of a millisecond it shows."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ggufspec.adaptive import Adaptive, Choice
from ggufspec.job import Speculation
from ggufspec.lengths import Lengths

N_MAX, N_STEPS = 7, 200


def calls(policy: Adaptive, n_streams: int, chance: float) -> float:
    """Function calls a step, Python's and C's, of `choose` and `record`."""
    jobs, most, dice, n_calls = list(range(n_streams)), [N_MAX] * n_streams, random.Random(1), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    for step in range(2 * N_STEPS):
        if step == N_STEPS:  # times have settled
            n_calls = 0
        sys.setprofile(count)
        choice = policy.choose(jobs, most)
        sys.setprofile(None)
        rights = [[dice.random() < chance for _ in range(n)] for n in choice.lengths]
        accepted = [(right + [False]).index(False) for right in rights]
        ms, sources = 10.0 + choice.n * dice.uniform(0.5, 0.6), [0 if choice.n else -1] * n_streams
        sys.setprofile(count)
        policy.record(jobs, choice, choice.lengths, accepted, sources, ms)
        sys.setprofile(None)
    return n_calls / N_STEPS


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_calls_of_a_step(chance: float) -> None:
    alone, crowd = (calls(Adaptive([N_MAX]), n_streams, chance) for n_streams in (1, 24))
    assert alone <= 330
    assert crowd <= alone + 50  # as good as no work is done stream by stream


class Asked(Adaptive):
    """Always the same choice; counts how often it is asked for."""

    def __init__(self, is_probe: bool = False):
        super().__init__([N_MAX])
        self.n_asked, self.is_probe = 0, is_probe

    def choose(self, jobs: Sequence[int], most: Sequence[int], pending: Choice | None = None) -> Choice:
        self.n_asked += 1
        if self.forced:
            self.forced.popleft()
        return Choice(3, [3] * len(jobs), [(0,)] * len(jobs), self.is_probe)


def asked(policy: Asked, step_ms: float | None, n_steps: int = 41) -> int:
    """How often the policy is asked in so many steps of one stream that take this long."""
    slots: Any = [SimpleNamespace(job=SimpleNamespace(id=1, request=SimpleNamespace(speculation=Speculation())))]
    engine: Any = SimpleNamespace(policy=policy, n_max=N_MAX, drafter=None, decoder=SimpleNamespace(n_entries=max))
    lengths = Lengths(engine)
    for _ in range(n_steps):
        assert lengths.choose(slots, [N_MAX]).n == 3
        lengths.step_ms = step_ms
        lengths.prepare()
    return policy.n_asked


def test_a_steady_choice_stands_for_a_while_where_steps_are_short() -> None:
    assert asked(Asked(), 5.0) == asked(Asked(), None) == 42
    assert asked(Asked(), 0.3) == 1 + 11
    assert asked(Asked(is_probe=True), 0.3) == 42  # looks cost: each is decided upon


def test_steps_that_are_wanted_at_the_start_come_at_once() -> None:
    policy = Asked()
    policy.forced.extend([(3, (0,))] * 20)
    asked(policy, 0.3, 25)
    assert not policy.forced
