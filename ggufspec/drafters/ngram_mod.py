"""ngram-mod: one hash pool for all slots that remembers which token followed an n-gram (last writer wins).

The pool is shared on purpose: what one stream wrote helps another. Drafts may therefore differ between slots;
the text never does, for a draft is only a guess.
"""

from __future__ import annotations

import logging

import numpy as np

from .history import Tokens, key_of
from .ngram import NgramDrafter, check_range

log = logging.getLogger(__name__)

POOL_SIZE = 4 << 20
MULTIPLIER = 6364136223846793005
MASK = (1 << 64) - 1
EMPTY = -1
FULL = 0.25  # a pool fuller than this after a prompt is cleared
CHUNK = 32  # new text is entered once it is longer than this
POOR = 0.25  # acceptance below this share...
N_POOR = 5  # ...so many times in a row clears the pool


def bucket(tokens: list[int]) -> int:
    r = 0
    for token in tokens:
        r = (r * MULTIPLIER + token) & MASK
    return r % POOL_SIZE


class Pool:
    """n-gram hash -> the token that followed; EMPTY where none did."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.next = np.full(POOL_SIZE, EMPTY, dtype=np.int32)

    def clear(self) -> None:
        self.next.fill(EMPTY)

    def share_used(self) -> float:
        return np.count_nonzero(self.next != EMPTY) / POOL_SIZE

    def enter(self, text: Tokens, low: int, high: int) -> None:
        """Enter the n-grams that start at low..high-1; each needs a successor: high + n <= len(text)."""
        count = high - low
        if count <= 0:
            return
        tokens = text[low : high + self.n].astype(np.uint64)
        r = np.zeros(count, dtype=np.uint64)
        for i in range(self.n):
            r = r * np.uint64(MULTIPLIER) + tokens[i : i + count]
        self.next[(r % np.uint64(POOL_SIZE)).astype(np.int64)] = text[low + self.n : high + self.n]

    def follow(self, window: list[int], n_max: int) -> list[int]:
        """Tokens that follow the window of n tokens, one after another, until an entry is empty."""
        text = list(window)
        for _ in range(n_max):
            token = int(self.next[bucket(text[-self.n :])])
            if token == EMPTY:
                break
            text.append(token)
        return text[self.n :]


class NgramMod(NgramDrafter):
    def __init__(self, n_slots: int, n_ctx: int, n_match: int = 24, n_min: int = 48, n_max: int = 64) -> None:
        check_range("--spec-ngram-mod-n-match", n_match, 1, 1024)
        check_range("--spec-ngram-mod-n-min", n_min, 0, 1024)
        check_range("--spec-ngram-mod-n-max", n_max, 0, 1024)
        if n_match < 16:
            log.warning("--spec-ngram-mod-n-match %d is below 16: short n-grams draft poorly", n_match)
        super().__init__("ngram-mod", n_max, n_slots, n_ctx)
        self.n_match, self.n_min, self.size = n_match, n_min, n_max
        self.pool = Pool(n_match)
        self.entered = [0] * n_slots  # n-grams that start before here are in the pool
        self.n_poor = [0] * n_slots

    def index(self, slot: int, prompt: Tokens) -> None:
        self.entered[slot] = 0
        if len(prompt) < self.n_match:
            return
        self._enter(slot, prompt)
        if self.pool.share_used() > FULL:
            self.pool.clear()

    def _enter(self, slot: int, text: Tokens) -> None:
        self.pool.enter(text, self.entered[slot], len(text) - self.n_match)
        self.entered[slot] = len(text) - self.n_match

    def continue_text(self, slot: int, text: Tokens, last: int) -> list[int]:
        if len(text) < self.n_match:
            return []
        if self.entered[slot] + CHUNK < len(text):
            self._enter(slot, text)
        draft = self.pool.follow(key_of(text, last, self.n_match).tolist(), self.size)
        # The bound holds only where an empty entry ended the draft: n_min above n_max must not silence it.
        return [] if len(draft) < min(self.n_min, self.size) else draft

    def learn(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.n_poor[slot] = self.n_poor[slot] + 1 if n_accepted / n_drafted < POOR else 0
        if self.n_poor[slot] >= N_POOR:
            self.pool.clear()
            self.n_poor[slot] = 0
            self.entered[slot] = 0

    def forget(self, slot: int) -> None:
        self.entered[slot] = 0
        self.n_poor[slot] = 0
