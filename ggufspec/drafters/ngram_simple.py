"""ngram-simple: continue the text as it went on after the latest earlier occurrence of its last n tokens."""

from __future__ import annotations

from .history import Tokens, key_of, last_match
from .ngram import NgramDrafter, check_range


def continuation(text: Tokens, last: int, n: int, m: int) -> list[int]:
    """Up to m tokens after the latest earlier match of the n-gram that ends in `last`.

    Index 0 is never a match and fewer than n tokens are no draft, as in llama.cpp.
    """
    c = len(text)
    if c <= n + m + 1:
        return []
    j = last_match(text, key_of(text, last, n), 1, c - n - 1)
    if j < 0 or min(m, c - j - n) < n:
        return []
    return text[j + n : min(j + n + m, c)].tolist()


class NgramSimple(NgramDrafter):
    def __init__(
        self, n_slots: int, n_ctx: int, size_n: int = 12, size_m: int = 48, min_hits: int = 1
    ) -> None:
        """`min_hits` is checked and, as in llama.cpp, has no effect on this kind."""
        check_range("--spec-ngram-simple-size-n", size_n, 1, 1024)
        check_range("--spec-ngram-simple-size-m", size_m, 1, 1024)
        check_range("--spec-ngram-simple-min-hits", min_hits, 1, None)
        super().__init__("ngram-simple", size_m, n_slots, n_ctx)
        self.size_n, self.size_m = size_n, size_m

    def continue_text(self, slot: int, text: Tokens, last: int) -> list[int]:
        return continuation(text, last, self.size_n, self.size_m)
