"""The text of every slot on the host, kept from what the drafters observe: what n-gram drafters search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ..rows import Rows

Tokens = np.ndarray  # [n] int64


class History:
    """Tokens by slot and position. Rejected rows stand in it too until the next step overwrites them."""

    def __init__(self, n_slots: int, n_ctx: int) -> None:
        self.tokens = np.full((n_slots, n_ctx), -1, dtype=np.int64)

    def write(self, slot: int, position: int, tokens: list[int] | Tokens) -> None:
        room = self.tokens.shape[1] - position
        part = np.asarray(tokens[:room], dtype=np.int64)
        self.tokens[slot, position : position + len(part)] = part

    def observe(self, rows: Rows) -> None:
        """Copies the rows' tokens to the host (one synchronization on a GPU)."""
        numbers = torch.stack([rows.slots, rows.n_past, rows.n_rows], dim=1)
        for (slot, n_past, n_rows), tokens in zip(numbers.tolist(), rows.tokens.cpu().numpy()):
            self.write(slot, n_past, tokens[:n_rows])

    def text(self, slot: int, n_past: int) -> Tokens:
        """The evaluated tokens, as a view."""
        return self.tokens[slot, :n_past]


def last_match(text: Tokens, key: Tokens, low: int, high: int) -> int:
    """Largest j in [low, high] with text[j : j + len(key)] equal to key, or -1."""
    found = all_matches(text, key, low, high)
    return int(found[-1]) if len(found) else -1


def all_matches(text: Tokens, key: Tokens, low: int, high: int) -> np.ndarray:
    """Every j in [low, high] with text[j : j + len(key)] equal to key, ascending."""
    if high < low:
        return np.empty(0, dtype=np.int64)
    n = len(key)
    found = np.flatnonzero(text[low + n - 1 : high + n] == key[n - 1]) + low
    for i in range(n - 1):
        if not len(found):
            break
        found = found[text[found + i] == key[i]]
    return found


def key_of(text: Tokens, last: int, n: int) -> Tokens:
    """The last n-1 tokens of the text followed by `last`; needs len(text) >= n - 1."""
    return np.append(text[len(text) - n + 1 :], last)
