"""What is shown of the decision: metrics and the panel's numbers."""

from __future__ import annotations

from types import SimpleNamespace

from ggufspec.adaptive import Adaptive
from ggufspec.engine import EngineStats
from ggufspec.tools.server.metrics import Metrics


def test_the_choice_and_its_numbers_are_in_the_metrics() -> None:
    policy = Adaptive([4])
    for _ in range(20):
        choice = policy.choose([1], [4])
        policy.record([1], choice, choice.lengths, choice.lengths, [0], 10.0 + choice.n)
    metrics = Metrics()
    engine = SimpleNamespace(stats=EngineStats(n_decode=20), drafter=None, slots=[], n_waiting=0, policy=policy)
    metrics.after_step(engine, [])
    text = metrics.text().decode()
    assert "ggufspec:draft_length 4.0" in text
    assert 'ggufspec:draft_expected_tokens{length="4"}' in text and 'ggufspec:draft_step_ms{length="0"} 10.0' in text
    shown = metrics.speculation()["adaptive"]
    assert shown["length"] == 4 and [row["length"] for row in shown["table"]][0] == 0
    assert shown["table"][-1]["tokens"] > 4


def test_nothing_is_shown_of_a_fixed_length() -> None:
    metrics = Metrics()
    metrics.after_step(SimpleNamespace(stats=EngineStats(), drafter=None, slots=[], n_waiting=0), [])
    assert "draft_length" not in metrics.text().decode() and metrics.speculation()["adaptive"] is None
