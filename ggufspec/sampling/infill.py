"""The `infill` filter: for fill-in-the-middle, prefer ending, merge tokens that are prefixes of one another.

Source of the rule: llama.cpp's `infill` sampler. It looks at every pair of candidates, so it belongs after
`top_k`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_THRESHOLD = 0.2


@dataclass(frozen=True)
class Pieces:
    """What `infill` reads of a vocabulary."""

    pieces: Sequence[bytes]  # text of each token; control tokens are empty
    eog: frozenset[int]
    eot: int  # the token that ends a middle part (EOT, else EOS)


def infill(ids: np.ndarray, p: np.ndarray, vocabulary: Pieces) -> np.ndarray | None:
    """Indices of the candidates to keep, in order; None: only the end-of-text token remains.

    ids [n] int64, p [n] probabilities, both sorted by falling probability.
    """
    is_eog = np.array([int(token) in vocabulary.eog for token in ids])
    if 3 * p[is_eog].sum() * len(ids) > p[~is_eog].sum():
        return np.flatnonzero(is_eog)
    merged = p.copy()
    gone = np.zeros(len(ids), bool)
    pieces = [vocabulary.pieces[int(token)] for token in ids]
    for i, short in enumerate(pieces):
        for j, long in enumerate(pieces):
            if gone[i]:
                break
            if i == j or gone[j] or not short or not long.startswith(short):
                continue
            target, source = (j, i) if merged[j] > merged[i] else (i, j)
            merged[target] += merged[source]
            merged[source] = 0.0
            gone[source] = True
    keep = (merged >= FIRST_THRESHOLD) | is_eog
    n_text = int((keep & ~is_eog).sum())
    if n_text == 0:
        return None
    share = merged / merged[keep].sum()
    keep &= (share >= 1.0 / (n_text + 1)) | is_eog
    return np.flatnonzero(keep)
