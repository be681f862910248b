"""Saved states on the host: the same values, every tensor off its device, every byte counted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ggufspec.host_copy import host_copy


@dataclass(frozen=True)
class State:
    rows: Any
    name: str


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_tensor_is_found(device: str) -> None:
    def numbers(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(n, dtype=dtype, device=device)

    value = {"a": [numbers(3), None], "b": (numbers(5, torch.uint8), State([numbers(2, torch.float16)], "x")), "c": 7}
    copy, n_bytes = host_copy(value)
    assert n_bytes == 3 * 4 + 5 + 2 * 2
    found = [copy["a"][0], copy["b"][0], copy["b"][1].rows[0]]
    assert [t.device.type for t in found] == ["cpu"] * 3 and [t.numel() for t in found] == [3, 5, 2]
    assert copy["a"][1] is None and isinstance(copy["b"], tuple) and copy["b"][1].name == "x" and copy["c"] == 7
    assert found[0].tolist() == [0.0, 1.0, 2.0]
