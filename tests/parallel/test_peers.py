"""When ranks can map each other's memory, and when they cannot."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing import reductions

from ggufspec import peers


def test_why_ranks_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert peers.obstacle([("a", 0), ("a", 1)]) is None
    assert peers.obstacle([("a", 0), ("b", 0)]) == "the ranks are on 2 hosts"
    assert peers.obstacle([("a", 1), ("a", 1)]) == "two ranks share a card"
    assert peers.obstacle([("a", 0), ("a", 1), ("a", 2)]) == "CUDA0 has no peer access to CUDA2"


def test_ranks_on_the_cpu_use_the_library() -> None:
    assert peers.connect(0, 2, torch.device("cpu"), None) is None


def test_inboxes_are_mapped_on_the_own_card() -> None:
    """Whatever card they lie on; and without the owner's event. The library's own signature is asked for both."""
    seen = {}

    def rebuild(tensor_cls, storage_device, storage_handle, event_handle, event_sync_required):  # noqa: ANN001, ANN202
        seen.update(locals())
        return torch.zeros(1)

    peers.opened((rebuild, (torch.Tensor, 3, b"memory", b"event", True)), torch.device("cuda", 1))
    assert (seen["storage_device"], seen["storage_handle"], seen["event_sync_required"]) == (1, b"memory", False)
    named = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    assert {"storage_device", "event_sync_required"} <= set(named)
