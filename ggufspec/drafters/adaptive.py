"""`--spec-draft-n-max auto`: draft as many tokens as measured acceptance pays for.

A step with n drafted tokens emits 1 + p1 + p1 p2 + ... tokens (p_i: the chance that token i is right if those before
it were) and takes some milliseconds. The length with the most tokens per millisecond is used. Both sides are
measured as the run goes on: chances per slot, since texts differ, times for all slots together. Whatever length is
chosen, the text is the same; only its speed depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AUTO_N_MAX = 8  # the longest draft tried when the drafter itself has no limit
FORGET = 0.97  # weight of the past after each further try of a position
PRIOR_CHANCE, PRIOR_TRIES = 0.7, 4.0  # what a position is worth before it was tried
PROBE_EVERY = 24  # steps between two looks one token further than chosen
N_TIMED = 2  # a length's first steps compile or capture; their times do not count


@dataclass
class Chances:
    """The chance of each drafted position to be right, given that all before it were; recent steps count more."""

    right: list[float]
    tried: list[float]

    @classmethod
    def fresh(cls, n_max: int) -> Chances:
        return cls([PRIOR_CHANCE * PRIOR_TRIES] * n_max, [PRIOR_TRIES] * n_max)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        for i in range(min(n_accepted + 1, n_drafted, len(self.tried))):
            self.right[i] = FORGET * self.right[i] + (i < n_accepted)
            self.tried[i] = FORGET * self.tried[i] + 1.0

    def tokens(self, n: int) -> float:
        """Mean number of tokens that a step with n drafted ones emits."""
        total = chance = 1.0
        for right, tried in zip(self.right[:n], self.tried[:n]):
            chance *= right / tried
            total += chance
        return total


@dataclass
class StepTimes:
    """Milliseconds of a step by draft length; lengths without a measurement lie on the line through the others."""

    mean: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def record(self, n: int, ms: float) -> None:
        self.seen[n] = self.seen.get(n, 0) + 1
        if self.seen[n] <= N_TIMED:
            return
        self.mean[n] = ms if n not in self.mean else 0.9 * self.mean[n] + 0.1 * ms

    def of(self, n: int) -> float:
        """Expected milliseconds; 1 for every length before anything was measured."""
        if n in self.mean or not self.mean:
            return self.mean.get(n, 1.0)
        if len(self.mean) == 1:
            return next(iter(self.mean.values()))
        xs, ys = list(self.mean), list(self.mean.values())
        x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys)) / sum((x - x0) ** 2 for x in xs)
        return max(y0 + slope * (n - x0), 0.5 * min(ys))  # drafting more is never taken to be free of all cost


class DraftLength:
    """The draft length of every slot of an engine."""

    def __init__(self, n_max: int) -> None:
        self.n_max = min(n_max, AUTO_N_MAX)
        self.times = StepTimes()
        self.slots: dict[int, Chances] = {}
        self.steps: dict[int, int] = {}

    def start(self, slot: int) -> None:
        """Another text begins in the slot."""
        self.slots[slot] = Chances.fresh(self.n_max)
        self.steps[slot] = 0

    def best(self, slot: int) -> int:
        chances = self.slots[slot]
        return max(range(self.n_max + 1), key=lambda n: chances.tokens(n) / self.times.of(n))

    def choose(self, slot: int) -> int:
        """Tokens to draft now: the best length, now and then one more to learn what it would give.

        The first steps time the longest and the shortest draft: with two points the line has a slope.
        """
        if slot not in self.slots:
            self.start(slot)
        for n in (self.n_max, 1):
            if n not in self.times.mean:
                return n
        self.steps[slot] += 1
        n = self.best(slot)
        return min(n + 1, self.n_max) if self.steps[slot] % PROBE_EVERY == 0 else n

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        """A slot's verified draft."""
        if slot in self.slots:
            self.slots[slot].record(n_drafted, n_accepted)

    def record_step(self, n: int, ms: float) -> None:
        """A step of all running slots, the longest draft of which was n."""
        self.times.record(n, ms)
