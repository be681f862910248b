"""What deciding costs the host at every step, counted in calls: where steps take a third of a millisecond it shows."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest

from ggufspec.adaptive import Adaptive

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
