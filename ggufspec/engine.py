"""The engine: slots, scheduling and the loop. One thread owns it and calls `step()`.

A step takes at most one prompt chunk through the target, then one decode step for all running slots together:
draft, lay out rows, forward, sample, accept, emit. A long prompt therefore never holds running streams back for more
than one micro-batch. Where it can, the decode loop runs one step ahead: the device has the next step before the host
reads the results of this one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import admission, results
from .adaptive import Adaptive, Choice
from .choose import Chooser
from .decode import Decoder
from .drafters import Drafter
from .drafters.synth import SyntheticAcceptance
from .errors import RequestError
from .flight import Flight
from .handover import on
from .job import Event, Job, JobState, Request
from .job_queue import JobQueue, Link
from .lengths import Lengths
from .prefill import Prefill
from .prompt_cache import PromptCache
from .relay import RelayGraphs, graphs_for
from .sampling import SamplingParams
from .slot import Slot
from .stage_graphs import stages_for
from .stats import EngineStats, account
from .stream import TextStream

if TYPE_CHECKING:
    from .models import Model
    from .tokenizer import Tokenizer


class Engine:
    """Runs jobs on a target model with at most one drafter (which may be a chain of several).

    `n_ctx` is the context of one slot. `n_max` is the draft length, None for the drafter's own limit. `ahead`: launch a
    step before the results of the one before are read; None: where steps are captured in graphs. `continuous`: read
    prompts while other slots generate; otherwise all that wait, when none does.
    """

    def __init__(
        self,
        target: Model,
        tokenizer: Tokenizer,
        *,
        drafter: Drafter | None = None,
        n_slots: int = 1,
        n_ctx: int = 4096,
        n_ubatch: int = 512,
        type_k: str = "f16",
        type_v: str = "f16",
        n_max: int | None = None,
        n_checkpoints: int = 32,
        checkpoint_step: int = 8192,
        prompt_cache: PromptCache | None = None,
        use_graphs: bool = True,
        link: Link | None = None,
        synthetic: SyntheticAcceptance | None = None,
        policy: Adaptive | None = None,
        ahead: bool | None = None,
        continuous: bool = True,
    ):
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.n_ctx = n_ctx
        self.n_ubatch = n_ubatch
        self.n_max = 0 if drafter is None else min(drafter.n_max, drafter.n_max if n_max is None else n_max)
        self.n_checkpoints = n_checkpoints
        self.checkpoint_step = checkpoint_step
        self.prompt_cache = prompt_cache or PromptCache(0)
        self.device = target.device
        self.cache = target.new_cache(n_slots, n_ctx, type_k, type_v)
        self.slots = [Slot(i) for i in range(n_slots)]
        self.crowded: list[Slot] = []  # with more checkpoints on their device than are to stay there
        self.stats = EngineStats()
        self.chooser = Chooser(tokenizer, target.n_vocab, self.device)
        stages = stages_for(target, self.cache) if use_graphs else None
        graphs = graphs_for(target, drafter, stages, self._mutable) if use_graphs else None
        self.decoder = Decoder(target, self.cache, drafter, self.chooser, graphs, synthetic, ahead,
                               stages if graphs is None else None)
        self.prefill = Prefill(target, drafter, self.cache, None if isinstance(graphs, RelayGraphs) else graphs, stages)
        self.link = link
        self.queue = JobQueue(link)
        self._is_amid = False  # or has been interrupted in a step that all ranks make: the others wait for its rest
        self.policy = policy  # decides draft lengths; None: every slot drafts n_max tokens
        self.lengths = Lengths(self)
        self.continuous = continuous
        self._is_reading = False  # not continuous: prompts are read, and nobody generates until all of them are
        self._flights: deque[Flight] = deque()  # steps that the device has and the host has not read, at most two
        self._results_at = 0.0  # when the host last had a step's results
        self._n_prompt_rows = 0  # evaluated since the last decode step
        self._emitted = 0  # digest of the last step's tokens, see `Inbox`

    def _mutable(self) -> list[Tensor]:
        own = self.cache.mutable() + self.decoder.mutable()
        return own + ([] if self.drafter is None else self.drafter.mutable())

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Job:
        """Queue a request (thread-safe). RequestError when it can never be served."""
        n = len(request.prompt)
        if n == 0:
            raise RequestError('"prompt" must not be empty')
        bad = next((t for t in request.prompt if not 0 <= t < self.target.n_vocab), None)
        if bad is not None:
            raise RequestError(f"prompt holds token id {bad}; the vocabulary has {self.target.n_vocab} tokens")
        if n >= self.n_ctx:
            raise RequestError(
                f"request ({n} tokens) exceeds the available context size ({self.n_ctx} tokens), try increasing it",
                kind="exceed_context_size_error",
            )
        if request.slot is not None and not 0 <= request.slot < len(self.slots):
            raise RequestError(f"slot {request.slot} was asked for; this engine has slots 0 to {len(self.slots) - 1}")
        return self.queue.submit(replace(request, sampling=self.chooser.bind(request.sampling)))

    def cancel(self, job: Job) -> None:
        """End a job at the next step (thread-safe); its slot is free then."""
        self.queue.cancel(job)

    @property
    def idle(self) -> bool:
        """Nothing is queued, running, waiting to be cancelled or left to be put away."""
        is_free = all(slot.job is None for slot in self.slots)
        return is_free and not self.queue.has_news and not self.queue.jobs and not self.crowded

    @property
    def n_waiting(self) -> int:
        return len(self.queue)

    def generate(self, request: Request) -> Generator[Event, None, None]:
        """One stream: submits the request and steps until it is done. Closing the iterator cancels the job."""
        job = self.submit(request)
        try:
            while job.state is not JobState.DONE:
                for event in self.step():
                    if event.job is job:
                        yield event
                        if event.kind == "error" and event.error is not None:
                            raise event.error
        finally:
            if job.state is not JobState.DONE and not self._is_amid:
                self.cancel(job)
                self.step()

    # -- the loop ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit, one prompt chunk, one decode step (see `_may_come_first`). Returns what happened, in order."""
        with on(self.device):
            if self.link is None:
                return self._step()
            self._is_amid = True
            try:
                events = self._step()
            except RuntimeError as error:
                raise self.link.lost(error) from error
            self._is_amid = False
            return events

    def _step(self) -> list[Event]:
        while self.crowded:
            admission.stow(self.crowded.pop())
        events = self._take_inbox()
        events += self._admit()
        waiting = [s for s in self.slots if s.reading]
        if not self.continuous:
            self._is_reading = bool(waiting) and (self._is_reading or not any(s.generating for s in self.slots))
            waiting = waiting if self._is_reading else []
        if waiting:
            slot = min(waiting, key=lambda s: s.job.id if s.job else 0)
            n_past = slot.n_past
            events += self._prompt_chunk(slot)
            self._n_prompt_rows += slot.n_past - n_past
        running = [s for s in self.slots if s.generating]
        if self._is_reading:
            self._is_reading = any(s.reading for s in waiting)
            return events
        if waiting and self._may_come_first(slot, running, len(waiting) > 1):
            return events
        self._n_prompt_rows = 0
        if running or not waiting:
            self.prefill.join()
        if running:
            events += self._decode(running, is_alone=not waiting)
        return events

    def _may_come_first(self, slot: Slot, running: list[Slot], others_wait: bool) -> bool:
        """Whether the first token that a prompt has just given is given away before the next decode step.

        When nobody else waits for that step; and when more prompts wait, as long as they have not had as many rows
        since the last one as a chunk may have. A step that is on its way is read first: it is done by then.
        """
        if self._flights or slot.reading:
            return False
        is_alone = len(running) == 1 and running[0] is slot
        return is_alone or (others_wait and self._n_prompt_rows < self.n_ubatch)

    def _take_inbox(self) -> list[Event]:
        """Queue what was submitted and drop what was cancelled since the last step."""
        inbox = self.queue.take_in(self._emitted, self.lengths.step_ms)
        self.lengths.step_ms = inbox.step_ms
        for slot_id in inbox.erased:
            admission.clear(self, self.slots[slot_id])
        cancelled = set(inbox.cancelled)
        events = self.queue.drop(cancelled)
        for slot in self.slots:
            if slot.job is not None and slot.job.id in cancelled:
                events.append(results.finish(self, slot, "cancelled", "none"))
        return events

    def _admit(self) -> list[Event]:
        """Give queued jobs a free slot, oldest first; a job that wants a busy slot waits without blocking others.

        A grammar is compiled here: its mistakes end its job alone.
        """
        events: list[Event] = []
        for job in list(self.queue.jobs):
            slot = admission.choose_slot(self.slots, job, self.cache.has_recurrent)
            if slot is not None:
                self.queue.jobs.remove(job)
                try:
                    admission.start(self, slot, job)
                except RequestError as error:
                    events.append(results.fail(self, slot, error))
        return events

    def _prompt_chunk(self, slot: Slot) -> list[Event]:
        job = slot.job
        assert job is not None
        start = time.perf_counter()
        prompt, n_past = job.request.prompt, slot.n_past
        end = admission.chunk_end(n_past, len(prompt), self.n_ubatch, admission.due(self, slot))
        final = end == len(prompt)
        output = self.prefill.run(prompt[n_past:end], slot.id, n_past, is_last=final)
        if job.request.want_embedding:
            part = output.hidden[0, : end - n_past].float().cpu()
            job.embedding = part if job.embedding is None else torch.cat([job.embedding, part])
        slot.tokens.extend(prompt[n_past:end])
        job.n_prompt_done = end
        admission.checkpoint(self, slot)
        events: list[Event] = []
        if final and job.request.want_embedding:
            events = [results.finish(self, slot, "stop", "limit")]
        elif final:
            if self.drafter is not None:
                self.prefill.join()
                with self.drafter.stats.timed("begin"):
                    self.drafter.begin(slot.id, prompt)
            assert output.logits is not None
            choice = self.chooser.first(output.logits, slot)
            job.state = JobState.RUNNING
            events = results.emit(self, slot, choice.tokens, choice.reported)
        ms = 1000 * (time.perf_counter() - start)
        job.stats.prompt_ms += ms
        job.stats.prompt_n += end - n_past
        self.stats.prompt_ms += ms
        self.stats.prompt_tokens += end - n_past
        return events or [Event(job, "prompt")]

    def _decode(self, running: list[Slot], is_alone: bool = True) -> list[Event]:
        """The results of one decode step. When the next one needs nothing of them, it is launched first."""
        began = time.perf_counter()
        if not self._flights:
            self._launch(running)
        self.lengths.prepare()
        # What came in since the step began is known to the first rank alone: ranks do not go by it.
        is_quiet = self.link is not None or not self.queue.has_news
        if is_alone and self.decoder.ahead and len(self._flights) == 1 and is_quiet:
            self._run_ahead(running, self._flights[0])
        flight = self._flights[0]
        decoded = self.decoder.collect(flight)
        self._flights.popleft()
        now = time.perf_counter()
        ms = 1000 * (now - max(self._results_at, flight.began if is_alone else began))
        self._results_at = now
        account(self.stats, self.drafter, decoded, ms)
        self.lengths.keep(flight, decoded, ms if is_alone else None)
        if self.link is not None:
            self._emitted = hash(tuple(map(tuple, decoded.emitted)))
        events: list[Event] = []
        for slot, tokens, reported in zip(decoded.slots, decoded.emitted, decoded.reported):
            slot.tokens.extend([slot.last, *tokens[:-1]])
            events += results.emit(self, slot, tokens, reported)
        return events

    def _launch(self, slots: list[Slot], choice: Choice | None = None, following: Flight | None = None) -> None:
        rooms = [self.room(slot) for slot in slots]
        choice = choice or self.lengths.choose(slots, rooms)
        self._flights.append(self.decoder.launch(slots, choice, rooms, following))

    def _run_ahead(self, running: list[Slot], flight: Flight) -> None:
        """Launch the step after `flight`, whose results are not read yet. Slots that end there for certain take no
        part; what the step does for those that turn out to have ended is undone by `leave`."""
        slots = [s for s in running if not flight.holds(s) or results.n_left(self, s) > 1]
        if not slots or self.decoder.is_on_host:
            return
        if flight.choice.n > 0 and any(results.may_be_cut(slot) for slot in running):
            return
        choice = self.lengths.choose(slots, [self.room(s) - flight.holds(s) for s in slots])
        if self.decoder.can_follow(slots, choice.n):
            self._launch(slots, choice, flight)

    def room(self, slot: Slot) -> int:
        """Drafted tokens that the slot's context and the tokens still wanted leave room for."""
        return max(results.n_left(self, slot) - 1, 0)

    def is_ahead(self, slot: Slot) -> bool:
        """Whether a step whose results are not read works for the slot's job."""
        return any(flight.holds(slot) for flight in self._flights)

    def leave(self, slot: Slot) -> None:
        """The slot's job ends: undo what the device has done for it that nobody has read."""
        n_ahead = sum(flight.holds(slot) for flight in self._flights)
        if n_ahead == 1:
            self.decoder.drop(slot.id)
        elif n_ahead > 1:  # interrupted after a launch: the first of these steps cannot be undone any more
            admission.clear(self, slot)
        self._flights = deque(f for f in self._flights if any(f.slots[b] is not slot for b in f.live()))

    @torch.inference_mode()
    def serve(self, sampling: Sequence[SamplingParams]) -> None:
        """From now on streams do not wait for captures of steps: see `Forms.serve`. With graphs, while idle; not in a
        tensor split."""
        with on(self.device):
            self.decoder.forms.serve(self.policy.widths if self.policy is not None else [0, self.n_max], sampling)

    @torch.inference_mode()
    def capture_one(self) -> bool:
        """Between requests: capture a step that will be needed. False: there is none, or no time for it now.

        Ranks of a tensor split capture together or not at all: they do it when a step comes that needs it.
        """
        if not self.idle or self.link is not None:
            return False
        with on(self.device):
            return self.decoder.forms.capture_one()

    def new_stream(self, request: Request) -> TextStream:
        return TextStream(self.tokenizer, request.stop, request.parse_special_out)

    # -- slots as data -----------------------------------------------------------------------------------------

    def save_slot(self, slot_id: int) -> dict[str, Any]:
        """Everything of an idle slot as host data: tokens, caches, the drafter's state. Not in a tensor split, where
        this rank has a part of it."""
        self._check_whole()
        return admission.save(self, self._idle_slot(slot_id))

    def restore_slot(self, slot_id: int, data: dict[str, Any]) -> None:
        """Put saved data into an idle slot: all of it, or nothing (ConfigError). Not in a tensor split."""
        self._check_whole()
        admission.restore(self, self._idle_slot(slot_id), data)

    def erase_slot(self, slot_id: int) -> int:
        """Forget an idle slot's tokens; returns how many there were. In a tensor split the next step does it."""
        slot = self._idle_slot(slot_id)
        n = slot.n_past
        if self.link is None:
            admission.clear(self, slot)
        else:
            self.queue.erase(slot_id)
        return n

    def _check_whole(self) -> None:
        if self.link is not None:
            raise RequestError(
                "slots of a tensor split are spread over its processes: they cannot be saved or restored; "
                "use --split-mode layer", status=501, kind="not_supported_error",
            )  # fmt: skip

    def _idle_slot(self, slot_id: int) -> Slot:
        if not 0 <= slot_id < len(self.slots):
            raise RequestError(f"slot {slot_id} was asked for; this engine has slots 0 to {len(self.slots) - 1}")
        slot = self.slots[slot_id]
        if slot.job is not None:
            raise RequestError(f"slot {slot_id} is processing a request; wait until it is idle")
        return slot
