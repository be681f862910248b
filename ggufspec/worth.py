"""What drafts of one drafter are worth on one text: running acceptance by position, as expected tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

MEMORIES = (0.6, 0.8, 0.93, 0.985)  # weight of the past at every step: 2.5 to 70 steps are remembered
FORGET_PREDICTIONS = 0.93
FAVOUR = 1.5  # log-odds by which each memory is preferred to the next shorter one: texts seldom change
PRIOR, PRIOR_TRIES = 0.6, 0.3  # chance of a first drafted token before anything is known, and how many tries it counts
LIKE_TRIES = 1.0  # how many tries a position counts as that says: like the one before it
LEAST_CHANCE = 0.02


@dataclass
class Memory:
    """Discounted counts at one speed of forgetting."""

    keep: float
    right: list[float]
    tried: list[float]
    score: float = 0.0  # discounted log-likelihood of the outcomes it predicted

    def chances(self) -> list[float]:
        """The chance of each position to be right, given that those before it were.

        A position that was hardly tried is taken to be like the one before it.
        """
        out, before, weight = [], PRIOR, PRIOR_TRIES
        for right, tried in zip(self.right, self.tried):
            before = (right + weight * before) / (tried + weight)
            out.append(before)
            weight = LIKE_TRIES
        return out

    def record(self, n_drafted: int, n_accepted: int) -> None:
        chances = self.chances()
        likely = 0.0
        for i in range(min(n_accepted + 1, n_drafted)):
            p = min(max(chances[i], LEAST_CHANCE), 1.0 - LEAST_CHANCE)
            likely += log(p) if i < n_accepted else log(1.0 - p)
        self.score = FORGET_PREDICTIONS * self.score + likely
        for i in range(len(self.right)):
            self.right[i] *= self.keep
            self.tried[i] *= self.keep
            if i < min(n_accepted + 1, n_drafted):
                self.tried[i] += 1.0
                self.right[i] += i < n_accepted


@dataclass
class Worth:
    """Estimates with short and long memories, mixed by how well each has predicted lately.

    Long ones are accurate while a text stays the same, short ones follow when it changes.
    """

    memories: list[Memory]
    _tokens: list[float] = field(default_factory=list)  # by length, until the next record

    @classmethod
    def fresh(cls, n_max: int) -> Worth:
        return cls([Memory(keep, [0.0] * n_max, [0.0] * n_max) for keep in MEMORIES])

    @classmethod
    def like(cls, other: Worth, tries: float = 2.0) -> Worth:
        """A new text, expected to be like the texts before it; soon its own counts weigh more."""
        made = []
        for memory in other.memories:
            weights = [tries / t if t > tries else 1.0 for t in memory.tried]
            made.append(Memory(memory.keep, [r * w for r, w in zip(memory.right, weights)],
                               [t * w for t, w in zip(memory.tried, weights)]))
        return cls(made)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """A verified draft of which the first n_accepted tokens were right."""
        n_max = len(self.memories[0].right)
        for memory in self.memories:
            memory.record(min(n_drafted, n_max), min(n_accepted, n_max))
        self._tokens = []

    def tokens(self, n: int) -> float:
        """Mean number of tokens that a step with n drafted ones emits."""
        if not self._tokens:
            self._tokens = self._mixed()
        return self._tokens[min(n, len(self._tokens) - 1)]

    def _mixed(self) -> list[float]:
        scores = [memory.score + FAVOUR * k for k, memory in enumerate(self.memories)]
        weights = [exp(score - max(scores)) for score in scores]
        sums = [_cumulated(memory.chances()) for memory in self.memories]
        return [sum(w * s[n] for w, s in zip(weights, sums)) / sum(weights) for n in range(len(sums[0]))]


def _cumulated(chances: Sequence[float]) -> list[float]:
    """1, 1 + p1, 1 + p1 + p1 p2, ..."""
    out, chance = [1.0], 1.0
    for p in chances:
        chance *= p
        out.append(out[-1] + chance)
    return out
