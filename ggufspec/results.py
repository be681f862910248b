"""What becomes of a step's tokens: text for the job, and the job's end where one of them ends it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from .errors import RequestError
from .job import Event, JobState, TokenOut
from .slot import Slot

if TYPE_CHECKING:
    from .engine import Engine


def emit(engine: Engine, slot: Slot, tokens: list[int], reported: list[TokenOut]) -> list[Event]:
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
        error = engine.chooser.accept(slot, token)
        if error is not None:
            trim(engine, slot, len(tokens) - 1 - i)
            return [fail(engine, slot, error, text, shown)]
        job.generated.append(token)
        shown.append(out)
        ends = ("stop", "eos") if token in engine.tokenizer.eog else None
        if not ends:
            text += slot.stream.push(token)
            ends = _ends_after(engine, slot)
        if ends:
            trim(engine, slot, len(tokens) - 1 - i)
            slot.last = -1
            return [finish(engine, slot, *ends, text=text, tokens=shown)]
    slot.last = tokens[-1]
    job.text += text
    job.stats.predicted_n = len(job.generated)
    return [Event(job, "text", text, shown)]


def _ends_after(engine: Engine, slot: Slot) -> tuple[str, str] | None:
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
    if len(job.request.prompt) + len(job.generated) >= engine.n_ctx:
        job.truncated = True
        return "length", "limit"
    return None


def n_left(engine: Engine, slot: Slot) -> int:
    """Tokens after which the job ends in any case."""
    job = slot.job
    assert job is not None
    left = engine.n_ctx - len(job.request.prompt) - len(job.generated)
    return left if job.request.n_predict < 0 else min(left, job.request.n_predict - len(job.generated))


def may_be_cut(slot: Slot) -> bool:
    """Whether the job can end within the accepted tokens of a step, so that some of them have to be taken back.

    End tokens and limits end a step's tokens by themselves.
    """
    return slot.grammar is not None or (slot.job is not None and bool(slot.job.request.stop))


def trim(engine: Engine, slot: Slot, n_too_many: int) -> None:
    """Take the last rows of the step just accepted back: the stream ended before them.

    Possible because recurrent layers replay a step's rows only at the next one, which must not be on its way yet.
    """
    if n_too_many == 0:
        return
    assert not engine.is_ahead(slot), "a step that replays these rows was launched"
    kept = engine.decoder.n_accepted_rows(slot.id) - n_too_many
    engine.cache.trim(slot.id, kept)
    if engine.drafter is not None:
        one = torch.tensor([slot.id], device=engine.device)
        engine.drafter.accept(one, torch.tensor([kept - 1], device=engine.device))
    del slot.tokens[len(slot.tokens) - n_too_many :]


def finish(engine: Engine, slot: Slot, reason: str, stop_kind: str, text: str = "",
           tokens: list[TokenOut] | None = None) -> Event:
    """The slot's job ends; what the device does for it ahead is undone."""
    job = slot.job
    assert job is not None
    rest = ""
    if slot.stream is not None and reason != "cancelled":
        held, rest = slot.stream.finish()
        text += held
        if slot.stream.stopped_by is not None and not job.stopping_word:
            job.stopping_word, reason, stop_kind = slot.stream.stopped_by, "stop", "word"
    job.text += text + rest
    job.finish_reason, job.stop_kind = reason, stop_kind
    job.stats.predicted_n = len(job.generated)
    job.state = JobState.DONE
    engine.stats.predicted_tokens += len(job.generated)
    engine.leave(slot)
    slot.job, slot.stream, slot.grammar, slot.last = None, None, None, -1
    slot.t_used = time.perf_counter()
    return Event(job, "done", text, tokens or [], rest)


def fail(engine: Engine, slot: Slot, error: RequestError, text: str = "", tokens: list[TokenOut] | None = None
         ) -> Event:
    """End the slot's job for a reason of its own; the others go on."""
    event = finish(engine, slot, "error", "none", text, tokens)
    event.kind, event.error = "error", error
    return event
