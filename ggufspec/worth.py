"""What drafts are worth: running acceptance by position, for many streams at once, as expected tokens a step.

Estimates with short and long memories are mixed by how well each has predicted lately: long ones are accurate while a
text stays the same, short ones follow when it changes. Arrays are [streams, drafters, memories, positions]. They are
small and all of this is done at every step, so what counts is the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEMORIES = np.array([0.6, 0.8, 0.93, 0.985])  # weight of the past at every step: 2.5 to 70 steps are remembered
FORGET_PREDICTIONS = 0.93
FAVOUR = 1.2  # log-odds by which each memory is preferred to the next shorter one: texts seldom change
PRIOR, PRIOR_TRIES = 0.6, 0.2  # chance of a first drafted token before anything is known; how many tries it counts as
LIKE_TRIES = 1.0  # how many tries a position counts as that says: like the one before it
FAVOURS = FAVOUR * np.arange(len(MEMORIES))
REFUTED = 1.5  # log-odds from which a memory is refuted by a shorter one
LEAST_CHANCE = 0.02
NEW_TRIES = 2.0  # how many tries a new stream takes over from those before it

Array = np.ndarray


class Worth:
    """Counts of some streams with some drafters, and what follows from them."""

    def __init__(self, counted: Array, score: Array):
        self.counted = counted  # [2, S, M, K, N] discounted counts: right, tried
        self.score = score  # [S, M, K] discounted log-likelihood of the outcomes that each memory predicted
        n = counted.shape[-1]
        self._weight = np.full(n, LIKE_TRIES)  # how many tries the position before counts as
        self._weight[:1] = PRIOR_TRIES
        self._chances: Array | None = None
        self._tokens: Array | None = None

    @classmethod
    def fresh(cls, n_streams: int, n_drafters: int, n_max: int) -> Worth:
        shape = (n_streams, n_drafters, len(MEMORIES))
        return cls(np.zeros((2, *shape, n_max)), np.zeros(shape))

    @property
    def right(self) -> Array:
        return self.counted[0]

    @property
    def tried(self) -> Array:
        return self.counted[1]

    def take(self, rows: Sequence[int]) -> Worth:
        """Some of the streams, in a new order."""
        index = list(rows)
        return Worth(self.counted[:, index], self.score[index])

    def softened(self) -> Worth:
        """Streams of which little is known, but that little says the same: the start of new ones."""
        keep = np.minimum(1.0, NEW_TRIES / np.maximum(self.tried, NEW_TRIES))
        return Worth(self.counted * keep, np.zeros_like(self.score))

    def joined(self, other: Worth) -> Worth:
        counted = np.concatenate((self.counted, other.counted), axis=1)
        return Worth(counted, np.concatenate((self.score, other.score)))

    def chances(self) -> Array:
        """The chance of each position to be right, given that those before it were.

        A position that was hardly tried is taken to be like the one before it.
        """
        if self._chances is None:
            right, tried = self.counted
            tries = tried + self._weight
            # p_i = (right_i + weight_i p_(i-1)) / tries_i, solved at once: all terms are positive, so nothing cancels
            shrunk = np.multiply.accumulate(self._weight / tries, axis=-1)
            grown = np.add.accumulate(right / (tries * shrunk), axis=-1)
            grown += PRIOR
            grown *= shrunk
            self._chances = grown
        return self._chances

    def record(self, streams: Sequence[int] | None, drafters: Sequence[int] | Array, outcomes: Array) -> None:
        """Outcomes of a step: counts [2, n, positions], right and tried, for n different pairs of stream and drafter.

        streams None: all of them, in order, of the only drafter.
        """
        rows = (slice(None), 0) if streams is None else (np.asarray(streams), np.asarray(drafters))
        p = np.minimum(np.maximum(self.chances()[rows], LEAST_CHANCE), 1.0 - LEAST_CHANCE)  # [n, K, N]
        told = outcomes[:, :, None]
        wrong = np.log(1.0 - p)
        likely = np.log(p)
        likely -= wrong
        likely *= told[0]
        wrong *= told[1]
        likely += wrong
        where = (slice(None), *rows)
        score = FORGET_PREDICTIONS * self.score[rows] + np.add.reduce(likely, axis=-1)
        counted = self.counted[where] * MEMORIES[:, None] + told
        _restart(counted, score)
        self.counted[where], self.score[rows] = counted, score
        self._chances = self._tokens = None

    def age(self, n_rows: int) -> None:
        """A step without drafts of the first streams: the text went on unseen. What was counted is forgotten as if
        there had been some."""
        self.counted[:, :n_rows] *= MEMORIES[:, None]
        self.score[:n_rows] *= FORGET_PREDICTIONS
        self._chances = self._tokens = None

    def tokens(self) -> Array:
        """[streams, drafters, 1 + positions]: mean tokens of a step with 0, 1, 2, ... drafted ones."""
        if self._tokens is None:
            score = self.score + FAVOURS
            weight = np.exp(score - np.maximum.reduce(score, axis=-1, keepdims=True))
            weight /= np.add.reduce(weight, axis=-1, keepdims=True)
            reached = np.multiply.accumulate(self.chances(), axis=-1)
            reached *= weight[..., None]
            out = np.empty((*reached.shape[:-2], reached.shape[-1] + 1))
            out[..., 0] = 1.0
            np.add.reduce(reached, axis=-2, out=out[..., 1:])
            self._tokens = np.add.accumulate(out, axis=-1)
        return self._tokens


def _restart(counted: Array, score: Array) -> None:
    """A memory that is clearly refuted by a shorter one remembers another text: it goes on from what that holds.

    counted [2, n, K, N] and score [n, K] are changed in place.
    """
    favoured = score + FAVOURS
    if not (np.maximum.accumulate(favoured[:, :-1], axis=1) > favoured[:, 1:] + REFUTED).any():
        return
    every = np.arange(len(score))
    for k in range(1, len(MEMORIES)):
        shorter = score[:, :k] + FAVOURS[:k]
        best = shorter.argmax(axis=1)
        is_refuted = shorter[every, best] > score[:, k] + FAVOURS[k] + REFUTED
        score[is_refuted, k] = score[is_refuted, best[is_refuted]]
        counted[:, is_refuted, k] = counted[:, is_refuted, best[is_refuted]]


def counts(n_asked: Sequence[int], n_accepted: Sequence[int], n_max: int) -> Array:
    """[2, n, n_max], right and tried, of verified drafts: the accepted tokens and the first that was not were tried."""
    asked, accepted = np.array(n_asked), np.array(n_accepted)
    ends = np.array((accepted, np.minimum(accepted + 1, asked)))
    return (np.arange(n_max) < ends[:, :, None]).astype(float)
