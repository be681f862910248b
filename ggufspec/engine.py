"""The engine: slots, scheduling and the loop. One thread owns it and calls `step()`.

A step takes at most one prompt chunk through the target, then one decode step for all running slots together:
draft, lay out rows, forward, sample, accept, emit. A long prompt therefore never holds running streams back for more
than one micro-batch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from . import admission
from .adaptive import Adaptive, Choice
from .capture import Graphs
from .choose import Chooser
from .decode import Decoded, Decoder
from .drafters import Drafter
from .drafters.chain import Chain
from .drafters.statistics import count_positions
from .drafters.synth import SyntheticAcceptance
from .errors import RequestError
from .job import Event, Job, JobState, Request, TokenOut
from .prompt_cache import PromptCache
from .rows import prompt_rows
from .slot import Slot
from .stream import TextStream

if TYPE_CHECKING:
    from .models import Model
    from .tokenizer import Tokenizer


@dataclass
class EngineStats:
    """Totals over the engine's life; times in milliseconds of wall clock."""

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    n_decode: int = 0
    n_slots_decoded: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    n_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    last_draft_ms: float = 0.0
    last_verify_ms: float = 0.0

    def record_draft(self, n_drafted: int, n_accepted: int) -> None:
        if n_drafted == 0:
            return
        self.n_drafts += 1
        self.draft_n += n_drafted
        self.draft_n_accepted += n_accepted
        count_positions(self.accepted_at, n_accepted)


@dataclass
class Inbox:
    """What other threads asked for since the last step."""

    submitted: list[Job] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    emitted: int = 0  # digest of the last step's tokens: ranks compare theirs
    step_ms: float | None = None  # what the last step took, on the first rank: all ranks' policies go by it

    def __bool__(self) -> bool:
        return bool(self.submitted or self.cancelled)


class Link(Protocol):
    """Joins the engines of a tensor split, so that all of them take the same requests at the same step."""

    def share(self, inbox: Inbox) -> Inbox:
        """The first rank's inbox, on every rank; an error when its `emitted` is not this rank's."""
        ...


class Engine:
    """Runs jobs on a target model with at most one drafter (which may be a chain of several).

    `n_ctx` is the context of one slot. `n_max` is the draft length, None for the drafter's own limit.
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
        on_capture: Callable[[str], None] | None = None,
        link: Link | None = None,
        synthetic: SyntheticAcceptance | None = None,
        policy: Adaptive | None = None,
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
        self.stats = EngineStats()
        self.chooser = Chooser(tokenizer, target.n_vocab, self.device)
        graphs = Graphs(self.device, self._mutable, on_capture) if use_graphs and self._can_capture() else None
        self.decoder = Decoder(target, self.cache, drafter, self.chooser, graphs, synthetic)
        self.link = link
        self.policy = policy  # decides draft lengths; None: every slot drafts n_max tokens
        self._untold: Callable[[float | None], None] | None = None  # the last step's results, for the policy
        self._step_ms: float | None = None
        self._prepared: tuple[list[int], list[int], Choice] | None = None  # jobs, limits and the choice for them
        self._ids = itertools.count()
        self._queue: deque[Job] = deque()
        self._inbox = Inbox()
        self._emitted = 0
        self._lock = threading.Lock()

    def _can_capture(self) -> bool:
        """Graphs hold the work of one GPU; layers elsewhere keep the step eager."""
        return self.device.type == "cuda" and all(layer.device == self.device for layer in self.target.layers)

    def _mutable(self) -> list[Tensor]:
        return self.cache.mutable() + ([] if self.drafter is None else self.drafter.mutable())

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
        request = replace(request, sampling=self.chooser.bind(request.sampling))
        job = Job(next(self._ids), request)
        job.stats.t_submit = time.perf_counter()
        with self._lock:
            self._inbox.submitted.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job at the next step (thread-safe); its slot is free then."""
        with self._lock:
            self._inbox.cancelled.append(job.id)

    @property
    def idle(self) -> bool:
        """Nothing is queued, running or waiting to be cancelled."""
        return not self._inbox and not self._queue and all(slot.job is None for slot in self.slots)

    @property
    def n_waiting(self) -> int:
        return len(self._queue) + len(self._inbox.submitted)

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
            if job.state is not JobState.DONE:
                self.cancel(job)
                self.step()

    # -- the loop ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit, one prompt chunk, one decode step. Returns what happened, in order."""
        events = self._take_inbox()
        events += self._admit()
        waiting = [s for s in self.slots if s.job is not None and s.job.state is JobState.PROMPT]
        if waiting:
            slot = min(waiting, key=lambda s: s.job.id if s.job else 0)
            events += self._prompt_chunk(slot)
        running = [s for s in self.slots if s.generating]
        if running:
            events += self._decode(running, is_alone=not waiting)
        return events

    def _take_inbox(self) -> list[Event]:
        """Queue what was submitted and drop what was cancelled since the last step."""
        with self._lock:
            inbox, self._inbox = self._inbox, Inbox()
        inbox.emitted, inbox.step_ms = self._emitted, self._step_ms
        if self.link is not None:
            inbox = self.link.share(inbox)
        self._step_ms = inbox.step_ms
        self._queue.extend(inbox.submitted)
        cancelled = set(inbox.cancelled)
        dropped = [job for job in self._queue if job.id in cancelled]
        self._queue = deque(job for job in self._queue if job.id not in cancelled)
        for job in dropped:
            job.finish_reason, job.state = "cancelled", JobState.DONE
        events = [Event(job, "done") for job in dropped]
        for slot in self.slots:
            if slot.job is not None and slot.job.id in cancelled:
                events.append(self._finish(slot, "cancelled", "none"))
        return events

    def _admit(self) -> list[Event]:
        """Give queued jobs a free slot, oldest first; a job that wants a busy slot waits without blocking others.

        A grammar is compiled here: its mistakes end its job alone.
        """
        events: list[Event] = []
        for job in list(self._queue):
            slot = admission.choose_slot(self.slots, job, self.cache.has_recurrent)
            if slot is not None:
                self._queue.remove(job)
                try:
                    admission.start(self, slot, job)
                except RequestError as error:
                    events.append(self._fail(slot, error))
        return events

    def _prompt_chunk(self, slot: Slot) -> list[Event]:
        job = slot.job
        assert job is not None
        start = time.perf_counter()
        prompt, n_past = job.request.prompt, slot.n_past
        end = admission.chunk_end(n_past, len(prompt), self.n_ubatch, self.cache.has_recurrent)
        final = end == len(prompt)
        tokens = torch.tensor(prompt[n_past:end], dtype=torch.int64).to(self.device)
        rows = prompt_rows(tokens, slot.id, n_past)
        taps = self.drafter.taps if self.drafter is not None else ()
        output = self.target.forward(rows, self.cache, taps=taps, logits="last" if final else "none")
        if self.drafter is not None:
            self.drafter.observe(rows, output)
        if job.request.want_embedding:
            part = output.hidden[0].float().cpu()
            job.embedding = part if job.embedding is None else torch.cat([job.embedding, part])
        slot.tokens.extend(prompt[n_past:end])
        job.n_prompt_done = end
        if self.cache.has_recurrent:
            admission.checkpoint(self, slot)
        events: list[Event] = []
        if final and job.request.want_embedding:
            events = [self._finish(slot, "stop", "limit")]
        elif final:
            if self.drafter is not None:
                with self.drafter.stats.timed("begin"):
                    self.drafter.begin(slot.id, prompt)
            assert output.logits is not None
            choice = self.chooser.first(output.logits[:, 0], slot)
            job.state = JobState.RUNNING
            events = self._emit(slot, choice.tokens, choice.reported)
        ms = 1000 * (time.perf_counter() - start)
        job.stats.prompt_ms += ms
        job.stats.prompt_n += end - n_past
        self.stats.prompt_ms += ms
        self.stats.prompt_tokens += end - n_past
        return events or [Event(job, "prompt")]

    def _decode(self, running: list[Slot], is_alone: bool = True) -> list[Event]:
        start = time.perf_counter()
        choice = self._choose_lengths(running)
        # The width stays when room runs out: other widths would be other graphs to capture.
        limits = [min(n, self._room(slot)) for n, slot in zip(choice.lengths, running)]
        if not any(limits):
            choice = Choice.plain(len(running))
        decoded = self.decoder.step(running, limits, choice.n, self._prepare if self.policy is not None else None)
        ms = 1000 * (time.perf_counter() - start)
        self._account(running, decoded, ms)
        self._keep_report(running, choice, decoded, ms if is_alone else None)
        if self.link is not None:
            self._emitted = hash(tuple(map(tuple, decoded.emitted)))
        events: list[Event] = []
        for slot, tokens, reported in zip(running, decoded.emitted, decoded.reported):
            evaluated = [slot.last, *tokens[:-1]]
            slot.tokens.extend(evaluated)
            events += self._emit(slot, tokens, reported)
        return events

    def _choose_lengths(self, running: list[Slot]) -> Choice:
        """Drafted tokens of each slot: as many as allowed, or as the policy says."""
        most = [self._draft_length(slot) for slot in running]
        if self.policy is None:
            return Choice(max(most), most, [()] * len(most))
        jobs = [slot.job.id for slot in running if slot.job is not None]
        if self._prepared is None or self._prepared[:2] != (jobs, most):
            self._prepared = jobs, most, self.policy.choose(jobs, most)
        choice = self._prepared[2]
        if isinstance(self.drafter, Chain):
            self.drafter.allowed = choice.members
        return choice

    def _prepare(self) -> None:
        """While the device works: tell the policy of the step before this one and ask it for the next."""
        assert self.policy is not None and self._prepared is not None
        if self._untold is not None:
            self._untold(self._step_ms)
            self._untold = None
        jobs, most, _ = self._prepared
        self._prepared = jobs, most, self.policy.choose(jobs, most)

    def _keep_report(self, running: list[Slot], choice: Choice, decoded: Decoded, ms: float | None) -> None:
        """Keep what the policy is told once all ranks know the time the step took."""
        self._step_ms = ms
        if self.policy is None:
            return
        chain = self.drafter if isinstance(self.drafter, Chain) else None
        jobs = [slot.job.id for slot in running if slot.job is not None]
        sources = [chain.source(slot.id) if chain is not None else 0 for slot in running]
        accepted = [len(tokens) - 1 for tokens in decoded.emitted]
        self._untold = partial(self.policy.record, jobs, choice, decoded.n_drafted, accepted, sources)

    def _draft_length(self, slot: Slot) -> int:
        """The most drafted tokens that this slot may have."""
        assert slot.job is not None
        own = slot.job.request.speculation.n_max
        return self.n_max if own is None else min(self.n_max, own)

    def _room(self, slot: Slot) -> int:
        """Drafted tokens that the slot's context and the tokens still wanted leave room for."""
        job = slot.job
        assert job is not None
        room = self.n_ctx - slot.n_past - 2
        if job.request.n_predict >= 0:
            room = min(room, job.request.n_predict - len(job.generated) - 1)
        return max(room, 0)

    def _account(self, running: list[Slot], decoded: Decoded, ms: float) -> None:
        stats = self.stats
        stats.decode_ms += ms
        stats.draft_ms += decoded.draft_ms
        stats.verify_ms += decoded.verify_ms
        stats.sample_ms += decoded.sample_ms
        stats.last_draft_ms, stats.last_verify_ms = decoded.draft_ms, decoded.verify_ms
        if self.drafter is not None and decoded.proposed:
            self.drafter.stats.add("propose", decoded.draft_ms)
            self.drafter.stats.add("accept", 0.0)
        stats.n_decode += 1
        stats.n_slots_decoded += len(running)
        for slot, n_drafted, tokens in zip(running, decoded.n_drafted, decoded.emitted):
            assert slot.job is not None
            job_stats, n_accepted = slot.job.stats, len(tokens) - 1
            job_stats.draft_ms += decoded.draft_ms
            job_stats.verify_ms += decoded.verify_ms
            job_stats.sample_ms += decoded.sample_ms
            stats.record_draft(n_drafted, n_accepted)
            if n_drafted > 0:
                job_stats.draft_n += n_drafted
                job_stats.draft_n_accepted += n_accepted
                job_stats.n_verify += 1
                counts = job_stats.accepted_per_position
                counts += [0] * (n_drafted - len(counts))
                count_positions(counts, n_accepted)
            if self.drafter is not None:
                self.drafter.record(slot.id, n_drafted, n_accepted)

    # -- results -----------------------------------------------------------------------------------------------

    def _emit(self, slot: Slot, tokens: list[int], reported: list[TokenOut]) -> list[Event]:
        """Hand tokens to the job until one of them ends it. `tokens[-1]` is not evaluated yet."""
        job = slot.job
        assert job is not None and slot.stream is not None
        now = time.perf_counter()
        if not job.generated:
            job.stats.t_start = now
        job.stats.predicted_ms = 1000 * (now - job.stats.t_start)
        shown: list[TokenOut] = []
        text = ""
        for i, (token, out) in enumerate(zip(tokens, reported)):
            error = self.chooser.accept(slot, token)
            if error is not None:
                self._trim(slot, len(tokens) - 1 - i)
                return [self._fail(slot, error, text, shown)]
            job.generated.append(token)
            shown.append(out)
            ends = self._ends(slot, token)
            if not ends:
                text += slot.stream.push(token)
                ends = self._ends_after(slot)
            if ends:
                self._trim(slot, len(tokens) - 1 - i)
                slot.last = -1
                return [self._finish(slot, *ends, text=text, tokens=shown)]
        slot.last = tokens[-1]
        job.text += text
        job.stats.predicted_n = len(job.generated)
        return [Event(job, "text", text, shown)]

    def _ends(self, slot: Slot, token: int) -> tuple[str, str] | None:
        return ("stop", "eos") if token in self.tokenizer.eog else None

    def _ends_after(self, slot: Slot) -> tuple[str, str] | None:
        """(finish reason, stop kind) when the stream ends with the token just pushed."""
        job, stream = slot.job, slot.stream
        assert job is not None and stream is not None
        if stream.stopped_by is not None:
            job.stopping_word = stream.stopped_by
            return "stop", "word"
        if slot.grammar is not None and slot.grammar.finished:
            return "stop", "eos"
        if 0 <= job.request.n_predict <= len(job.generated):
            return "length", "limit"
        if len(job.request.prompt) + len(job.generated) >= self.n_ctx:
            job.truncated = True
            return "length", "limit"
        return None

    def _trim(self, slot: Slot, n_too_many: int) -> None:
        """Take the last rows of the step just accepted back: the stream ended before them.

        Possible because recurrent layers replay a step's rows only at the next one.
        """
        if n_too_many == 0:
            return
        kept = self.decoder.n_accepted_rows(slot.id) - n_too_many
        self.cache.trim(slot.id, kept)
        if self.drafter is not None:
            one = torch.tensor([slot.id], device=self.device)
            self.drafter.accept(one, torch.tensor([kept - 1], device=self.device))
        del slot.tokens[len(slot.tokens) - n_too_many :]

    def _finish(self, slot: Slot, reason: str, stop_kind: str, text: str = "",
                tokens: list[TokenOut] | None = None) -> Event:
        job = slot.job
        assert job is not None
        if slot.stream is not None and reason != "cancelled":
            text += slot.stream.finish()
            if slot.stream.stopped_by is not None and not job.stopping_word:
                job.stopping_word, reason, stop_kind = slot.stream.stopped_by, "stop", "word"
        job.text += text
        job.finish_reason, job.stop_kind = reason, stop_kind
        job.stats.predicted_n = len(job.generated)
        job.state = JobState.DONE
        self.stats.predicted_tokens += len(job.generated)
        slot.job, slot.stream, slot.grammar, slot.last = None, None, None, -1
        slot.t_used = time.perf_counter()
        return Event(job, "done", text, tokens or [])

    def _fail(self, slot: Slot, error: RequestError, text: str = "", tokens: list[TokenOut] | None = None) -> Event:
        """End the slot's job for a reason of its own; the others go on."""
        event = self._finish(slot, "error", "none", text, tokens)
        event.kind, event.error = "error", error
        return event

    def new_stream(self, request: Request) -> TextStream:
        return TextStream(self.tokenizer, request.stop, request.parse_special_out)

    # -- slots as data -----------------------------------------------------------------------------------------

    def save_slot(self, slot_id: int) -> dict[str, Any]:
        """Everything of an idle slot as host data: tokens, caches, the drafter's state."""
        return admission.save(self, self._idle_slot(slot_id))

    def restore_slot(self, slot_id: int, data: dict[str, Any]) -> None:
        """Put saved data into an idle slot: all of it, or nothing (ConfigError)."""
        admission.restore(self, self._idle_slot(slot_id), data)

    def erase_slot(self, slot_id: int) -> int:
        """Forget an idle slot's tokens; returns how many there were."""
        slot = self._idle_slot(slot_id)
        n = slot.n_past
        admission.clear(self, slot)
        return n

    def _idle_slot(self, slot_id: int) -> Slot:
        if not 0 <= slot_id < len(self.slots):
            raise RequestError(f"slot {slot_id} was asked for; this engine has slots 0 to {len(self.slots) - 1}")
        slot = self.slots[slot_id]
        if slot.job is not None:
            raise RequestError(f"slot {slot_id} is processing a request; wait until it is idle")
        return slot
