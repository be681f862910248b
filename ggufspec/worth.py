"""What drafts are worth: running acceptance by position, for many streams at once, as expected tokens a step.

Estimates with short and long memories are mixed by how well each has predicted lately: long ones are accurate while a
text stays the same, short ones follow when it changes. Arrays are [streams, drafters, memories, positions].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEMORIES = np.array([0.6, 0.8, 0.93, 0.985])  # weight of the past at every step: 2.5 to 70 steps are remembered
FORGET_PREDICTIONS = 0.93
FAVOUR = 1.2  # log-odds by which each memory is preferred to the next shorter one: texts seldom change
PRIOR, PRIOR_TRIES = 0.6, 0.2  # chance of a first drafted token before anything is known; how many tries it counts as
LIKE_TRIES = 1.0  # how many tries a position counts as that says: like the one before it
REFUTED = 1.5  # log-odds from which a memory is refuted by a shorter one
LEAST_CHANCE = 0.02
NEW_TRIES = 2.0  # how many tries a new stream takes over from those before it

Array = np.ndarray


class Worth:
    """Counts of some streams with some drafters, and what follows from them."""

    def __init__(self, right: Array, tried: Array, score: Array):
        self.right, self.tried = right, tried  # discounted counts
        self.score = score  # [S, M, K] discounted log-likelihood of the outcomes that each memory predicted
        self._chances: Array | None = None
        self._tokens: Array | None = None

    @classmethod
    def fresh(cls, n_streams: int, n_drafters: int, n_max: int) -> Worth:
        shape = (n_streams, n_drafters, len(MEMORIES))
        return cls(np.zeros((*shape, n_max)), np.zeros((*shape, n_max)), np.zeros(shape))

    def take(self, rows: Sequence[int]) -> Worth:
        """Some of the streams, in a new order."""
        index = list(rows)
        return Worth(self.right[index], self.tried[index], self.score[index])

    def softened(self) -> Worth:
        """Streams of which little is known, but that little says the same: the start of new ones."""
        keep = np.minimum(1.0, NEW_TRIES / np.maximum(self.tried, NEW_TRIES))
        return Worth(self.right * keep, self.tried * keep, np.zeros_like(self.score))

    def joined(self, other: Worth) -> Worth:
        pairs = ((self.right, other.right), (self.tried, other.tried), (self.score, other.score))
        return Worth(*(np.concatenate(pair) for pair in pairs))

    def chances(self) -> Array:
        """The chance of each position to be right, given that those before it were.

        A position that was hardly tried is taken to be like the one before it.
        """
        if self._chances is None:
            out = np.empty_like(self.right)
            before, weight = np.full(self.right.shape[:-1], PRIOR), PRIOR_TRIES
            for i in range(self.right.shape[-1]):
                before = (self.right[..., i] + weight * before) / (self.tried[..., i] + weight)
                out[..., i] = before
                weight = LIKE_TRIES
            self._chances = out
        return self._chances

    def record(self, streams: Sequence[int], drafters: Sequence[int] | Array, tried: Array, right: Array) -> None:
        """Outcomes of a step: counts [n, positions] for n different pairs of stream and drafter."""
        rows = np.asarray(streams), np.asarray(drafters)
        p = np.clip(self.chances()[rows], LEAST_CHANCE, 1.0 - LEAST_CHANCE)  # [n, K, N]
        likely = right[:, None] * np.log(p) + (tried - right)[:, None] * np.log(1.0 - p)
        self.score[rows] = FORGET_PREDICTIONS * self.score[rows] + likely.sum(axis=-1)
        self.right[rows] = MEMORIES[:, None] * self.right[rows] + right[:, None]
        self.tried[rows] = MEMORIES[:, None] * self.tried[rows] + tried[:, None]
        self._restart(rows)
        self._chances = self._tokens = None

    def _restart(self, rows: tuple[Array, Array]) -> None:
        """A memory that is clearly refuted by a shorter one remembers another text: it goes on from what that holds."""
        right, tried, score = self.right[rows], self.tried[rows], self.score[rows]
        every = np.arange(len(score))
        for k in range(1, len(MEMORIES)):
            shorter = score[:, :k] + FAVOUR * np.arange(k)
            best = shorter.argmax(axis=1)
            is_refuted = shorter[every, best] > score[:, k] + FAVOUR * k + REFUTED
            for values in (right, tried, score):
                values[is_refuted, k] = values[is_refuted, best[is_refuted]]
        self.right[rows], self.tried[rows], self.score[rows] = right, tried, score

    def age(self) -> None:
        """A step without drafts: the text went on unseen. What was counted is forgotten as if there had been some."""
        self.right, self.tried = MEMORIES[:, None] * self.right, MEMORIES[:, None] * self.tried
        self.score = FORGET_PREDICTIONS * self.score
        self._chances = self._tokens = None

    def tokens(self) -> Array:
        """[streams, drafters, 1 + positions]: mean tokens of a step with 0, 1, 2, ... drafted ones."""
        if self._tokens is None:
            score = self.score + FAVOUR * np.arange(len(MEMORIES))
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            drafted = (weight[..., None] * np.cumprod(self.chances(), axis=-1)).sum(axis=-2).cumsum(axis=-1)
            self._tokens = 1.0 + np.concatenate([np.zeros((*drafted.shape[:-1], 1)), drafted], axis=-1)
        return self._tokens


def counts(n_asked: Sequence[int], n_accepted: Sequence[int], n_max: int) -> tuple[Array, Array]:
    """(tried, right) [n, n_max] of verified drafts: the accepted tokens and the first that was not were tried."""
    asked, accepted = np.asarray(n_asked)[:, None], np.asarray(n_accepted)[:, None]
    position = np.arange(n_max)
    return (position < np.minimum(accepted + 1, asked)).astype(float), (position < accepted).astype(float)
