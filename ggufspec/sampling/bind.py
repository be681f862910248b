"""Tie sampling parameters to a vocabulary: end-of-text biases, DRY breakers, infill pieces, range checks."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from ggufspec.errors import RequestError
from ggufspec.sampling.dry import Breakers, find_breakers
from ggufspec.sampling.infill import Pieces
from ggufspec.sampling.params import BoundParams, SamplingParams


class Vocabulary(Protocol):
    """What sampling and grammars read of a tokenizer."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog(self) -> Collection[int]: ...
    def piece(self, token: int) -> bytes: ...
    def encode(self, text: str, *, add_special: bool = ..., parse_special: bool = ...) -> Sequence[int]: ...


MAX_KEPT = 64  # sets of DRY breakers remembered for a vocabulary


@dataclass
class _Tables:
    """What was read of a whole vocabulary: tenths of a second for a large one, so it is kept. Safe to share."""

    pieces: list[bytes]
    breakers: dict[tuple[str, ...], Breakers] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def find(self, texts: tuple[str, ...], vocabulary: Vocabulary) -> Breakers:
        found = self.breakers.get(texts)
        if found is None:
            found = find_breakers(
                texts, self.pieces, lambda text: vocabulary.encode(text, add_special=False, parse_special=False)
            )
            with self.lock:
                self.breakers[texts] = found
                while len(self.breakers) > MAX_KEPT:
                    del self.breakers[next(iter(self.breakers))]
        return found


_tables: weakref.WeakKeyDictionary[Any, _Tables] = weakref.WeakKeyDictionary()


def _read(vocabulary: Vocabulary) -> _Tables:
    found = _tables.get(vocabulary)
    if found is None:
        pieces = [vocabulary.piece(token) for token in range(vocabulary.n_vocab)]
        found = _tables.setdefault(vocabulary, _Tables(pieces))
    return found


def reads_vocabulary(params: SamplingParams) -> bool:
    """Whether the first `bind` of such parameters reads the whole vocabulary: better done beside the engine."""
    return params.dries or "infill" in params.samplers


def bind(params: SamplingParams, vocabulary: Vocabulary) -> BoundParams:
    """`params` with a drawn seed, `ignore_eos` turned into biases, and the tables that dry and infill read.

    RequestError if a biased token is outside the vocabulary.
    """
    params = params.with_seed()
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:
        if token >= vocabulary.n_vocab:
            raise RequestError(f"logit_bias: token {token} is outside the vocabulary of {vocabulary.n_vocab} tokens")
        bias[token] = bias.get(token, 0.0) + value
    if params.ignore_eos:
        bias |= {token: -math.inf for token in vocabulary.eog}
    breakers = pieces = None
    if reads_vocabulary(params):
        tables = _read(vocabulary)
        if params.dries:
            breakers = tables.find(params.dry_sequence_breakers, vocabulary)
        if "infill" in params.samplers:
            eog = frozenset(vocabulary.eog)
            if not eog:
                raise RequestError("the infill sampler needs a model with an end-of-text token; this one has none")
            eot = getattr(vocabulary, "eot", None)
            pieces = Pieces(tables.pieces, eog, min(eog) if eot is None else eot)
    values = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    return replace(BoundParams(**values), logit_bias=tuple(bias.items()), breakers=breakers, pieces=pieces)
