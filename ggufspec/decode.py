"""One decode step of several slots: draft, verify, choose; with or without a drafter the same path.

Its stages work on device tensors alone. On a GPU a step whose sampling and drafter need no host is one captured graph
(see capture): the host writes one small table, replays, and reads one small table. Other steps capture what they can
and run the rest eagerly; the arithmetic is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cache import Cache
from .capture import Graphs
from .choose import Choices, Chooser, Plan
from .drafters import Drafter
from .drafters.synth import SyntheticAcceptance
from .job import TokenOut
from .rows import Rows
from .slot import Slot
from .speculate import accepted_prefix, lay_out

if TYPE_CHECKING:
    from .models import Model, Output


@dataclass
class Decoded:
    """Host results of a step, one entry a slot. `emitted[b]` has the accepted drafts and the target's own token."""

    emitted: list[list[int]]
    reported: list[list[TokenOut]]
    n_drafted: list[int]  # tokens verified
    proposed: bool  # whether the drafter was asked
    draft_ms: float
    verify_ms: float
    sample_ms: float


class Laps:
    """Times of a step's phases: draft, verify, sample, observe. On a GPU they are taken with events.

    Events of a captured step are nodes of its graph and are recorded anew at every replay.
    """

    def __init__(self, device: torch.device, captured: bool = False):
        self.make: Callable[[], Any] | None = None
        if device.type == "cuda":
            self.make = lambda: torch.cuda.Event(enable_timing=True, external=captured)
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.make is None:
            self.marks.append(time.perf_counter())
            return
        event = self.make()
        event.record()
        self.marks.append(event)

    def ms(self) -> list[float]:
        """Milliseconds between marks; on a GPU call it after the device has finished."""
        pairs = zip(self.marks, self.marks[1:])
        if self.make is not None:
            return [a.elapsed_time(b) for a, b in pairs]
        return [1000 * (b - a) for a, b in pairs]


@dataclass(frozen=True)
class StepInputs:
    """What the host knows before a step; [B] int64 each, on the device."""

    slots: Tensor
    last: Tensor  # sampled, not yet evaluated
    n_past: Tensor
    room: Tensor  # drafted tokens allowed

    @classmethod
    def of(cls, table: Tensor) -> StepInputs:
        return cls(*table.unbind(0))


class Decoder:
    """The target, its cache, the drafter and the chooser, stage by stage. `graphs` None runs every stage eagerly."""

    def __init__(self, target: Model, cache: Cache, drafter: Drafter | None, chooser: Chooser,
                 graphs: Graphs | None = None, synthetic: SyntheticAcceptance | None = None):
        self.target = target
        self.cache = cache
        self.drafter = drafter
        self.chooser = chooser
        self.graphs = graphs
        self.synthetic = synthetic
        self.device = target.device
        self._accepted_rows: dict[int, int] = {}

    @property
    def is_on_host(self) -> bool:
        """Drafters whose drafts the host sees: a step without any costs no more than a plain one."""
        return self.drafter is not None and not self.drafter.capturable

    def step(self, slots: Sequence[Slot], limits: Sequence[int], n: int,
             meanwhile: Callable[[], None] | None = None) -> Decoded:
        """Decode once for `slots`, with a draft of n tokens of which at most limits[b] are verified for slot b.

        `meanwhile` is called when the device has its work and the host would wait for it.
        """
        n = n if self.drafter is not None else 0
        plan = self.chooser.plan(slots, n + 1)
        table = torch.tensor([[s.id, s.last, s.n_past, limit] for s, limit in zip(slots, limits)]).T.contiguous()
        uniforms = () if self.synthetic is None else (self.synthetic.draw([s.id for s in slots], n),)
        if self.graphs is not None and plan is not None and (self.drafter is None or self.drafter.capturable):
            choices, summary, laps = self._captured(self.graphs, table, plan, uniforms, n)
        else:
            choices, summary, laps = self._staged(table, plan, uniforms, slots, n)
        if meanwhile is not None:
            meanwhile()
        host = summary.tolist()
        emitted = [row[: row[-2] + 1] for row in host]
        for slot, tokens, row in zip(slots, emitted, host):
            self._accepted_rows[slot.id] = len(tokens)
            if self.synthetic is not None:
                self.synthetic.used(slot.id, row[-1] - 1, len(tokens) - 1)
        chosen = self.chooser.report(slots, choices, emitted)
        draft_ms, verify_ms, sample_ms, observe_ms = laps.ms()
        return Decoded(
            emitted, [c.reported for c in chosen], [row[-1] - 1 for row in host], n > 0,
            draft_ms + observe_ms, verify_ms, sample_ms,
        )

    def _captured(self, graphs: Graphs, table: Tensor, plan: Plan, uniforms: tuple[Tensor, ...], n: int
                  ) -> tuple[Choices, Tensor, Laps]:
        """The whole step as one graph."""
        n_params = len(plan.tensors)

        def step(table: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Laps]:
            laps = Laps(self.device, captured=torch.cuda.is_current_stream_capturing())
            inputs = StepInputs.of(table)
            laps.mark()
            draft, n_draft = self._draft(inputs, n)
            laps.mark()
            rows, output = self._verify(inputs.slots, inputs.last, inputs.n_past, draft, n_draft)
            laps.mark()
            assert output.logits is not None
            tokens = self.chooser.simple(output.logits, rows, plan.with_tensors(rest[:n_params]))
            summary = self._settle(rows, tokens, rest[n_params:])
            laps.mark()
            self._observe(rows, output, summary[:, -2])
            laps.mark()
            return tokens, summary, laps

        name = ("step", n, plan.n_candidates, n_params)
        tokens, summary, laps = graphs.run(name, step, (table, *plan.tensors, *uniforms))
        return Choices(tokens), summary, laps

    def _staged(self, table: Tensor, plan: Plan | None, uniforms: tuple[Tensor, ...], slots: Sequence[Slot], n: int
                ) -> tuple[Choices, Tensor, Laps]:
        """Stage by stage: for the CPU, for sampling that needs the host, and for drafters that live there."""
        inputs = StepInputs.of(table.to(self.device))
        laps = Laps(self.device)
        laps.mark()
        draft, n_draft = self._draft(inputs, n)
        if n > 0 and self.synthetic is None and self.is_on_host and not bool(n_draft.any()):
            draft, n, plan = draft[:, :0], 0, self.chooser.plan(slots, 1)  # nothing to verify: the plain path
        laps.mark()
        arguments = (inputs.slots, inputs.last, inputs.n_past, draft, n_draft)
        if self.graphs is not None:
            rows, output = self.graphs.run(("verify", n), self._verify, arguments)
        else:
            rows, output = self._verify(*arguments)
        laps.mark()
        assert output.logits is not None
        if plan is not None:
            choices = Choices(self.chooser.simple(output.logits, rows, plan))
        else:
            choices = self.chooser.general(output.logits, rows, slots)
        summary = self._settle(rows, choices.tokens, uniforms)
        laps.mark()
        self._observe(rows, output, summary[:, -2])
        laps.mark()
        return choices, summary, laps

    # -- stages ------------------------------------------------------------------------------------------------

    def _draft(self, inputs: StepInputs, n: int) -> tuple[Tensor, Tensor]:
        """(tokens [B, n], how many count [B])"""
        if self.drafter is None or n == 0:
            return inputs.last.new_zeros(inputs.last.shape[0], 0), torch.zeros_like(inputs.last)
        draft = self.drafter.propose(inputs.slots, inputs.last, inputs.n_past, n)
        return draft.tokens.to(self.device), torch.minimum(draft.n_tokens.to(self.device), inputs.room)

    def _verify(self, slots: Tensor, last: Tensor, n_past: Tensor, draft: Tensor, n_draft: Tensor
                ) -> tuple[Rows, Output]:
        taps = self.drafter.taps if self.drafter is not None else ()
        rows = lay_out(last, draft, n_draft, slots, n_past, self.target.n_vocab)
        return rows, self.target.forward(rows, self.cache, taps=taps, logits="all")

    def _settle(self, rows: Rows, tokens: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Commit the accepted rows; [B, W + 2] for the host: tokens, n_accepted, n_rows."""
        if self.synthetic is not None:
            tokens, n_accepted = self.synthetic.settle(rows, tokens, uniforms[0], self.chooser.is_eog)
        else:
            n_accepted = accepted_prefix(rows, tokens, self.chooser.is_eog)
        self.cache.accept(rows.slots, n_accepted + 1)
        return torch.cat([tokens, n_accepted[:, None], rows.n_rows[:, None]], dim=1)

    def _observe(self, rows: Rows, output: Output, n_accepted: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.observe(rows, output)
            self.drafter.accept(rows.slots, n_accepted)

    def n_accepted_rows(self, slot_id: int) -> int:
        """Rows of the slot's last step that were committed: the last token and the accepted drafts."""
        return self._accepted_rows[slot_id]
