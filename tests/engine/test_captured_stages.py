"""Steps and prompts of a layer split with every stage captured, as far as a CPU can: the tokens of one device.

A stage's first graph is captured in the middle of a step that the stages before it have run. Devices are told apart by
their numbers alone; all of them are the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from two_engines import GREEDY, Family, Replays

from ggufspec.cache import Cache
from ggufspec.engine import Engine
from ggufspec.job import JobState, Request
from ggufspec.models.base import Stage
from ggufspec.stage_graphs import StageGraphs

CUTS = (0, 3, 5)


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    jobs = [engine.submit(Request(prompt, GREEDY, n_predict=20)) for prompt in prompts]
    while any(job.state is not JobState.DONE for job in jobs):
        engine.step()
    return [job.generated for job in jobs]


def of_stage(cache: Cache, stage: Stage) -> list[Tensor]:
    """`Cache.mutable` of the stage's device."""
    own = [s if stage.start <= i < stage.stop else None for i, s in enumerate(cache.recurrent)]
    return replace(cache, recurrent=own, leaders=[]).mutable()


@pytest.fixture
def stages(family: Family) -> Iterator[list[Stage]]:
    ends = [*CUTS[1:], len(family.model.layers)]
    found = [Stage(a, b, torch.device("cpu", k)) for k, (a, b) in enumerate(zip(CUTS, ends))]
    family.model.__dict__["stages"] = found
    yield found
    del family.model.__dict__["stages"]


@pytest.mark.parametrize("kind", ["plain", "mtp", "dspark"])
def test_captured_stages_emit_the_same_tokens(family: Family, kind: str, stages: list[Stage]) -> None:
    """Two streams of which one ends later: graphs of other sizes are captured while rows wait to be replayed."""
    prompts = [family.prompts[0], family.prompts[1][:9]]
    expected = answers(family.engine(kind, False, n_slots=2), prompts)
    engine = family.engine(kind, False, n_slots=2)
    graphs = StageGraphs(family.model, engine.cache)
    graphs.graphs = {stage.device: Replays(partial(of_stage, engine.cache, stage)) for stage in stages}
    engine.decoder.run_stage = engine.prefill.stages = graphs
    engine.prefill.is_padded = True
    assert answers(engine, prompts) == expected
    for one in graphs.graphs.values():
        assert {key[0][0] for key in one.captured} == {"layers", "prompt"}
