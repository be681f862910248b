"""Decoding in a simulated clock: streams with known texts for a drafter, steps with known costs, a policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ggufspec.adaptive import Adaptive, Choice

Cost = Callable[[int, int], float]  # (streams, width) to milliseconds
Chance = Callable[[int], float]  # token index in the stream to the chance that a drafted token there is right


@dataclass
class Run:
    """What a simulated run came to."""

    ms: float = 0.0
    tokens: int = 0
    widths: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # tokens of stream 0 before each step
    times: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


class Fixed:
    """The policy that never changes its mind."""

    def __init__(self, n: int):
        self.n = n

    def choose(self, jobs: Sequence[int], most: Sequence[int], pending: Choice | None = None) -> Choice:
        return Choice(self.n, [self.n] * len(jobs), [(0,)] * len(jobs))

    def record(self, *told: object) -> None: ...


def simulate(policy: Adaptive | Fixed, chances: Sequence[Chance], cost: Cost, n_tokens: int, *, seed: int = 1,
             noise: float = 0.02, shorter: int | None = None) -> Run:
    """Decode streams together, stream b with chance chances[b], until stream 0 has n_tokens.

    As in the engine, the choice for a step is made while the step before it runs: from what is known up to the one
    before that. shorter: the drafter stops after so many tokens, whatever it is asked for.

    Drafted token i of a step at token t is right when a number that depends on (stream, t + i) alone is below the
    chance there: all policies meet the same text.
    """
    run, jobs = Run(), list(range(len(chances)))
    done = [0] * len(chances)
    clock = random.Random(seed)

    texts = [random.Random(1000 * seed + b) for b in range(len(chances))]
    numbers: list[list[float]] = [[] for _ in chances]

    def right(stream: int, token: int) -> bool:
        known = numbers[stream]
        while len(known) <= token:
            known.append(texts[stream].random())
        return known[token] < chances[stream](token)

    most = [1000] * len(jobs)
    following, untold = policy.choose(jobs, most), None
    while done[0] < n_tokens:
        choice = following
        if untold is not None:
            policy.record(*untold)
        following = policy.choose(jobs, most, choice)
        accepted = []
        drafted = [n if shorter is None else min(n, shorter) for n in choice.lengths]
        for b, n in enumerate(drafted):
            a = 0
            while a < n and right(b, done[b] + a):
                a += 1
            accepted.append(a)
        ms = cost(len(jobs), choice.n)
        run.ms += ms
        run.times.append(ms)
        run.widths.append(choice.n)
        run.at.append(done[0])
        run.tokens += sum(accepted) + len(jobs)
        for b, a in enumerate(accepted):
            done[b] += a + 1
        shown = ms * clock.uniform(1 - noise, 1 + noise)
        untold = (jobs, choice, drafted, accepted, [0 if n else -1 for n in drafted], shown)
    return run


def block_cost(draft: float = 0.2, row: float = 0.015, plain: float = 10.0, crowd: float = 0.004) -> Cost:
    """A block drafter: its cost does not depend on the width. Verification grows with the rows, more in a crowd."""
    return lambda batch, n: plain * (1 + crowd * batch + (draft if n else 0) + n * (row + crowd * (batch - 1)))


def step_cost(draft: float = 0.09, row: float = 0.015, plain: float = 10.0, crowd: float = 0.004) -> Cost:
    """MTP: each drafted token costs a pass of the block."""
    return lambda batch, n: plain * (1 + crowd * batch + n * (draft + row + crowd * (batch - 1)))
