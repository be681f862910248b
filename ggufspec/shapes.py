"""Shapes of captured steps: which graph serves a step that has none of its own, and what going without costs.

A capture takes as long as some ten steps, and all streams wait for it. A step may as well go through the graph of more
entries (the rest is padding), of fewer drafted tokens, or of more candidates to sample from: its text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .capture import entry_counts
from .choose import Sampled
from .kernels.matmul.cuda import NARROW_TOKENS

# Only to compare shapes: a step takes about as long as so many rows more than it has,
ROWS_BEFORE = 16
EAGER_ROWS = 150  # and at least as many if its launches come one by one;
RIGHT = 0.7  # and a drafted token is right as often as this.
MOST_CANDIDATES, MOST_BIASES = 256, 64  # graphs with more are too slow for those who need fewer
CAPTURE_STEPS = 32.0  # a graph is captured in the time of some ten; streams that wait for it notice
LEAST_LOSS = 0.25  # of a step that had to be another: what it should have been is captured some day
N_FIRST = 4  # lengths that all numbers of streams have before others follow


class Shape(NamedTuple):
    """All that a graph's arguments and constants follow from; also its name."""

    stage: str  # "step": all of it; "verify": the target alone, when the host takes part
    n: int  # drafted tokens
    size: int  # entries
    n_candidates: int = 0  # to sample from; 0: every row takes the maximum
    n_biases: int = 0  # logit biases a row
    n_uniforms: int = 0  # random numbers of synthetic acceptance an entry

    @property
    def sampling(self) -> Sampled:
        return self.n_candidates, self.n_biases

    @property
    def n_rows(self) -> int:
        return self.size * (self.n + 1)

    @property
    def price(self) -> float:
        """Time for a token, in no unit."""
        return (ROWS_BEFORE + self.n_rows) / _n_tokens(self.n)

    @property
    def eager_price(self) -> float:
        return max(ROWS_BEFORE + self.n_rows, EAGER_ROWS) / _n_tokens(self.n)

    def serves(self, wanted: Shape, n_streams: int) -> bool:
        """Whether n_streams streams whose step should have the shape `wanted` can go through this one's graph.

        Rows that the narrow products can take do not become more than they can take, see `capture.n_entries`.
        """
        return (
            (self.stage, self.n_uniforms > 0) == (wanted.stage, wanted.n_uniforms > 0)
            and covers(self.sampling, wanted.sampling)
            and n_streams <= self.size
            and self.n <= wanted.n
            and (self.n_rows <= NARROW_TOKENS or n_streams * (self.n + 1) > NARROW_TOKENS)
        )


def covers(sampling: Sampled, wanted: Sampled) -> bool:
    """Whether what needs `wanted` can be sampled like this: with more candidates, and biases of nothing."""
    limits = MOST_CANDIDATES, MOST_BIASES
    return all(want <= have <= max(want, most) for have, want, most in zip(sampling, wanted, limits))


def _n_tokens(n: int) -> float:
    """Tokens that a step with n drafted ones may be expected to emit for a stream."""
    return (1.0 - RIGHT ** (n + 1)) / (1.0 - RIGHT)


def nearest(shapes: Iterable[Shape], wanted: Shape, n_streams: int) -> Shape | None:
    """The cheapest of these shapes that serves n_streams streams in place of `wanted`."""
    serving = (shape for shape in shapes if shape.serves(wanted, n_streams))
    return min(serving, key=lambda shape: (shape.price, shape), default=None)


class Lacks:
    """What steps lose because shapes are not captured: a shape is captured once it has cost as much as that would."""

    def __init__(self) -> None:
        self.lost: dict[Shape, float] = {}  # in steps of that shape

    def went_without(self, wanted: Shape, found: Shape | None) -> None:
        """A step of shape `wanted` went through the graph of `found`, or through none."""
        if found is not None and (found.n, found.size) == (wanted.n, wanted.size):
            return
        price = wanted.eager_price if found is None else found.price
        self.lost[wanted] = self.lost.get(wanted, 0.0) + max(price / wanted.price - 1.0, LEAST_LOSS)

    def is_due(self, wanted: Shape) -> bool:
        return self.lost.get(wanted, 0.0) >= CAPTURE_STEPS

    def worst(self) -> Shape | None:
        """The shape whose lack has cost most."""
        return max(self.lost, key=lambda shape: self.lost[shape], default=None)


def wishes(stage: str, lengths: Sequence[int], n_slots: int, samplings: Sequence[Sampled],
           n_uniforms: Callable[[int], int]) -> list[Shape]:
    """All shapes that streams will need, those first that serve best while the others are missing: one stream and all
    slots, plain steps and the longest drafts (`is_end`).

    samplings: the widest first, which serves the others too.
    n_uniforms: by the drafted tokens.
    """
    order = _ends_first(sorted(set(lengths)))
    found = [
        ((max(j, k) > 1, i, j // N_FIRST, k, j), Shape(stage, n, size, *sampling, n_uniforms(n)))
        for i, sampling in enumerate(samplings)
        for j, n in enumerate(order)
        for k, size in enumerate(_ends_first(entry_counts(n + 1, n_slots)))
    ]
    return [shape for _, shape in sorted(found)]


def is_end(shape: Shape, lengths: Sequence[int], n_slots: int) -> bool:
    """Whether it is one of those without which some step has no graph at all."""
    counts = entry_counts(shape.n + 1, n_slots)
    return shape.n in (min(lengths), max(lengths)) and shape.size in (counts[0], counts[-1])


def _ends_first(items: Sequence[int]) -> list[int]:
    """The first and the last, the one in the middle, those in the middle of both halves, .."""
    last = len(items) - 1
    order, spans = [0, last], [(0, last)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if low < middle:
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [items[i] for i in dict.fromkeys(order)]
