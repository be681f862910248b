"""Ranks choose from their parts of the logits: the tokens of all logits, which are joined only where that is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_ranks

WORKER = Path(__file__).with_name("vocabulary_worker.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_ranks(WORKER, [1.0], tmp_path_factory.mktemp("alone") / "out")[0]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[1, 1], [4, 6, 6], [1, 2], [1, 1, 1, 1]], ids=str)
def test_parts_give_the_choices_of_the_whole(shares: list[float], alone: dict, tmp_path: Path) -> None:
    """Every way to choose, ties and ranks without any column included, and streams that sample in different ways."""
    for result in run_ranks(WORKER, shares, tmp_path / "out"):
        assert result["wrong"] == []
        assert result["joins of few candidates"] == 0 and result["joins of many"] > 0
        assert result["tokens"] == alone["tokens"]
        for name, joins in result["joins"].items():
            assert (joins == 0) == name.endswith("of 2"), (name, joins)
