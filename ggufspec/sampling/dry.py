"""DRY ("don't repeat yourself"): penalize the token that would continue a repetition of the recent text.

Source of the rule: llama.cpp's `dry` sampler, restated in docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20
_FLOAT_MAX_LOG = 88.7228391  # ln of the largest float32: llama.cpp keeps base**exponent below it


@dataclass(frozen=True)
class Breakers:
    """Sequence breakers as tokens: head token -> the tails (possibly empty) that must follow it."""

    tails: dict[int, tuple[tuple[int, ...], ...]]

    def is_single(self, token: int) -> bool:
        return () in self.tails.get(token, ())


def find_breakers(
    breakers: Sequence[str], pieces: Sequence[bytes], tokenize: Callable[[str], Sequence[int]]
) -> Breakers:
    """The tokens at which a breaker begins.

    A token is a head if its text contains the breaker (empty tail), or ends with a prefix of it; then the
    tokens of the rest (at most 20) must follow. Breakers are cut to 40 bytes.
    """
    tails: dict[int, list[tuple[int, ...]]] = {}
    # one pass in C over all texts: few tokens hold a breaker's first byte, and vocabularies are large
    letters = np.frombuffer(b"".join(pieces), np.uint8)
    ends = np.cumsum([len(piece) for piece in pieces])
    for breaker in breakers:
        text = breaker.encode()[:MAX_BREAKER_BYTES]
        if not text:
            continue
        found = np.searchsorted(ends, np.flatnonzero(letters == text[0]), side="right")
        for token in np.unique(found).tolist():
            piece = pieces[token]
            if text in piece:
                _add(tails, token, ())
                continue
            at = piece.find(text[:1])
            while at >= 0:
                n = len(piece) - at
                if piece[at:] == text[:n]:
                    rest = text[n:].decode(errors="replace")
                    _add(tails, token, tuple(tokenize(rest))[:MAX_TAIL_TOKENS])
                at = piece.find(text[:1], at + 1)
    return Breakers({token: tuple(found) for token, found in tails.items()})


def _add(tails: dict[int, list[tuple[int, ...]]], token: int, tail: tuple[int, ...]) -> None:
    found = tails.setdefault(token, [])
    if tail not in found:
        found.append(tail)


def repetition_limit(newest_first: Sequence[int], breakers: Breakers) -> int:
    """Tokens since the latest breaker: a repetition does not reach across it."""
    for i, token in enumerate(newest_first):
        longest = -1
        for tail in breakers.tails.get(token, ()):
            n = len(tail)
            if longest < n <= i and all(newest_first[i - 1 - j] == tail[j] for j in range(n)):
                longest = n
        if longest >= 0:
            return i - longest
    return len(newest_first)


def match_lengths(newest_first: Sequence[int]) -> list[int]:
    """Z-algorithm: entry k is the length of the match of the history's end with its part that ends k tokens
    back.
    """
    n = len(newest_first)
    z = [0] * n
    left = right = 0  # the match [left, right) that reaches furthest
    for k in range(1, n):
        length = min(right - k, z[k - left]) if k < right else 0
        while k + length < n and newest_first[length] == newest_first[k + length]:
            length += 1
        z[k] = length
        if k + length > right:
            left, right = k, k + length
    return z


def dry_penalties(
    history: Sequence[int], multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> dict[int, float]:
    """token -> what to subtract from its logit. `history`: the last `dry_penalty_last_n` tokens, oldest
    first.
    """
    if len(history) <= allowed_length:
        return {}
    newest_first = list(reversed(history))
    limit = repetition_limit(newest_first, breakers)
    if limit < allowed_length:
        return {}
    longest: dict[int, int] = {}
    for k, length in enumerate(match_lengths(newest_first)):
        length = min(length, limit)
        if k > 0 and length >= allowed_length:
            token = newest_first[k - 1]  # the token that followed the earlier match
            longest[token] = max(longest.get(token, 0), length)
    max_exponent = int(_FLOAT_MAX_LOG / log(base)) if base > 1.000001 else 0
    penalties = {}
    for token, length in longest.items():
        if not breakers.is_single(token):
            exponent = length - allowed_length
            if max_exponent > 0:
                exponent = min(exponent, max_exponent)
            penalties[token] = multiplier * base**exponent
    return penalties
