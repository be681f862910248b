"""Slot states of earlier requests, kept in host memory under a byte budget (`--cache-ram`).

An entry is a sequence of tokens and whatever the engine needs to stand at its end again. A later prompt
that begins like an entry takes it out of the cache and into a slot. The cache knows nothing of what a
state is: it compares tokens, counts bytes and forgets the oldest.

A recurrent state cannot be cut at any position. An entry says where it can: `cuts=None` means anywhere
(attention only); otherwise only at its end and at the positions in `cuts` (checkpoints).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# An entry of which less than this share would be kept is not worth taking: the slot it would be
# put into would throw most of it away (llama.cpp's figure).
MIN_KEPT_SHARE = 0.25


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    first = int(np.argmax(differs))
    return first if differs[first] else n


@dataclass(frozen=True)
class Entry:
    tokens: np.ndarray  # [n] int32
    state: Any  # opaque; what the engine restores from
    n_bytes: int  # of state, checkpoints included
    cuts: tuple[int, ...] | None = None  # positions at which the state can be cut; None: at any

    def usable(self, prompt: Sequence[int] | np.ndarray) -> int:
        """How many leading tokens of `prompt` this entry saves; at most `len(prompt) - 1`.

        The last token of a prompt is always evaluated again, because its logits are needed.
        """
        shared = common_prefix(self.tokens, prompt)
        limit = min(shared, max(len(prompt) - 1, 0))
        if self.cuts is None:
            return limit
        if shared == len(self.tokens) <= limit:
            return shared
        return max((cut for cut in self.cuts if cut <= limit), default=0)

    def covers(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """True if this entry can stand where `tokens` end: nothing is lost without a state of their own."""
        n = len(tokens)
        if n > len(self.tokens) or common_prefix(self.tokens, tokens) < n:
            return False
        return n == len(self.tokens) or self.cuts is None or n in self.cuts


class PromptCache:
    """Least recently saved goes first; `limit_bytes` -1 is no limit, 0 keeps nothing.

    Not thread-safe: it belongs to the engine's thread.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # oldest first
        self._next_key = 0
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache: `cache or default` must not replace it

    @property
    def entries(self) -> list[Entry]:
        """Oldest first."""
        return list(self._entries.values())

    @property
    def n_tokens(self) -> int:
        return sum(len(entry.tokens) for entry in self._entries.values())

    def wants(self, tokens: Sequence[int] | np.ndarray, n_bytes: int = 0) -> bool:
        """False if saving these tokens would be refused: ask before paying for the copy of a state."""
        if self.limit_bytes == 0 or len(tokens) == 0:
            return False
        if 0 <= self.limit_bytes < n_bytes:
            return False
        return not any(entry.covers(tokens) for entry in self._entries.values())

    def save(
        self,
        tokens: Sequence[int] | np.ndarray,
        state: Any,
        n_bytes: int,
        cuts: Sequence[int] | None = None,
    ) -> bool:
        """Keep a state; False if it was refused (an entry already stands for it, or it exceeds the budget).

        Entries that are prefixes of the new one go: whatever they could save, it saves too. With `cuts` a
        prefix stays unless the new entry can be cut where the prefix ends.
        """
        if n_bytes < 0:
            raise ValueError(f"a state cannot have {n_bytes} bytes")
        if not self.wants(tokens, n_bytes):
            return False
        at = None if cuts is None else tuple(sorted(set(cuts)))
        new = Entry(np.array(tokens, dtype=np.int32), state, n_bytes, at)
        for key, entry in list(self._entries.items()):
            if new.covers(entry.tokens):
                self._drop(key)
        while self.limit_bytes > 0 and self.n_bytes + n_bytes > self.limit_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[self._next_key] = new
        self._next_key += 1
        self.n_bytes += n_bytes
        return True

    def take(
        self, prompt: Sequence[int] | np.ndarray, slot_keeps: int = 0, slot_len: int = 0
    ) -> Entry | None:
        """Take out the entry that saves most of `prompt`, or None if the slot's own content is as good.

        `slot_keeps` of the slot's `slot_len` tokens could be reused without the cache. An entry must beat the
        slot in tokens saved and in the share of itself that is kept, and at least a quarter must be kept.
        """
        best_key = None
        best_saved, best_share = slot_keeps, slot_keeps / slot_len if slot_len else 0.0
        for key, entry in self._entries.items():
            saved = entry.usable(prompt)
            share = saved / len(entry.tokens)
            if share >= MIN_KEPT_SHARE and saved > best_saved and share >= best_share:
                best_key, best_saved, best_share = key, saved, share
        return None if best_key is None else self._drop(best_key)

    def clear(self) -> None:
        self._entries.clear()
        self.n_bytes = 0

    def _drop(self, key: int) -> Entry:
        entry = self._entries.pop(key)
        self.n_bytes -= entry.n_bytes
        return entry
