"""One decode step of several slots: draft, verify, choose; with or without a drafter the same path.

Its stages work on device tensors alone. On a GPU a step whose sampling and drafter need no host is one captured graph
(see capture): the host writes one small table, replays, and reads one small table. Other steps capture what they can
and run the rest eagerly; the arithmetic is the same.

`launch` gives a step to the device, `collect` reads its results. A step may be launched before the results of the one
before it are read (`can_follow`): what it begins with then stands on the device (see follow).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .adaptive import Choice
from .cache import Cache
from .capture import Graphs
from .choose import Choices, Chooser, Plan, Sampled
from .drafters import Drafter
from .drafters.mtp import Mtp
from .drafters.owned import Owned
from .drafters.small_model import SmallModel
from .drafters.synth import SyntheticAcceptance
from .flight import Decoded, Flight
from .follow import Entry, SlotValues, StepInputs
from .forms import Forms
from .handover import on, wait_for_copies
from .laps import Laps
from .pinned import Pinned
from .rows import Rows
from .shapes import Lacks, Shape
from .slot import Slot
from .speculate import accepted_prefix, lay_out

if TYPE_CHECKING:
    from .models import Model, Output
    from .models.base import RunStage


class Decoder:
    """The target, its cache, the drafter and the chooser, stage by stage. `graphs` None runs every stage eagerly.

    `ahead`: whether steps may be launched before the results of the one before are read; None: with graphs.
    """

    def __init__(self, target: Model, cache: Cache, drafter: Drafter | None, chooser: Chooser,
                 graphs: Graphs | None = None, synthetic: SyntheticAcceptance | None = None,
                 ahead: bool | None = None, run_stage: RunStage | None = None):
        self.target = target
        self.cache = cache
        self.drafter = drafter
        self.chooser = chooser
        self.graphs = graphs
        self.run_stage = run_stage  # of a target with layers on the CPU and on GPUs; None: as it is
        self.synthetic = synthetic
        self.device = target.device
        self.ahead = graphs is not None if ahead is None else ahead
        self.values = SlotValues(cache.n_slots, self.device)
        # What a step replaces in the drafter and `drop` has to bring back; [n_slots, ...] each.
        self._own_drafter = drafter.inner if isinstance(drafter, Owned) else drafter
        carried = [self._own_drafter.pending] if isinstance(self._own_drafter, Mtp) else []
        self._kept = [(tensor, torch.zeros_like(tensor)) for tensor in carried]
        self._pinned = Pinned(self.device)
        self._turn = 0
        self._done: list[Any] = [None, None]  # events of the last steps of both turns
        self._accepted_rows: dict[int, int] = {}
        self.forms = Forms(self)

    @property
    def is_on_host(self) -> bool:
        """Drafters whose drafts the host sees: a step without any costs no more than a plain one."""
        return self.drafter is not None and not self.drafter.capturable

    def mutable(self) -> list[Tensor]:
        """Own tensors that running a stage twice would change twice."""
        return [self.values.values, *(kept for _, kept in self._kept)]

    # -- a step --------------------------------------------------------------------------------------------------

    def can_follow(self, slots: Sequence[Slot], n: int) -> bool:
        """Whether a step of these slots with n drafted tokens can be launched while another one is on its way.

        Not when the host takes part in it, and not when its graph is still to be captured. Eager steps on a GPU are
        bound by the host anyway.
        """
        form = self.forms.form(slots, n)
        if not self.ahead or form.plan is None or self.is_on_host:
            return False
        if self.graphs is None:
            return self.device.type == "cpu"
        return form.shape is not None and self.graphs.has(form.shape) and not self.forms.is_due(form)

    def launch(self, slots: Sequence[Slot], choice: Choice, rooms: Sequence[int], following: Flight | None = None
               ) -> Flight:
        """Give the device a step of `slots`: drafts of choice.n tokens, of which at most choice.lengths[b], and as many
        as there is room for, are verified for slot b.

        rooms[b]: drafted tokens that slot b has room for; slots of the flight that is followed have less by then.
        """
        began = time.perf_counter()
        wanted = choice.n if self.drafter is not None else 0
        form = self.forms.form(slots, wanted)
        if following is None and self.forms.is_due(form):
            assert form.wanted is not None
            self.capture(form.wanted)
            form = self.forms.form(slots, wanted)
        elif form.wanted is not None and form.shape != form.wanted:
            self.forms.lacks.went_without(form.wanted, form.shape)
        n, size, plan = form.n, form.size, form.plan
        if form.wanted is not None and form.wanted.stage == "step":
            self.forms.sampling = form.wanted.sampling
        if n < wanted:
            choice = replace(choice, n=n, lengths=[min(length, n) for length in choice.lengths])
        self._turn = 1 - self._turn
        if self._done[self._turn] is not None:
            self._done[self._turn].synchronize()  # as good as always past: its memory is used again
        entries = [
            Entry(s.id, length, False) if following is not None and following.holds(s)
            else Entry(s.id, length, True, s.last, s.n_past, room)
            for s, length, room in zip(slots, choice.lengths, rooms)
        ]  # fmt: skip
        rows = SlotValues.table([*entries, *map(Entry.padding, self._others(slots, size - len(slots)))])
        table = self._filled("table", rows, torch.int64)
        uniforms = () if self.synthetic is None else (self._random_numbers(slots, n, size - len(slots)),)
        if self.graphs is not None and form.shape is not None and form.shape.stage == "step":
            assert plan is not None
            # A table of slots that all follow says nothing new, step after step.
            version = None if any(e.is_fresh for e in entries) else (tuple(rows[0]), tuple(rows[1]))
            choices, summary, laps = self._captured(self.graphs, form.shape, table, plan, uniforms, version)
        else:
            choices, summary, laps = self._staged(table, plan, uniforms, slots, n, form.shape)
        jobs = [slot.job for slot in slots if slot.job is not None]
        host, done = self._sent(summary)
        return Flight(list(slots), jobs, choice, choices, host, laps, done, began)

    def collect(self, flight: Flight) -> Decoded:
        """Wait for a step and read it. What slots without their job made of it is ignored."""
        if flight.done is not None:
            flight.done.synchronize()
        host = flight.summary[: len(flight.slots)].tolist()
        draft_ms, verify_ms, sample_ms, observe_ms = flight.laps.ms()
        emitted = [row[: row[-2] + 1] for row in host]
        n_drafted = [row[-1] - 1 for row in host]
        chosen = self.chooser.report(flight.slots, flight.choices, emitted)
        live = flight.live()
        for b in live:
            slot = flight.slots[b]
            self._accepted_rows[slot.id] = len(emitted[b])
            if self.synthetic is not None:
                self.synthetic.used(slot.id, n_drafted[b], len(emitted[b]) - 1)
        return Decoded(
            [flight.slots[b] for b in live], [emitted[b] for b in live], [chosen[b].reported for b in live],
            [n_drafted[b] for b in live], self.drafter is not None and flight.choice.n > 0,
            draft_ms + observe_ms, verify_ms, sample_ms,
        )  # fmt: skip

    def drop(self, slot_id: int) -> None:
        """Undo the slot's part in the step launched last: as if it had not run. Thrown away before it is read.

        The step has replayed the accepted rows of the one before it into the recurrent states, where they belong; its
        own rows are replayed by nobody. Cells at n_past and after it are never seen.
        """
        self.cache.trim(slot_id, 0)
        if isinstance(self._own_drafter, SmallModel):
            self._own_drafter.cache.trim(slot_id, 0)
        for tensor, kept in self._kept:
            tensor[slot_id] = kept[slot_id]

    def n_accepted_rows(self, slot_id: int) -> int:
        """Rows of the slot's last step that were committed: the last token and the accepted drafts."""
        return self._accepted_rows[slot_id]

    # -- to the device and back ------------------------------------------------------------------------------------

    def _filled(self, name: str, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        """Host values where the device can fetch them while the host goes on."""
        made = torch.tensor(values, dtype=dtype)
        return self._pinned.piece(name, self._turn, made.shape, dtype).copy_(made)

    def _random_numbers(self, slots: Sequence[Slot], n: int, n_padding: int) -> Tensor:
        """[B, n + n_max] numbers for synthetic acceptance: those of a step that follows begin after the ones that the
        step before it uses."""
        assert self.synthetic is not None and self.drafter is not None
        n_numbers = n + self.drafter.n_max
        drawn = [self.synthetic.uniforms[slot.id].peek(n_numbers) for slot in slots]
        return self._filled("uniforms", drawn + [[0.0] * n_numbers] * n_padding, torch.float64)

    @property
    def is_whole(self) -> bool:
        """Whether one graph holds a step, sampling permitting, and not its verification alone."""
        return self.graphs is not None and not self.is_on_host

    def plan(self, slots: Sequence[Slot], n: int, size: int, sampling: Sampled = (0, 0)) -> Plan | None:
        """How a step's choices are made on the device; in a whole one those of its padding too."""
        return self.chooser.plan(slots, n + 1, size - len(slots) if self.is_whole else 0, sampling)

    def _others(self, slots: Sequence[Slot], n: int) -> list[int]:
        """n slots that have no part in the step: an entry of padding names one, and no slot stands there twice."""
        taken = {slot.id for slot in slots}
        return [i for i in range(self.cache.n_slots) if i not in taken][:n]

    def _sent(self, summary: Tensor) -> tuple[Tensor, Any]:
        """(the summary on the host, the event after which it is there)"""
        if self.device.type != "cuda":
            return summary, None
        host = self._pinned.piece("summary", self._turn, summary.shape, summary.dtype)
        host.copy_(summary, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        self._done[self._turn] = done
        return host, done

    # -- graphs ------------------------------------------------------------------------------------------------

    def n_entries(self, n_streams: int, n: int) -> int:
        """Entries of a step with n drafted tokens, padding included: only captured ones have any."""
        return self.forms.n_entries(n_streams, n)

    def n_uniforms(self, n: int) -> int:
        """Random numbers of synthetic acceptance that an entry of a step is given."""
        return 0 if self.synthetic is None or self.drafter is None else n + self.drafter.n_max

    def capture(self, shape: Shape) -> None:
        """The graph of a shape, on entries that are all padding: it changes nothing. No step may be on its way."""
        assert self.graphs is not None
        self.forms.lacks = Lacks()  # not another one soon
        n, size = shape.n, shape.size
        if shape.stage == "step":
            table = torch.tensor(SlotValues.table([Entry.padding(i) for i in range(size)]))
            plan = self.chooser.blank(shape.n_rows, shape.sampling)
            uniforms = [torch.zeros(size, shape.n_uniforms, dtype=torch.float64)] * (shape.n_uniforms > 0)
            step = self._step(self.graphs, plan, n)
            self.graphs.capture(shape, step, (table, *plan.tensors, *uniforms), in_turns=self.ahead)
        else:
            slots = torch.arange(size, device=self.device)
            zero = torch.zeros_like(slots)
            self.graphs.capture(shape, self._verify, (slots, zero, zero - 1, zero.new_zeros(size, n), zero - 1))

    def _captured(self, graphs: Graphs, shape: Shape, table: Tensor, plan: Plan, uniforms: tuple[Tensor, ...],
                  version: Hashable) -> tuple[Choices, Tensor, Laps]:
        """The whole step as one graph."""
        versions = (version, *(plan.serial for _ in plan.tensors))
        tokens, summary, laps = graphs.run(
            shape, self._step(graphs, plan, shape.n), (table, *plan.tensors, *uniforms), versions=versions,
            in_turns=self.ahead,
        )  # fmt: skip
        return Choices(tokens), summary, laps

    def _step(self, graphs: Graphs, plan: Plan, n: int) -> Callable[..., tuple[Tensor, Tensor, Laps]]:
        """The whole step as a function of its table, its plan's tensors and its random numbers."""
        n_params = len(plan.tensors)

        def step(table: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Laps]:
            laps = Laps(self.device, captured=graphs.is_capturing)
            laps.mark()
            inputs = self._begin(table)
            draft, n_draft = self._draft(inputs, n)
            laps.mark()
            rows, output = self._verify(inputs.slots, inputs.last, inputs.n_past, draft, n_draft)
            laps.mark()
            assert output.logits is not None
            tokens = self.chooser.simple(output.logits, rows, plan.with_tensors(rest[:n_params]))
            summary = self._settle(rows, tokens, inputs, rest[n_params:])
            laps.mark()
            self._observe(rows, output, summary[:, -2])
            laps.mark()
            return tokens, summary, laps

        return step

    def _staged(self, table: Tensor, plan: Plan | None, uniforms: tuple[Tensor, ...], slots: Sequence[Slot], n: int,
                shape: Shape | None) -> tuple[Choices, Tensor, Laps]:
        """Stage by stage: for the CPU, for sampling that needs the host, and for drafters that live there.

        Padding has a part in the verification alone, which may be captured.
        """
        table, *uniforms_there = (t.to(self.device, non_blocking=True) for t in (table, *uniforms))
        laps = Laps(self.device)
        laps.mark()
        every = self._begin(table)
        inputs, n_padding = every.first(len(slots)), table.shape[1] - len(slots)
        draft, n_draft = self._draft(inputs, n)
        if n > 0 and self.synthetic is None and self.is_on_host and not bool(n_draft.any()):
            draft, n, plan = draft[:, :0], 0, self.chooser.plan(slots, 1)  # nothing to verify: the plain path
            shape = self._plain(shape)
        n_padding = 0 if self.graphs is not None and shape is None else n_padding
        laps.mark()
        if n_padding > 0:
            draft, n_draft = pad(draft, (0, 0, 0, n_padding)), pad(n_draft, (0, n_padding), value=-1)
        entries = every.first(draft.shape[0])
        arguments = (entries.slots, entries.last, entries.n_past, draft, n_draft)
        if self.graphs is not None and shape is not None:
            wait_for_copies(self.device)  # of the last step's rows and output, over which the graph writes
            rows, output = self.graphs.run(shape, self._verify, arguments)
        else:
            rows, output = self._verify(*arguments)
        if n_padding > 0:
            rows, output = rows.first(len(slots)), output.first(len(slots))
        laps.mark()
        assert output.logits is not None
        if plan is not None:
            choices = Choices(self.chooser.simple(output.logits, rows, plan))
        else:
            choices = self.chooser.general(output.logits, rows, slots)
        summary = self._settle(rows, choices.tokens, inputs, uniforms_there)
        laps.mark()
        self._observe(rows, output, summary[:, -2])
        laps.mark()
        return choices, summary, laps

    def _plain(self, shape: Shape | None) -> Shape | None:
        """The same without drafted tokens, if it may be captured or was."""
        if shape is None or self.graphs is None:
            return None
        plain = shape._replace(n=0)
        return plain if self.forms.is_on_demand or self.graphs.has(plain) else None

    # -- stages ------------------------------------------------------------------------------------------------

    def _begin(self, table: Tensor) -> StepInputs:
        if self.ahead:
            for tensor, kept in self._kept:
                with on(tensor.device):
                    kept.copy_(tensor)
        return self.values.inputs(table)

    def _draft(self, inputs: StepInputs, n: int) -> tuple[Tensor, Tensor]:
        """(tokens [B, n], how many count [B])"""
        if self.drafter is None or n == 0:
            return inputs.last.new_zeros(inputs.last.shape[0], 0), inputs.limit.clamp(max=0)
        draft = self.drafter.propose(inputs.slots, inputs.last, inputs.n_past, n)
        draft = draft.to(self.device)
        return draft.tokens, torch.minimum(draft.n_tokens, inputs.limit)

    def _verify(self, slots: Tensor, last: Tensor, n_past: Tensor, draft: Tensor, n_draft: Tensor
                ) -> tuple[Rows, Output]:
        taps = self.drafter.taps if self.drafter is not None else ()
        rows = lay_out(last, draft, n_draft, slots, n_past, self.target.n_vocab)
        rows.positions()  # with the graph, though no layer lies here: whoever samples would keep those of its first run
        return rows, self.target.forward(rows, self.cache, taps=taps, logits="all", run=self.run_stage)

    def _settle(self, rows: Rows, tokens: Tensor, inputs: StepInputs, uniforms: Sequence[Tensor]) -> Tensor:
        """Commit the accepted rows; [B, W + 2] for the host: tokens, n_accepted, n_rows."""
        if self.synthetic is not None:
            order = inputs.used[:, None] + torch.arange(rows.width - 1, device=self.device)
            tokens, n_accepted = self.synthetic.settle(
                rows, tokens, uniforms[0].gather(1, order), self.chooser.is_eog
            )
        else:
            n_accepted = accepted_prefix(rows, tokens, self.chooser.is_eog)
        self.cache.accept(rows.slots, n_accepted + 1, rows.n_rows)
        return self.values.advance(inputs, tokens, n_accepted, rows.n_rows)

    def _observe(self, rows: Rows, output: Output, n_accepted: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.observe(rows, output)
            self.drafter.accept(rows.slots, n_accepted)
