"""How a job gets a slot, and how much of its prompt need not be evaluated again.

Attention layers can drop cells at any position. Recurrent layers can only stand at their end or at a checkpoint, so
checkpoints are taken at chunk borders and shortly before the end of a prompt: the next turn of a chat repeats all but
the last few tokens of this one's prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .host_copy import host_copy
from .job import Job, JobState
from .slot import Checkpoint, Slot

if TYPE_CHECKING:
    from .engine import Engine

# The generation prompt of chat templates (role header, opening think tag) is shorter than this.
TAIL = 16
# On a GPU so many tokens more are evaluated with the next turn as quickly as a short chunk of its own with this one.
N_SPARE = 128
N_ON_DEVICE = 2  # checkpoints of a slot that stay where the state is


def choose_slot(slots: list[Slot], job: Job, recurrent: bool) -> Slot | None:
    """The free slot that saves most of the prompt; among equals the one unused for longest."""
    request = job.request
    free = [s for s in slots if s.job is None and request.slot in (None, s.id)]
    if not free:
        return None
    if not request.cache_prompt:
        return min(free, key=lambda s: (s.n_past, s.t_used))
    return max(free, key=lambda s: (s.reusable(request.prompt, recurrent), -s.t_used))


def start(engine: Engine, slot: Slot, job: Job) -> None:
    """Put a job into a free slot and bring the slot to the longest prefix that can be reused."""
    engine.prefill.join()
    request, recurrent = job.request, engine.cache.has_recurrent
    n = slot.reusable(request.prompt, recurrent) if request.cache_prompt else 0
    if request.cache_prompt and engine.prompt_cache.limit_bytes != 0:
        if slot.n_past > 0 and n < slot.n_past:
            stash(engine, slot)
        entry = engine.prompt_cache.take(request.prompt, n, slot.n_past)
        if entry is not None:
            restore(engine, slot, entry.state)
            n = slot.reusable(request.prompt, recurrent)
    cut(engine, slot, n)
    job.slot, job.state = slot.id, JobState.PROMPT
    job.n_prompt_cached = job.n_prompt_done = job.stats.cache_n = n
    slot.job, slot.last = job, -1
    slot.stream = engine.new_stream(request)
    engine.chooser.start(slot)
    if engine.decoder.synthetic is not None:
        engine.decoder.synthetic.start(slot.id, request.sampling.seed)


def cut(engine: Engine, slot: Slot, n: int) -> None:
    """Keep the first n tokens of a slot; n is a length that `Slot.reusable` gave."""
    if n == slot.n_past and n > 0:
        return
    if n == 0:
        clear(engine, slot)
        return
    if engine.cache.has_recurrent:
        point = next(c for c in slot.checkpoints if c.n_past == n)
        engine.cache.restore_recurrent(slot.id, point.states)
        if engine.drafter is not None:
            engine.drafter.rewind(slot.id, point.drafter)
    slot.checkpoints = [c for c in slot.checkpoints if c.n_past <= n]
    del slot.tokens[n:]


def clear(engine: Engine, slot: Slot) -> None:
    engine.prefill.join()
    engine.cache.reset(slot.id)
    if engine.drafter is not None:
        engine.drafter.reset(slot.id)
    slot.tokens, slot.checkpoints, slot.last = [], [], -1


def chunk_end(n_past: int, n_prompt: int, n_ubatch: int, branch: int) -> int:
    """Where the next prompt chunk ends: at a multiple of the micro-batch counted from the sequence's start, or at
    `branch`, where a checkpoint is due (-1: nowhere).

    Absolute borders make a prompt's chunks, and so its rounding, independent of what was reused before a border.
    """
    end = min(n_prompt, (n_past // n_ubatch + 1) * n_ubatch)
    return branch if n_past < branch < end else end


def branch_of(n_prompt: int, n_ubatch: int, newest: int, n_spare: int) -> int:
    """Where the next turn is expected to leave this prompt: the start of its last few tokens.

    A chunk has to end there, which may be one of its own. Where a border or the newest checkpoint is less than n_spare
    tokens before, that does instead.
    """
    tail = max(n_prompt - TAIL, 0)
    before = max(tail // n_ubatch * n_ubatch, min(newest, tail))
    return before if tail - before < n_spare else tail


def due(engine: Engine, slot: Slot) -> int:
    """`branch_of` the slot's prompt; -1 where no checkpoints are kept."""
    if slot.job is None or engine.n_checkpoints <= 0 or not engine.cache.has_recurrent:
        return -1
    newest = slot.checkpoints[-1].n_past if slot.checkpoints else 0
    n_spare = N_SPARE if engine.prefill.is_padded else 0  # on the CPU every row has its price
    return branch_of(len(slot.job.request.prompt), engine.n_ubatch, newest, n_spare)


def checkpoint(engine: Engine, slot: Slot) -> None:
    """Keep the recurrent state after the chunk just evaluated, if that is where a later prompt may branch off.

    Such places are the start of the last few tokens, the end of the prompt, and one every `checkpoint_step` tokens.
    Past the limit the oldest but one goes.
    """
    branch, n = due(engine, slot), slot.n_past
    newest = slot.checkpoints[-1].n_past if slot.checkpoints else 0
    if branch < 0 or (n < branch and n - newest < engine.checkpoint_step):
        return
    engine.prefill.join()
    drafter = engine.drafter
    state = None if drafter is None else drafter.checkpoint(slot.id, n)
    slot.checkpoints.append(Checkpoint(n, engine.cache.save_recurrent(slot.id, is_committed=True), state))
    while len(slot.checkpoints) > engine.n_checkpoints:
        del slot.checkpoints[min(1, len(slot.checkpoints) - 1)]
    if len(slot.checkpoints) > N_ON_DEVICE:
        engine.crowded.append(slot)


def stow(slot: Slot) -> None:
    """Only a slot's newest checkpoints stay on their device, others move to the host: after the chunk's results, as it
    takes longer than a short chunk does."""
    for old in slot.checkpoints[:-N_ON_DEVICE]:
        old.states, old.drafter = host_copy((old.states, old.drafter))[0]


def save(engine: Engine, slot: Slot) -> dict[str, Any]:
    engine.prefill.join()
    drafter = engine.drafter
    return {
        "tokens": list(slot.tokens),
        "cache": engine.cache.save(slot.id, slot.n_past),
        "drafter": None if drafter is None else (drafter.name, drafter.save(slot.id, slot.n_past)),
        "checkpoints": [Checkpoint(c.n_past, list(c.states), c.drafter) for c in slot.checkpoints],
    }


def restore(engine: Engine, slot: Slot, data: dict[str, Any]) -> None:
    """Everything or nothing: a mismatch is found before the first write."""
    drafter, saved = engine.drafter, data["drafter"]
    have = None if drafter is None else drafter.name
    wants = None if saved is None else saved[0]
    if have != wants:
        raise ConfigError(f"the saved slot was made with drafter {wants or 'none'}, this engine runs {have or 'none'}")
    if len(data["tokens"]) > engine.n_ctx:
        raise ConfigError(f"the saved slot has {len(data['tokens'])} tokens; a slot here holds {engine.n_ctx}")
    if drafter is not None and saved is not None:
        drafter.check(saved[1])
    engine.cache.restore(slot.id, data["cache"])
    if drafter is not None and saved is not None:
        drafter.restore(slot.id, saved[1])
    slot.tokens, slot.checkpoints, slot.last = list(data["tokens"]), list(data["checkpoints"]), -1


def stash(engine: Engine, slot: Slot) -> None:
    """Move a slot's state to the host cache before another prompt overwrites it."""
    if not engine.prompt_cache.wants(slot.tokens):
        return
    data, n_bytes = host_copy(save(engine, slot))
    if engine.link is not None:
        n_bytes = engine.link.total(n_bytes)  # each has a part of it, and all must keep and forget the same
    cuts = [c.n_past for c in slot.checkpoints] if engine.cache.has_recurrent else None
    engine.prompt_cache.save(slot.tokens, data, n_bytes, cuts)


