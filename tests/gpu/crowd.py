"""Streams that go on while what is drafted for them changes: no prompt is evaluated again, nothing is built anew.

For files with random weights and synthetic acceptance, whose text means nothing: before every measurement the streams
are set back to the ends of their prompts, so that all measurements find equally full caches. What recurrent layers hold
then is of another text, which changes no time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ggufspec.adaptive import Adaptive
from ggufspec.engine import EngineStats
from ggufspec.job import Job, JobState, Request
from ggufspec.lengths import Lengths
from ggufspec.sampling import SamplingParams
from ggufspec.tools.bench.attach import set_width
from ggufspec.tools.bench.steady import SteadyEngine, accept_at_random, stop
from ggufspec.tools.bench.stepper import random_tokens

N_PROMPT = 32
STEPS_BEFORE = 3  # the first step of a kind captures it, and one may still be on its way from before


@dataclass(frozen=True)
class Window:
    """Some steps of all streams at one setting; times in milliseconds of one step."""

    n_streams: int
    n_steps: int
    n_tokens: int  # of all streams
    seconds: float
    widths: dict[int, int]  # drafted tokens: how many steps
    draft_ms: float
    verify_ms: float
    sample_ms: float

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.n_steps

    @property
    def drafted(self) -> float:
        """Mean drafted tokens of a stream's step."""
        return sum(n * count for n, count in self.widths.items()) / self.n_steps

    @property
    def drawn_length(self) -> float:
        """Tokens that a stream's step happened to emit."""
        return self.n_tokens / (self.n_steps * self.n_streams)

    def length(self, rates: Sequence[float]) -> float:
        """Tokens that a stream's step emits on average when drafts are right at these rates, at the lengths drafted."""
        return sum(count * expected_length(rates, n) for n, count in self.widths.items()) / self.n_steps

    def rate(self, rates: Sequence[float]) -> float:
        """Tokens a second of all streams: the steps' times as measured, their tokens as the rates say."""
        return self.n_streams * self.length(rates) / (self.seconds / self.n_steps)

    @property
    def drawn_rate(self) -> float:
        """The same with the tokens that were drawn: the rates' chance included."""
        return self.n_tokens / self.seconds

    def joined(self, other: Window) -> Window:
        """Both, as if one had followed the other."""
        n = self.n_steps + other.n_steps

        def mean(a: float, b: float) -> float:
            return (a * self.n_steps + b * other.n_steps) / n

        return Window(
            self.n_streams, n, self.n_tokens + other.n_tokens, self.seconds + other.seconds,
            dict(Counter(self.widths) + Counter(other.widths)), mean(self.draft_ms, other.draft_ms),
            mean(self.verify_ms, other.verify_ms), mean(self.sample_ms, other.sample_ms),
        )  # fmt: skip


def expected_length(rates: Sequence[float], n: int) -> float:
    """Tokens of a step with n drafted ones; rates[i]: the chance that the first i + 1 are right."""
    return 1.0 + sum(rates[:n])


class Crowd:
    """The streams of one engine. With a drafter, acceptance is synthetic from the start."""

    def __init__(self, engine: SteadyEngine):
        self.engine = engine
        self.jobs: list[Job] = []
        self.widths: Counter[int] = Counter()
        self._starts: list[tuple[list[int], int]] = []  # prompt, first token
        self.most = 0
        if engine.drafter is not None:
            self.most = set_width(engine, engine.drafter.n_max)
            accept_at_random(engine, [0.5 ** (i + 1) for i in range(self.most)])
        collect = engine.decoder.collect

        def counted(flight: Any) -> Any:
            self.widths[flight.choice.n] += 1
            return collect(flight)

        engine.decoder.collect = counted  # type: ignore[method-assign]

    def grow(self, n_streams: int) -> None:
        """Let more streams join; those there are stay."""
        self._settle()
        engine, generator = self.engine, torch.Generator().manual_seed(len(self.jobs) + 1)
        new = []
        for i in range(len(self.jobs), n_streams):
            prompt = random_tokens(N_PROMPT, engine.target.n_vocab, generator).tolist()
            params = SamplingParams(temperature=0.0, seed=i + 1)
            new.append(engine.submit(Request(prompt, params, cache_prompt=False, slot=i)))
        while any(job.state in (JobState.QUEUED, JobState.PROMPT) for job in new):
            engine.step()
        self._settle()
        self._starts += [(list(job.request.prompt), job.generated[0]) for job in new]
        self.jobs += new
        self.rewind()

    def rewind(self) -> None:
        """Every stream back to its prompt's end."""
        self._settle()
        for job, (prompt, first) in zip(self.jobs, self._starts):
            slot = self.engine.slots[job.slot]
            assert slot.job is job, "a stream has ended: its context was too short"
            slot.tokens, slot.last, job.generated, job.text = list(prompt), first, [first], ""

    def use(self, n: int | None, rates: Sequence[float] = (), policy: Adaptive | None = None) -> None:
        """From now on draft n tokens a step, or as many as the policy says, right at these rates.

        rates: of all positions that the drafter has.
        """
        self._settle()
        engine = self.engine
        if engine.drafter is not None:
            accept_at_random(engine, rates)
            set_width(engine, self.most if n is None or not n else n)
            if n == 0:
                engine.n_max = 0
        engine.policy, engine.lengths = policy, Lengths(engine)
        self.rewind()

    def take_times(self) -> None:
        """Steps of every length, for the policy: nothing is compiled or captured later on."""
        policy = self.engine.policy
        assert policy is not None
        policy.forced.extend(policy.start_steps(every_width=True))
        while policy.forced:
            if self.room() <= 2 * (self.most + 1):
                self.rewind()
            self.engine.step()
        for _ in range(STEPS_BEFORE):
            self.engine.step()
        self._settle()
        policy.forget_texts()
        self.engine.lengths = Lengths(self.engine)
        self.rewind()

    def room(self) -> int:
        """Tokens that every stream can still take."""
        return min(self.engine.n_ctx - len(job.request.prompt) - len(job.generated) for job in self.jobs)

    def run(self, n_steps: int, n_before: int = STEPS_BEFORE) -> Window:
        """The next n_steps steps, timed after n_before others."""
        engine = self.engine
        for _ in range(n_before):
            engine.step()
        engine.stats = EngineStats()
        self.widths.clear()
        before = sum(len(job.generated) for job in self.jobs)
        start = time.perf_counter()
        for _ in range(n_steps):
            engine.step()
        seconds = time.perf_counter() - start
        stats, n_tokens = engine.stats, sum(len(job.generated) for job in self.jobs) - before
        assert sum(self.widths.values()) == n_steps == stats.n_decode
        return Window(
            len(self.jobs), n_steps, n_tokens, seconds, dict(self.widths), stats.draft_ms / n_steps,
            stats.verify_ms / n_steps, stats.sample_ms / n_steps,
        )  # fmt: skip

    def end(self) -> None:
        stop(self.engine, self.jobs)
        self.jobs, self._starts = [], []

    def _settle(self) -> None:
        """Read the step that is on its way, so that nothing decided before reaches what comes next."""
        engine = self.engine
        if not engine._flights:
            return
        ahead, engine.decoder.ahead = engine.decoder.ahead, False
        try:
            engine.step()
        finally:
            engine.decoder.ahead = ahead
        assert not engine._flights
