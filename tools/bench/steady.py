"""Streams that decode at a constant width, so that every step of a measurement is alike.

All prompts are evaluated first, then all streams decode together; each goes on until the slowest has its tokens, and
every step drafts its full width (an ordinary run drafts less near its end). The clock runs from the moment at which
all streams have their first token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ggufspec.drafters.synth import SyntheticAcceptance
from ggufspec.engine import Engine, EngineStats
from ggufspec.errors import ConfigError
from ggufspec.job import Event, Job, JobState, Request
from ggufspec.sampling import SamplingParams
from ggufspec.slot import Slot
from ggufspec.tokenizer import Tokenizer

STEPS_AHEAD = 3  # at most so many steps lie between the choice of a length and the time it took


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

    def _decode(self, running: list[Slot], *how: Any, **named: Any) -> list[Event]:
        if any(slot.reading for slot in self.slots):
            return []
        return super()._decode(running, *how, **named)


def accept_at_random(engine: Engine, rates: Sequence[float]) -> None:
    """From now on drafts are right at these rates, whatever the target says."""
    now = engine.decoder.synthetic
    if now is not None and len(now.rates) == len(rates):
        now.set_rates(rates)  # in place: captured steps read them where they lie
    else:
        engine.decoder.synthetic = SyntheticAcceptance(rates, len(engine.slots), engine.device)


def endless(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary without tokens that end a stream."""
    out = copy.copy(tokenizer)
    out.eog = frozenset()
    return out


def run_streams(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, sampling: Sequence[SamplingParams], nth: int = 0
) -> Run:
    """Decode all prompts together until each stream has `n_tokens` or has ended by itself.

    `nth`: synthetic acceptance has other random numbers in every run. ConfigError when the engine has too few slots
    or cells.
    """
    longest = max(len(p) for p in prompts)
    if len(prompts) > len(engine.slots) or longest + n_tokens > engine.n_ctx:
        raise ConfigError(
            f"{len(prompts)} streams of up to {longest} + {n_tokens} tokens do not fit {len(engine.slots)} slots of "
            f"{engine.n_ctx} tokens; use fewer streams, -n, or a larger -c"
        )
    if engine.decoder.synthetic is not None:
        sampling = [replace(params, seed=params.seed + len(engine.slots) * nth) for params in sampling]
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


def take_times(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
    """Let the engine's policy take times of every draft length with these streams, so that nothing is compiled or
    captured while anything is measured; of the texts it keeps nothing."""
    policy = engine.policy
    assert policy is not None
    policy.forced.extend(policy.start_steps(every_width=True))
    while policy.forced:
        jobs = [
            engine.submit(Request(list(prompt), params, cache_prompt=False, slot=i))
            for i, (prompt, params) in enumerate(zip(prompts, sampling))
        ]
        while policy.forced and all(job.state is not JobState.DONE for job in jobs):
            engine.step()
        for _ in range(STEPS_AHEAD):  # lengths are chosen before the steps that they are for
            engine.step()
        stop(engine, jobs)
    policy.forget_texts()
    engine.stats = EngineStats()


def stop(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.state is not JobState.DONE:
            engine.cancel(job)
    while not engine.idle:
        engine.step()
