"""Tie sampling parameters to a vocabulary: end-of-text biases, DRY breakers, infill pieces, range checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Protocol

from ggufspec.errors import RequestError
from ggufspec.sampling.dry import find_breakers
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
    if params.dries or "infill" in params.samplers:
        texts = [vocabulary.piece(token) for token in range(vocabulary.n_vocab)]
        if params.dries:
            breakers = find_breakers(
                params.dry_sequence_breakers,
                texts,
                lambda text: vocabulary.encode(text, add_special=False, parse_special=False),
            )
        if "infill" in params.samplers:
            eog = frozenset(vocabulary.eog)
            if not eog:
                raise RequestError("the infill sampler needs a model with an end-of-text token; this one has none")
            eot = getattr(vocabulary, "eot", None)
            pieces = Pieces(texts, eog, min(eog) if eot is None else eot)
    values = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    return replace(BoundParams(**values), logit_bias=tuple(bias.items()), breakers=breakers, pieces=pieces)
