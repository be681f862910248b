"""A model walked in several stages: taps travel along, and a prompt's rows may lie anywhere."""

from __future__ import annotations

import pytest
import torch

from ggufspec import bundled
from ggufspec.cache import Cache, RecurrentLayer
from ggufspec.gguf_file import open_gguf
from ggufspec.kernels.gdn import GdnSpec
from ggufspec.models import Model, load_model
from ggufspec.models.base import Stage
from ggufspec.prefill import Prefill
from ggufspec.rows import Rows, prompt_rows
from ggufspec.stage_graphs import StageGraphs

CPU, META = torch.device("cpu"), torch.device("meta")
TAPS = (5, 1, 3, 3)  # in any order, also twice


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(open_gguf(bundled.target_path()))


def cut(model: Model, *cuts: int) -> None:
    """As if the device changed at these layers."""
    ends = [0, *cuts, len(model.layers)]
    model.__dict__["stages"] = [Stage(a, b, CPU) for a, b in zip(ends, ends[1:])]


def run(model: Model, **how: object) -> list[torch.Tensor]:
    """A prompt chunk and a step after it: logits, hidden rows and taps."""
    cache = model.new_cache(1, 256)
    rows = prompt_rows(torch.arange(300, 321), 0, 0)
    with torch.inference_mode():
        first = model.forward(rows, cache, taps=TAPS, logits="last")
        one = torch.tensor([21])
        step = Rows(torch.tensor([[7, 8, 9]]), torch.tensor([0]), one, torch.tensor([3]), tentative=True)
        second = model.forward(step, cache, taps=TAPS, **how)
    return [first.logits, first.hidden, first.taps, second.logits, second.hidden, second.taps]


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (3, 5)], ids=str)
def test_stages_change_nothing(model: Model, cuts: tuple[int, ...]) -> None:
    """Cut before, at and after tapped layers."""
    cut(model)
    whole = run(model)
    assert whole[2].shape[-1] == len(TAPS) * model.config.embedding_length
    D = model.config.embedding_length
    assert torch.equal(whole[2][..., 2 * D : 3 * D], whole[2][..., 3 * D :])
    assert not torch.equal(whole[2][..., :D], whole[2][..., D : 2 * D])
    cut(model, *cuts)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(model)))


def test_a_stage_can_be_run_otherwise(model: Model) -> None:
    """What runs the stages is given each of them once, with the taps that lie in it."""
    cut(model, 2, 4)
    seen = []

    def runner(stage, rows, x, cache, taps):  # noqa: ANN001, ANN202
        seen.append((stage.start, stage.stop, taps))
        return model.run_stage(stage, rows, x, cache, taps)

    expected = run(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, run(model, run=runner)))
    assert seen == [(0, 2, (1,)), (2, 4, (3,)), (4, len(model.layers), (5,))]


def test_stage_graphs_take_their_cache_alone(model: Model) -> None:
    cut(model, 2)
    cache = model.new_cache(1, 256)
    graphs = StageGraphs(model, cache)
    assert not graphs.graphs  # stages on the CPU run as they are
    rows = prompt_rows(torch.arange(300, 304), 0, 0)
    x = torch.zeros(1, 4, model.config.embedding_length)
    assert graphs(model.stages[0], rows, x, cache, ())[0].shape == x.shape
    with pytest.raises(ValueError, match="one cache"):
        graphs(model.stages[0], rows, x, model.new_cache(1, 256), ())


def test_capturing_a_stage_leaves_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have run the step that is being captured, and not accepted its rows: committing there would count the
    rows before it twice."""
    spec = GdnSpec(n_k=2, n_v=2, d=8, conv_kernel=4, eps=1e-6)
    cache = Cache.allocate([RecurrentLayer(spec, CPU), RecurrentLayer(spec, META)], 2, 256, "f16", "f16")
    committed = []
    monkeypatch.setattr("ggufspec.kernels.gdn.commit", lambda state, slots: committed.append(state.device))
    for device in (META, CPU):
        committed.clear()
        assert {t.device for t in cache.mutable(device)} == {device} == set(committed)
    assert len(cache.mutable()) == len(cache.mutable(CPU)) + len(cache.mutable(META))


def test_a_drafter_on_an_earlier_device_reads_chunks_late(model: Model) -> None:
    """With three stages and the drafter on the first one, two chunks later; all of them before anything else."""

    class Reader:
        device = CPU
        taps = TAPS

        def __init__(self) -> None:
            self.read: list[tuple[int, torch.Tensor]] = []

        def observe(self, rows, output) -> None:  # noqa: ANN001
            self.read.append((int(rows.n_past), output.taps))

    cut(model, 2, 4)
    reader, cache = Reader(), model.new_cache(1, 256)
    prefill = Prefill(model, reader)
    given = []
    with torch.inference_mode():
        for k in range(4):
            rows = prefill.rows(list(range(300, 305)), 0, 5 * k)
            output = model.forward(rows, cache, taps=TAPS, logits="none")
            given.append(output.taps)
            prefill.observe(rows, output)
            assert [n for n, _ in reader.read] == [5 * i for i in range(k - 1)]
    prefill.join()
    assert [n for n, _ in reader.read] == [0, 5, 10, 15]
    assert all(torch.equal(taps, expected) for (_, taps), expected in zip(reader.read, given))


def test_prompt_rows_begin_on_the_host(model: Model) -> None:
    cut(model)
    prefill = Prefill(model, None)
    rows = prefill.rows([5, 6, 7], 2, 9)
    assert rows.tokens.tolist() == [[5, 6, 7]] and rows.tokens.device == CPU and not rows.tentative
    assert (rows.slots.tolist(), rows.n_past.tolist(), rows.n_rows.tolist()) == ([2], [9], [3])
    prefill.join()
