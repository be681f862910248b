"""A target whose layers lie on several devices: one graph a stage and shape, chained by the hand-over of the rows.

So prompt chunks go through it, several at once: launched one by one, the host would be slower than the devices
together. Decode steps have tapes (see relay), unless some layers are on the CPU: then the stages on GPUs are captured
here, and what lies between and after them (the copies, head, choice, drafter) is launched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from .cache import Cache
from .capture import WARM_UP_RUNS, Graphs
from .rows import Rows

if TYPE_CHECKING:
    from .models.base import Model, Stage


class StageGraphs:
    """`Model.run_stage` for one cache. Stages on the CPU run as they are."""

    def __init__(self, model: Model, cache: Cache):
        self.model = model
        self.cache = cache
        self.graphs = {
            # Of this device alone: when a later stage is captured, the earlier ones have run the step already.
            stage.device: Graphs(stage.device, partial(cache.mutable, stage.device))
            for stage in model.stages
            if stage.device.type == "cuda"
        }

    def __call__(self, stage: Stage, rows: Rows, x: Tensor, cache: Cache, taps: Sequence[int]
                 ) -> tuple[Tensor, Sequence[Tensor]]:
        if cache is not self.cache:
            raise ValueError("stages are captured for one cache")
        graphs = self.graphs.get(stage.device)
        if graphs is None:
            return self.model.run_stage(stage, rows, x, cache, taps)

        tentative = rows.tentative

        def work(tokens: Tensor, slots: Tensor, n_past: Tensor, n_rows: Tensor, x: Tensor
                 ) -> tuple[Tensor, Sequence[Tensor]]:
            return self.model.run_stage(stage, Rows(tokens, slots, n_past, n_rows, tentative), x, cache, taps)

        x, streams = graphs.run(
            ("layers" if tentative else "prompt", stage.start, tuple(taps)), work,
            (rows.tokens, rows.slots, rows.n_past, rows.n_rows, x), n_warm_up=WARM_UP_RUNS if tentative else 1,
        )  # fmt: skip
        # The next device may still be fetching a chunk's rows when the next chunk's graph writes its own.
        return (x, streams) if tentative else (x.clone(), [stream.clone() for stream in streams])


def stages_for(model: Model, cache: Cache) -> StageGraphs | None:
    """Of a model whose layers lie on several devices, some of them GPUs; None for any other."""
    has_gpu = any(stage.device.type == "cuda" for stage in model.stages)
    return StageGraphs(model, cache) if len(model.stages) > 1 and has_gpu else None
