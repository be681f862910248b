"""ngram-cache: statistics of which token follows the last 1..4 tokens, from the text and from files.

Three tables: *context* grows with the text; *dynamic* and *static* come from `--lookup-cache-dynamic` and
`--lookup-cache-static`.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from ..errors import FileError
from .history import Tokens
from .ngram import NgramDrafter

N_DRAFT = 8
N_MAX = 4  # longest n-gram
N_STATIC = 2
# Thresholds by n-gram length 1..4: samples needed, and percent of them that the choice must have.
CONTEXT_SAMPLES, CONTEXT_PERCENT = (2, 2, 1, 1), (66, 50, 50, 50)
DYNAMIC_SAMPLES, DYNAMIC_PERCENT = (4, 3, 2, 2), (75, 66, 66, 66)
STATIC_SAMPLES, STATIC_PERCENT = 2, 50

Table = dict[tuple[int, ...], Counter[int]]


def add_text(table: Table, tokens: list[int]) -> None:
    """Count every n-gram of 1..4 tokens that has a successor inside `tokens`."""
    for n in range(1, N_MAX + 1):
        for i in range(n, len(tokens)):
            table.setdefault(tuple(tokens[i - n : i]), Counter())[tokens[i]] += 1


def best_dynamic(
    table: Table, static: Counter[int], tail: list[int], samples: tuple[int, ...], percent: tuple[int, ...]
) -> int | None:
    """The successor with the largest count (weighted by the static table) of the longest sure n-gram."""
    for n in range(min(N_MAX, len(tail)), 0, -1):
        counts = table.get(tuple(tail[-n:]))
        if not counts:
            continue
        total = counts.total()
        token = max(counts, key=lambda id: counts[id] * (100 * static[id] if id in static else 1))
        if total >= samples[n - 1] and 100 * counts[token] >= percent[n - 1] * total:
            return token
    return None


def best_static(static: Counter[int]) -> int | None:
    if static.total() < STATIC_SAMPLES:
        return None
    token, count = static.most_common(1)[0]
    return token if 100 * count >= STATIC_PERCENT * static.total() else None


def draft(
    tail: list[int], context: Table, dynamic: Table, static: Table, n_draft: int = N_DRAFT
) -> list[int]:
    """Up to n_draft tokens after `tail` (the end of the text, the last token included)."""
    text = list(tail)
    while len(text) - len(tail) < n_draft:
        known = static.get(tuple(text[-N_STATIC:]), Counter())
        token = best_dynamic(context, known, text, CONTEXT_SAMPLES, CONTEXT_PERCENT)
        if token is None:
            token = best_dynamic(dynamic, known, text, DYNAMIC_SAMPLES, DYNAMIC_PERCENT)
        if token is None:
            token = best_static(known)
        if token is None:
            break
        text.append(token)
    return text[len(tail) :]


def load_table(path: str | Path) -> Table:
    """A lookup-cache file: records of 4 int32 (n-gram padded with -1), an int32 n, n (token, count) pairs."""
    data = Path(path).read_bytes()
    table: Table = {}
    at = 0
    while at < len(data):
        if at + 20 > len(data):
            raise FileError(f"{path}: lookup cache ends inside the record at byte {at}")
        *gram, n = struct.unpack_from("<5i", data, at)
        at += 20
        if n < 0 or at + 8 * n > len(data):
            raise FileError(
                f"{path}: lookup cache record at byte {at - 20} announces {n} successors past the file's end"
            )
        pairs = struct.unpack_from(f"<{2 * n}i", data, at)
        at += 8 * n
        table[tuple(id for id in gram if id >= 0)] = Counter(dict(zip(pairs[::2], pairs[1::2])))
    return table


class NgramCache(NgramDrafter):
    def __init__(
        self, n_slots: int, n_ctx: int, static: str | Path | None = None, dynamic: str | Path | None = None
    ) -> None:
        super().__init__("ngram-cache", N_DRAFT, n_slots, n_ctx)
        self.static = load_table(static) if static else {}
        self.dynamic = load_table(dynamic) if dynamic else {}
        self.context: list[Table] = [{} for _ in range(n_slots)]
        self.size = [0] * n_slots  # tokens of the text that the context table has seen

    def index(self, slot: int, prompt: Tokens) -> None:
        if len(prompt) < self.size[slot]:  # the text was shortened: its counts would be of text that is gone
            self.forget(slot)

    def continue_text(self, slot: int, text: Tokens, last: int) -> list[int]:
        # Counting does not reach back across the boundary to the previous call, as in llama.cpp.
        if self.size[slot] < len(text) + 1:
            add_text(self.context[slot], [*text[self.size[slot] :].tolist(), last])
            self.size[slot] = len(text) + 1
        tail = [*text[-N_MAX:].tolist(), last]
        return draft(tail, self.context[slot], self.dynamic, self.static)

    def forget(self, slot: int) -> None:
        self.context[slot] = {}
        self.size[slot] = 0
