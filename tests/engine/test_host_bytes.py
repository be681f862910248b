"""What a decode step reads back from its device: a few numbers a row, however large the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from scripted import Scripted
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.job import Request
from ggufspec.models import load_model
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer

READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__", "nonzero"}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_k=20, seed=3, ignore_eos=True),
    "without top_k": SamplingParams(temperature=0.9, top_k=0, top_p=0.9, seed=3, ignore_eos=True),
    "probabilities": SamplingParams(temperature=0.0, n_probs=4, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.9, seed=3, repeat_penalty=1.2, ignore_eos=True),
}


class Reads(TorchFunctionMode):
    """Bytes of all tensors whose values Python asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and isinstance(args[0], Tensor):
            self.n_bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("m")
    sizes = dict(n_embd=64, n_ff=64, head_dim=32, n_layers=1)
    return {n: families.make_qwen3(folder / f"{n}.gguf", seed=2, n_vocab=n, **sizes) for n in (320, 2560)}


def bytes_of_a_step(path: Path, sampling: SamplingParams, width: int) -> int:
    """Of the third step: drafts of width - 1 tokens, all of them wrong, so that steps are alike."""
    file = open_gguf(path)
    drafter: Any = None if width == 1 else Scripted(lambda slot, n_past, n: [319] * n, n_max=width - 1)
    engine = Engine(load_model(file), Tokenizer.from_metadata(file.metadata), drafter=drafter, n_ctx=256)
    engine.submit(Request([40, 41, 42, 43, 44], sampling, n_predict=40))
    for _ in range(3):
        engine.step()
    with Reads() as reads:
        engine.step()
    assert not engine.idle
    return reads.n_bytes


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_vocabulary_stays_where_it_is(paths: dict[int, Path], name: str) -> None:
    small, large = ({w: bytes_of_a_step(path, SAMPLINGS[name], w) for w in (1, 4, 8)} for path in paths.values())
    assert small == large
    assert 0 < small[1] < small[4] < small[8] < 2560


def test_reading_a_tensor_is_noticed() -> None:
    x = torch.zeros(100)
    with Reads() as reads:
        x.tolist(), x[:5].cpu(), bool(x[0]), x + 1, x.argmax()
    assert reads.n_bytes == 4 * (100 + 5 + 1)
