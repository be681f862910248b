"""A device that has no memory left is told in one line, with what had no room there."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch

from ggufspec import weights
from ggufspec.errors import PlacementError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model
from ggufspec.models.qwen35 import load_mtp
from ggufspec.placement import Placement
from ggufspec.weights import Weights

CPU = torch.device("cpu")


def full_after(n: int, function: Any) -> Any:
    """A function that works n times; then the device is full."""
    calls = iter(range(n))

    def limited(*arguments: Any, **how: Any) -> Any:
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has ...")
        return function(*arguments, **how)

    return limited


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make_qwen35(tmp_path_factory.mktemp("m") / "m.gguf", seed=1, n_embd=64, n_ff=64, head_dim=32,
                                state_size=16)  # fmt: skip


@pytest.mark.parametrize("step, n, tensor", [
    ("pack", 0, "token_embd.weight"), ("pack", 6, "blk.0.ffn_gate.weight"), ("fuse", 0, "blk.0.attn_qkv.weight"),
    ("join", 1, "blk.1.ffn_gate.weight"),
])  # fmt: skip
def test_the_tensor_and_the_device_are_named(path: Path, step: str, n: int, tensor: str, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    monkeypatch.setattr(weights, step, full_after(n, getattr(weights, step)))
    with pytest.raises(PlacementError) as error:
        load_model(open_gguf(path), Placement.single("cpu", 4))
    assert f"m.gguf: cpu has no memory left for tensor {tensor};" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_drafter_that_has_no_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_gguf(path)
    own = Weights(file)
    target = load_model(file, Placement.single("cpu", 4), weights=own)
    monkeypatch.setattr(weights, "pack", full_after(2, weights.pack))
    with pytest.raises(PlacementError, match=r"no memory left for tensor blk\.4\..*--device-draft"):
        load_mtp(own, target.config, CPU, target=target)


def test_caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states and of keys and values; the recurrent layers' memory is made first."""
    model, zeros = load_model(open_gguf(path), Placement.single("cpu", 4)), torch.zeros
    for n, message in ((1, "the states of 3 recurrent layers in 2 slot"), (19, "a layer's cache of 2 slot")):
        monkeypatch.setattr(torch, "zeros", full_after(n, zeros))
        with pytest.raises(PlacementError, match=f"cpu has no memory left for {message}"):
            model.new_cache(2, 300)
