"""When ranks can map each other's memory, and when they cannot."""

from __future__ import annotations

import pytest
import torch

from ggufspec import peers


def test_why_ranks_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert peers.obstacle([("a", 0), ("a", 1)]) is None
    assert peers.obstacle([("a", 0), ("b", 0)]) == "the ranks are on 2 hosts"
    assert peers.obstacle([("a", 1), ("a", 1)]) == "two ranks share a card"
    assert peers.obstacle([("a", 0), ("a", 1), ("a", 2)]) == "CUDA0 has no peer access to CUDA2"


def test_ranks_on_the_cpu_use_the_library() -> None:
    assert peers.connect(0, 2, torch.device("cpu"), None) is None
