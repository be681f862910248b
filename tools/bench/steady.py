"""Streams that decode at a constant width, so that every step of a measurement is alike.

All prompts are evaluated first, then all streams decode together; each goes on until the slowest has its tokens, and
every step drafts its full width (an ordinary run drafts less near its end). The clock runs from the moment at which
all streams have their first token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ggufspec.decode import Decoded, Decoder
from ggufspec.drafters.synth import SyntheticAcceptance
from ggufspec.engine import Engine, EngineStats
from ggufspec.errors import ConfigError
from ggufspec.job import Event, Job, JobState, Request
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.slot import Slot
from ggufspec.tokenizer import Tokenizer


@dataclass
class Run:
    """One measurement; times in milliseconds of all its steps together, `n_tokens` per stream."""

    n_tokens: list[int]
    decode_ms: float
    prompt_ms: float
    stats: EngineStats
    tokens: list[list[int]] = field(repr=False)

    @property
    def ms_per_token(self) -> float:
        """Of all streams together."""
        return self.decode_ms / max(sum(self.n_tokens), 1)

    @property
    def wall_ms_per_token(self) -> float:
        return (self.prompt_ms + self.decode_ms) / max(sum(len(t) for t in self.tokens), 1)

    @property
    def stream_tokens_per_second(self) -> list[float]:
        return [1000 * n / self.decode_ms for n in self.n_tokens]


class SteadyEngine(Engine):
    """An engine that lets nobody decode while a prompt waits."""

    def _decode(self, running: list[Slot]) -> list[Event]:
        if any(slot.job is not None and slot.job.state is JobState.PROMPT for slot in self.slots):
            return []
        return super()._decode(running)


class SyntheticDecoder(Decoder):
    """A decoder whose drafts are right at given rates. Random numbers reach a captured step through a fixed buffer."""

    def __init__(self, decoder: Decoder, rates: Sequence[float], n_slots: int, seed: int):
        super().__init__(decoder.target, decoder.cache, decoder.drafter, decoder.chooser, decoder.graphs)
        self.acceptance = SyntheticAcceptance(rates, n_slots, self.device)
        self.seed = seed
        self.uniforms = torch.zeros(n_slots, max(len(rates), 1), dtype=torch.float64, device=self.device)

    def restart(self) -> None:
        """The same random numbers again, as for a new request in every slot."""
        for slot in range(len(self.uniforms)):
            self.acceptance.start(slot, self.seed + slot)

    def step(self, slots: Sequence[Slot], limits: Sequence[int]) -> Decoded:
        ids, n = [slot.id for slot in slots], max(limits)
        if n > 0:
            self.uniforms[: len(ids), :n].copy_(self.acceptance.draw(ids, n))
        decoded = super().step(slots, limits)
        for slot_id, n_drafted, tokens in zip(ids, decoded.n_drafted, decoded.emitted):
            self.acceptance.used(slot_id, n_drafted, len(tokens) - 1)
        return decoded

    def _settle(self, rows: Rows, tokens: Tensor) -> Tensor:
        B, W = tokens.shape
        tokens, n_accepted = self.acceptance.settle(rows, tokens, self.uniforms[:B, : W - 1], self.chooser.is_eog)
        self.cache.accept(rows.slots, n_accepted + 1)
        return torch.cat([tokens, n_accepted[:, None], rows.n_rows[:, None]], dim=1)


def endless(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary without tokens that end a stream."""
    out = copy.copy(tokenizer)
    out.eog = frozenset()
    return out


def run_streams(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, sampling: Sequence[SamplingParams]
) -> Run:
    """Decode all prompts together until each stream has `n_tokens` or has ended by itself.

    ConfigError when the engine has too few slots or cells.
    """
    longest = max(len(p) for p in prompts)
    if len(prompts) > len(engine.slots) or longest + n_tokens > engine.n_ctx:
        raise ConfigError(
            f"{len(prompts)} streams of up to {longest} + {n_tokens} tokens do not fit {len(engine.slots)} slots of "
            f"{engine.n_ctx} tokens; use fewer streams, -n, or a larger -c"
        )
    if isinstance(engine.decoder, SyntheticDecoder):
        engine.decoder.restart()
    start = time.perf_counter()
    jobs = [
        engine.submit(Request(list(prompt), params, cache_prompt=False, slot=i))
        for i, (prompt, params) in enumerate(zip(prompts, sampling))
    ]
    while any(job.state in (JobState.QUEUED, JobState.PROMPT) for job in jobs):
        engine.step()
        if all(len(job.generated) > 0 for job in jobs):
            break
    started = time.perf_counter()
    before = [len(job.generated) for job in jobs]
    engine.stats = EngineStats()
    while any(job.state is not JobState.DONE and len(job.generated) < n_tokens for job in jobs):
        engine.step()
    ended = time.perf_counter()
    stats, engine.stats = engine.stats, EngineStats()
    made = [len(job.generated) - n for job, n in zip(jobs, before)]
    stop(engine, jobs)
    return Run(made, 1000 * (ended - started), 1000 * (started - start), stats, [job.generated for job in jobs])


def stop(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.state is not JobState.DONE:
            engine.cancel(job)
    while not engine.idle:
        engine.step()
