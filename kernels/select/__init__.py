"""Choosing tokens: over the last dimension, the lower id first on ties."""

from torch import Tensor

from ggufspec.kernels.select.chains import confidences, markov_chain, markov_tokens, n_passing, selector_walk
from ggufspec.kernels.select.rooms import room

__all__ = [
    "argmax", "confidences", "log_probability", "log_softmax", "markov_chain", "markov_tokens", "n_passing",
    "selector_walk", "top_k",
]  # fmt: skip


def argmax(x: Tensor) -> Tensor:
    """x [.., V] to int64 [..]: the first maximum."""
    return room(x).argmax(x)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x [.., V] float32 to (values, ids int64) [.., k], descending; the lower id first among equals. k <=
    V."""
    return room(x).top_k(x, k)


def log_softmax(x: Tensor) -> Tensor:
    """x [.., V] to float32 log-probabilities of the same shape."""
    return room(x).log_softmax(x)


def log_probability(x: Tensor, ids: Tensor) -> Tensor:
    """x [.., V], ids [.., m] int64 to the log-probabilities [.., m] of these ids alone."""
    return room(x).log_probability(x, ids)
