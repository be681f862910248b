"""Prompt chunks on their way through the devices.

A short chunk has little work and as many launches as a long one: on a GPU chunks are padded to a few widths, each of
which is one captured graph, the drafter's share included. Padding changes nothing: recurrent layers leave their states
as they are, keys and values are stored nowhere, drafters keep nothing of it.

In a layer split several chunks are on their way at once. The host gives chunk k + 1 to the first device while the later
ones still work on chunk k. Nothing in between may make the host or an earlier device wait for a later one: token ids
come from page-locked memory, residual and taps are handed over on streams of their own (see handover), and a drafter on
an earlier device reads a chunk as many chunks later as it takes to get through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .drafters import Drafter, device_of
from .handover import send, wait_for
from .models.base import Output
from .rows import Rows, prompt_table, rows_of_table

if TYPE_CHECKING:
    from .cache import Cache
    from .capture import Graphs
    from .models import Model
    from .models.base import Logits, RunStage

# Widths of prompt chunks on a GPU. Up to 192 rows products take them by tiles of 32, and padding within a tile is free;
# beyond, most of the time goes into unpacking the weights. Longer chunks keep the GPU busy as they are.
WIDTHS = (16, 32, 64, 96, 128, 160, 192, 256, 384, 512)


def padded_width(n: int) -> int:
    """Rows of a chunk of n tokens on a GPU. They follow from n alone, so that a text's rounding never depends on what
    is captured."""
    return next((width for width in WIDTHS if width >= n), n)


@dataclass(frozen=True)
class Sent:
    """What drafters read of a chunk (`models.Output`), on its way to their device."""

    rows: Rows
    hidden: Tensor
    taps: Tensor | None
    arrived: Any  # for `wait_for`


class Prefill:
    """The chunks that the devices have been given. On the CPU everything is done at once.

    graphs: where chunks are captured, on a target and a drafter of one device; stages: what captures those of a target
    on several. None: chunks run as they are.
    """

    def __init__(self, target: Model, drafter: Drafter | None, cache: Cache | None = None,
                 graphs: Graphs | None = None, stages: RunStage | None = None):
        self.target = target
        self.cache = cache
        self.device = target.device
        self.drafter = drafter
        self.taps = drafter.taps if drafter is not None else ()
        self.drafter_device = device_of(drafter, self.device)
        self.graphs = graphs if self.drafter_device == self.device else None
        self.stages = stages
        devices = [stage.device for stage in target.stages]
        self.n_most = len(devices) + 1  # chunks under way: one a stage, and one that waits
        self.n_late = len(devices) - 1 - devices.index(self.drafter_device) if self.drafter_device in devices else 0
        self.is_padded = self._is_pinned = any(device.type == "cuda" for device in devices)
        self._chunks: deque[Any] = deque()  # events after which a chunk is through the target
        self._sent: deque[Sent] = deque()  # what the drafter has still to read, oldest first

    def run(self, tokens: Sequence[int], slot: int, n_past: int, is_last: bool) -> Output:
        """A chunk through the target and to the drafter. Rows past the tokens mean nothing.

        is_last: of its prompt, so that the last token's logits are wanted. The result may be overwritten by the next
        chunk's.
        """
        assert self.cache is not None
        table, width = self._table(tokens, slot, n_past)
        rows = rows_of_table(table, width)
        if self.graphs is not None and width in WIDTHS:
            output = self._captured(self.graphs, table, width)
            if self.drafter is not None and not self.drafter.capturable:
                self.drafter.observe(rows, output)
            self._mark()
        else:
            logits: Logits = "last" if is_last else "none"
            stages = self.stages if width in WIDTHS else None
            output = self.target.forward(rows, self.cache, taps=self.taps, logits=logits, run=stages)
            self.observe(rows, output)
        return output

    def _captured(self, graphs: Graphs, table: Tensor, width: int) -> Output:
        """The graph of the chunk's width; logits of the last token are always made."""
        assert self.cache is not None
        cache, drafter = self.cache, self.drafter

        def work(table: Tensor) -> tuple[Output]:
            rows = rows_of_table(table, width)
            output = self.target.forward(rows, cache, taps=self.taps, logits="last")
            if drafter is None or not drafter.capturable:
                return (output,)
            drafter.observe(rows, output)
            return (Output(output.logits, output.hidden, None),)  # nobody else reads taps

        # One run before the capture, not two: the widths have their kernels in common, and a run takes the host long.
        out: tuple[Output] = graphs.run(("prompt", width), work, (table,), n_warm_up=1)
        return out[0]

    def rows(self, tokens: Sequence[int], slot: int, n_past: int) -> Rows:
        """A chunk, once no more than `n_most` are under way."""
        return rows_of_table(*self._table(tokens, slot, n_past))

    def _table(self, tokens: Sequence[int], slot: int, n_past: int) -> tuple[Tensor, int]:
        """The same as one tensor on the host, and how many rows it has."""
        while len(self._chunks) >= self.n_most:
            self._chunks.popleft().synchronize()
        width = padded_width(len(tokens)) if self.is_padded else len(tokens)
        table = prompt_table(tokens, slot, n_past, width)
        return (table.pin_memory() if self._is_pinned else table), width

    def observe(self, rows: Rows, output: Output) -> None:
        """The target has been given a chunk: let the drafter read it, or an earlier one."""
        if self.drafter is not None:
            parts = [output.hidden] if output.taps is None else [output.hidden, output.taps]
            moved, arrived = send(parts, self.drafter_device)
            self._sent.append(Sent(rows, moved[0], moved[1] if len(moved) > 1 else None, arrived))
            self._read(self.n_late)
        self._mark()

    def _mark(self) -> None:
        """Remember when the chunk is through."""
        if self.device.type == "cuda":
            self._chunks.append(torch.cuda.current_stream(self.device).record_event())

    def join(self) -> None:
        """Let the drafter read all it was sent; before anything else is done with what it keeps."""
        self._read(0)

    def _read(self, n_left: int) -> None:
        while self.drafter is not None and len(self._sent) > n_left:
            sent = self._sent.popleft()
            wait_for(sent.arrived, self.drafter_device)
            self.drafter.observe(sent.rows, sent)
