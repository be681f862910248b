"""ngram-map-k and ngram-map-k4v: an index of n-grams, with what became of the drafts made from each.

map-k drafts what followed the match, at most as many tokens as were right last time. map-k4v counts up to
four different continuations of a key and drafts only when one of them clearly leads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .history import Tokens, all_matches, key_of, last_match
from .ngram import NgramDrafter, check_range

N_BUCKETS = 262144
MULTIPLIER = np.uint32(2654435761)
MAX_COUNT = 16380
MAX_VALUES = 4


@dataclass
class Value:
    """One continuation of a key, named by a position where it stands in the text."""

    position: int
    n_accepted: int  # the most that the next draft from it may have
    count: int = 0


@dataclass
class Key:
    position: int
    hits: int = 0
    counted_to: int = 0  # continuations are counted for matches up to here
    values: list[Value] = field(default_factory=list)


def buckets_of(text: Tokens, low: int, high: int, n: int) -> np.ndarray:
    """Buckets of the n-grams at positions low..high: a 32-bit multiplicative hash modulo the table's size."""
    count = high - low + 1
    tokens = text[low : high + n].astype(np.uint32)
    h = np.zeros(count, dtype=np.uint32)
    for i in range(n):
        h = h * MULTIPLIER + tokens[i : i + count]
    return h % np.uint32(N_BUCKETS)


class Index:
    """The index of one slot's text. Positions are found by bucket, then in the part not entered yet."""

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self.table = np.zeros(N_BUCKETS, dtype=np.uint32)  # 0 = empty: position 0 is never indexed
        self.last = 0  # positions up to here are entered
        self.begin_size = 0  # length of the prompt
        self.seen = 0  # length of the text at the last search
        self.keys: list[Key] = []

    def begin(self, size: int, text_changed: bool) -> None:
        """A prompt of `size` tokens is complete; forget what lies in text that is gone."""
        if text_changed:
            self.__init__(self.n, self.m)  # type: ignore[misc]
        elif size < self.seen:
            bound = self.begin_size if self.begin_size <= size else max(0, size - self.n - self.m)
            self.table[self.table >= bound] = 0
            self.last = max(0, bound - 1)
            kept = []
            for key in self.keys:
                if key.position >= bound:
                    continue
                key.values = [value for value in key.values if value.position < bound]
                key.counted_to = min(key.counted_to, self.last)
                if key.values:
                    kept.append(key)
            self.keys = kept
            self.seen = size
        self.begin_size = size

    def fresh_ranges(self, c: int) -> list[tuple[int, int]]:
        """Ranges [low, high] not yet entered: those inside the prompt, then those after it."""
        reach = self.n + self.m + 1
        return [
            (self.last + 1, self.begin_size - reach),
            (max(self.begin_size, self.last) + 1, c - reach),
        ]

    def find(self, text: Tokens, key: Tokens) -> int:
        """A position where the key stands, or 0; then enter what is new. Needs len(text) >= 2n + m."""
        c, n, m = len(text), self.n, self.m
        match = 0
        j = int(self.table[buckets_of(key, 0, 0, n)[0]])
        if 0 < j < c - n - m - 1 and np.array_equal(text[j : j + n], key):
            match = j
        ranges = self.fresh_ranges(c)
        for low, high in ranges:
            if match == 0:
                match = max(0, last_match(text, key, low, high))
        for low, high in ranges:
            self._enter(text, low, high)
        self.last = max(self.last, c - n - m - 1)
        self.seen = c
        return match

    def _enter(self, text: Tokens, low: int, high: int) -> None:
        if high < low:
            return
        positions = np.arange(high, low - 1, -1)  # descending: of equal buckets the latest position gets in
        buckets, first = np.unique(buckets_of(text, low, high, self.n)[::-1], return_index=True)
        empty = self.table[buckets] == 0
        self.table[buckets[empty]] = positions[first[empty]]

    def key_record(self, text: Tokens, key: Tokens, position: int) -> Key:
        for record in self.keys:
            if np.array_equal(text[record.position : record.position + self.n], key):
                return record
        self.keys.append(Key(position))
        return self.keys[-1]


def count_values(index: Index, text: Tokens, key: Tokens, record: Key, match: int) -> None:
    """Count the continuations of the key at its occurrences from where counting stopped through `match`."""
    for i in all_matches(text, key, record.counted_to, match).tolist():
        start = i + index.n
        gram = text[start : start + index.m]
        for value in record.values:
            if np.array_equal(text[value.position : value.position + index.m], gram):
                break
        else:
            if len(record.values) == MAX_VALUES:
                continue
            value = Value(start, index.m)
            record.values.append(value)
        value.count = min(value.count + 1, MAX_COUNT)
    record.counted_to = match


def leading_value(values: list[Value]) -> Value | None:
    """The most frequent continuation (first on ties), unless the others together come near it."""
    best = max(values, key=lambda value: value.count)
    others = sum(value.count for value in values) - best.count
    return None if others > 0 and best.count < 2 * others else best


class NgramMap(NgramDrafter):
    def __init__(
        self,
        n_slots: int,
        n_ctx: int,
        size_n: int = 12,
        size_m: int = 48,
        min_hits: int = 1,
        *,
        values: bool = False,
    ) -> None:
        """`values`: False is ngram-map-k (where `min_hits` has no effect, as in llama.cpp), True map-k4v."""
        name = "ngram-map-k4v" if values else "ngram-map-k"
        check_range(f"--spec-{name}-size-n", size_n, 1, 1024)
        check_range(f"--spec-{name}-size-m", size_m, 1, 1024)
        check_range(f"--spec-{name}-min-hits", min_hits, 1, None)
        super().__init__(name, size_m, n_slots, n_ctx)
        self.size_n, self.size_m, self.min_hits, self.values = size_n, size_m, min_hits, values
        self.indexes = [Index(size_n, size_m) for _ in range(n_slots)]
        self.indexed: list[Tokens] = [np.empty(0, dtype=np.int64)] * n_slots  # the text indexed
        self.open: dict[int, Value] = {}  # slot -> the value its open draft came from

    def index(self, slot: int, prompt: Tokens) -> None:
        index, old = self.indexes[slot], self.indexed[slot]
        n = min(len(old), len(prompt))
        index.begin(len(prompt), text_changed=not np.array_equal(old[:n], prompt[:n]))
        self.indexed[slot] = prompt.copy()

    def continue_text(self, slot: int, text: Tokens, last: int) -> list[int]:
        self.open.pop(slot, None)
        n, m, index = self.size_n, self.size_m, self.indexes[slot]
        if len(text) < 2 * n + m:
            return []
        key = key_of(text, last, n)
        match = index.find(text, key)
        self.indexed[slot] = text.copy()
        if match == 0:
            return []
        record = index.key_record(text, key, match)
        record.hits = min(record.hits + 1, MAX_COUNT)
        if not self.values:
            if not record.values:
                record.values.append(Value(record.position, m))  # one slot: whatever follows the match
            value: Value | None = record.values[0]
        elif record.hits < self.min_hits:
            return []
        else:
            count_values(index, text, key, record, match)
            value = leading_value(record.values)
        if value is None:
            return []
        self.open[slot] = value
        return text[match + n : match + n + min(m, value.n_accepted)].tolist()

    def learn(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        value = self.open.pop(slot, None)
        if value is not None:
            value.n_accepted = n_accepted

    def forget(self, slot: int) -> None:
        self.open.pop(slot, None)
        self.indexes[slot] = Index(self.size_n, self.size_m)
        self.indexed[slot] = np.empty(0, dtype=np.int64)
