"""One of each kind of work that requests will bring, for slots that nobody has: every kernel they need is launched.

Made to run inside `kernels.ahead.compiled_ahead`, where nothing is computed: results are meaningless and given to no
one, nothing waits for them. Steps are not captured. Afterwards all slots are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import torch

from . import admission
from .adaptive import Choice
from .handover import on
from .job import Job, Request
from .sampling import SamplingParams
from .slot import Slot
from .speculate import lay_out

if TYPE_CHECKING:
    from .engine import Engine

PROMPT_WIDTHS = (192, 32, 16)  # beside whole chunks: what they end with takes other kernels, by these limits
SHORT = 8  # drafted tokens up to which attention has tiles of its own for some lengths, whatever heads share a key
N_PAST = 8  # tokens that a slot seems to hold
GREEDY = SamplingParams(temperature=0.0)
_ids = count(-1, -1)  # of jobs that are none


@torch.inference_mode()
def rehearse(engine: Engine, sampling: Sequence[SamplingParams]) -> None:
    """Prompt chunks, and decode steps with few and many streams, with and without drafts.

    sampling: as requests will ask for it, beside greedy choice.
    """
    with on(engine.device), as_they_are(engine):
        most = min(engine.n_ubatch, engine.n_ctx - 1)
        for width in sorted({min(width, most) for width in (most, *PROMPT_WIDTHS)}):
            prompt(engine, width)
        counts, lengths = stream_counts(len(engine.slots)), draft_lengths(engine.n_max)
        for n_streams in counts:
            for n in lengths:
                decode(engine, n_streams, GREEDY, n)
        for n in range(min(engine.n_max, SHORT) + 1):
            if n not in lengths:
                decode(engine, 1, GREEDY, n)
        for params in sampling:
            decode(engine, counts[0], params, lengths[0])
            decode(engine, counts[-1], params, lengths[-1])
        for slot in engine.slots:
            admission.clear(engine, slot)
        forget_statistics(engine)


def forget_statistics(engine: Engine) -> None:
    """What the engine and its drafters have counted so far was nobody's."""
    engine.stats = type(engine.stats)()
    for member in getattr(engine.drafter, "members", [engine.drafter]):
        if member is not None:
            member.stats = type(member.stats)(member.name, member.stats.n_max)


def stream_counts(n_slots: int) -> list[int]:
    """Numbers of streams between which no other kernels are needed: products take rows by tiles of 8, 16 and 32."""
    return sorted({n_slots, *(1 << k for k in range(n_slots.bit_length()))})


def draft_lengths(n_max: int) -> list[int]:
    """Lengths between which none are needed either, with one stream alone. A block of one token has its own."""
    return sorted({0, min(1, n_max), n_max, *(n for n in (7, 15, 31, 63) if n < n_max)})


@contextmanager
def as_they_are(engine: Engine) -> Iterator[None]:
    """Inside, nothing is captured: the launches are the same."""
    decoder, prefill = engine.decoder, engine.prefill
    before = decoder.graphs, decoder.run_stage, prefill.graphs, prefill.stages
    decoder.graphs = decoder.run_stage = prefill.graphs = prefill.stages = None
    try:
        yield
    finally:
        decoder.graphs, decoder.run_stage, prefill.graphs, prefill.stages = before


def prompt(engine: Engine, width: int) -> None:
    """A chunk of a prompt, and the choice of the token after it."""
    engine.prefill.run([0] * width, engine.slots[0].id, 0, is_last=True)
    engine.prefill.join()


def decode(engine: Engine, n_streams: int, sampling: SamplingParams, n: int) -> None:
    """A step with n drafted tokens."""
    decoder, drafter, B = engine.decoder, engine.drafter, n_streams
    request = Request([0] * N_PAST, engine.chooser.bind(sampling))
    slots = [Slot(i, Job(next(_ids), request), tokens=[0] * N_PAST, last=0) for i in range(B)]
    if decoder.synthetic is not None:
        for slot in slots:
            decoder.synthetic.start(slot.id, 0)
    decoder.launch(slots, Choice(n, [n] * B, [()] * B), [n] * B)
    if decoder.is_on_host and drafter is not None and n > 0:  # which has drafted nothing: the step was a plain one
        ids = torch.tensor([slot.id for slot in slots], device=engine.device)
        zero = torch.zeros_like(ids)
        rows = lay_out(zero, ids.new_zeros(B, n), zero, ids, zero + N_PAST, engine.target.n_vocab)
        output = engine.target.forward(rows, engine.cache, taps=drafter.taps, logits="all")
        assert output.logits is not None
        engine.chooser.rows(output.logits, rows, slots)
        engine.cache.accept(rows.slots, zero + 1, rows.n_rows)
        drafter.observe(rows, output)
        drafter.accept(rows.slots, zero)
