"""One decode step of several slots: draft, verify, choose; with or without a drafter the same path.

The three stages work on device tensors alone, so that on a GPU each is one captured graph (see capture). The host
writes four small tensors before a step and reads one after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cache import Cache
from .capture import Graphs
from .choose import Choices, Chooser
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
    """Times of a step's phases. On a GPU they are taken with events, so that the host need not wait."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Milliseconds between marks; on a GPU call it after the device has finished."""
        pairs = zip(self.marks, self.marks[1:])
        if self.cuda:
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
    def of(cls, slots: Sequence[Slot], limits: Sequence[int], device: torch.device) -> StepInputs:
        host = torch.tensor([[s.id, s.last, s.n_past, limit] for s, limit in zip(slots, limits)]).T.contiguous()
        if device.type == "cuda":
            host = host.pin_memory().to(device, non_blocking=True)
        return cls(*host.unbind(0))


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

    def step(self, slots: Sequence[Slot], limits: Sequence[int], n: int) -> Decoded:
        """Decode once for `slots`, with a draft of n tokens of which at most limits[b] are verified for slot b."""
        inputs = StepInputs.of(slots, limits, self.device)
        laps = Laps(self.device)
        draft, n_draft = self._draft(inputs, n)
        laps.mark()
        rows, output = self._verify(inputs, draft, n_draft)
        laps.mark()
        choices, summary = self._choose(rows, output, slots, self._uniforms(slots, rows.width - 1))
        laps.mark()
        self._observe(rows, output, summary)
        laps.mark()
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

    # -- stages ------------------------------------------------------------------------------------------------

    def _draft(self, inputs: StepInputs, n: int) -> tuple[Tensor, Tensor]:
        """(tokens [B, n], how many count [B])"""
        drafter = self.drafter
        if drafter is None or n == 0:
            return inputs.last.new_zeros(inputs.last.shape[0], 0), torch.zeros_like(inputs.last)

        def stage(slots: Tensor, last: Tensor, n_past: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
            draft = drafter.propose(slots, last, n_past, n)
            return draft.tokens.to(self.device), torch.minimum(draft.n_tokens.to(self.device), room)

        arguments = (inputs.slots, inputs.last, inputs.n_past, inputs.room)
        if self.graphs is None or not drafter.capturable:
            return stage(*arguments)
        return self.graphs.run(("draft", n), stage, arguments)

    def _verify(self, inputs: StepInputs, draft: Tensor, n_draft: Tensor) -> tuple[Rows, Output]:
        taps = self.drafter.taps if self.drafter is not None else ()

        def stage(slots: Tensor, last: Tensor, n_past: Tensor, draft: Tensor, n_draft: Tensor) -> tuple[Rows, Output]:
            rows = lay_out(last, draft, n_draft, slots, n_past, self.target.n_vocab)
            return rows, self.target.forward(rows, self.cache, taps=taps, logits="all")

        arguments = (inputs.slots, inputs.last, inputs.n_past, draft, n_draft)
        if self.graphs is None:
            return stage(*arguments)
        return self.graphs.run(("verify", draft.shape[1]), stage, arguments)

    def _uniforms(self, slots: Sequence[Slot], n: int) -> tuple[Tensor, ...]:
        """The random numbers of synthetic acceptance, [B, n], or nothing."""
        return () if self.synthetic is None else (self.synthetic.draw([s.id for s in slots], n),)

    def _choose(self, rows: Rows, output: Output, slots: Sequence[Slot], uniforms: tuple[Tensor, ...]
                ) -> tuple[Choices, Tensor]:
        """The target's tokens and, in one tensor for the host, [B, W + 2]: tokens, n_accepted, n_rows."""
        assert output.logits is not None
        logits = output.logits
        plan = self.chooser.plan(slots, rows.width)
        if plan is None:
            choices = self.chooser.general(logits, rows, slots)
            return choices, self._settle(rows, choices.tokens, uniforms)
        n_params = len(plan.tensors)

        def stage(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            tokens = self.chooser.simple(logits, rows, plan.with_tensors(inputs[:n_params]))
            return tokens, self._settle(rows, tokens, inputs[n_params : n_params + len(uniforms)])

        inputs = (*plan.tensors, *uniforms)
        if self.graphs is None:
            tokens, summary = stage(*inputs)
        else:
            # logits and rows are the verify graph's own buffers: fixed places, so they need no copy
            name = ("choose", rows.width, plan.n_candidates, n_params, logits.data_ptr(), rows.tokens.data_ptr())
            tokens, summary = self.graphs.run(name, stage, inputs)
        return Choices(tokens), summary

    def _settle(self, rows: Rows, tokens: Tensor, uniforms: tuple[Tensor, ...]) -> Tensor:
        """Commit the accepted rows; [B, W + 2] for the host: tokens, n_accepted, n_rows."""
        if self.synthetic is not None:
            tokens, n_accepted = self.synthetic.settle(rows, tokens, uniforms[0], self.chooser.is_eog)
        else:
            n_accepted = accepted_prefix(rows, tokens, self.chooser.is_eog)
        self.cache.accept(rows.slots, n_accepted + 1)
        return torch.cat([tokens, n_accepted[:, None], rows.n_rows[:, None]], dim=1)

    def _observe(self, rows: Rows, output: Output, summary: Tensor) -> None:
        drafter = self.drafter
        if drafter is None:
            return
        n_accepted = summary[:, -2]
        if self.graphs is None or not drafter.capturable:
            drafter.observe(rows, output)
            drafter.accept(rows.slots, n_accepted)
            return

        def stage(n_accepted: Tensor) -> None:
            drafter.observe(rows, output)
            drafter.accept(rows.slots, n_accepted)

        self.graphs.run(("observe", rows.width, rows.tokens.data_ptr()), stage, (n_accepted,))

    def n_accepted_rows(self, slot_id: int) -> int:
        """Rows of the slot's last step that were committed: the last token and the accepted drafts."""
        return self._accepted_rows[slot_id]
