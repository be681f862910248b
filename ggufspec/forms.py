"""How a step is taken: through the graph of its shape, through another's, or as it is; and what is captured when."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .capture import n_entries
from .choose import Plan, Sampled
from .sampling import SamplingParams
from .shapes import Lacks, Shape, covers, is_end, nearest, wishes
from .slot import Slot

if TYPE_CHECKING:
    from .decode import Decoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """How a step is taken."""

    n: int  # drafted tokens
    size: int  # entries, padding included
    plan: Plan | None
    shape: Shape | None  # of the graph that it goes through; None: launched as it is
    wanted: Shape | None  # of the graph that it should have


class Forms:
    """Of the steps of one decoder."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        # Whether a step captures what it needs at once. Otherwise (a server, once it is warm) it goes through the graph
        # of a shape like its own, and what is missing is captured by `capture_one` or when it has cost enough.
        self.is_on_demand = True
        self.wishes: list[Shape] = []  # for `capture_one`, the next one first
        self.lacks = Lacks()
        self.sampling: Sampled = (0, 0)  # what the last step would have had
        self._samplings: list[Sampled] = []  # that graphs are captured for, the narrowest first
        self._known: tuple[int, dict[tuple[Shape, int], Shape | None]] = 0, {}  # by how many graphs there are

    def n_entries(self, n_streams: int, n: int) -> int:
        """Entries of a step with n drafted tokens, padding included: only captured ones have any.

        Those of the graph that it goes through, if steps like the last one have to be content with others' graphs.
        """
        size = self._own_entries(n_streams, n)
        if self.decoder.graphs is None or self.is_on_demand or not self.decoder.is_whole:
            return size
        wanted = self._shape(self.sampling, n, size)
        if self.decoder.graphs.has(wanted):
            return size
        found = self._nearest(wanted, n_streams)
        return found.size if found is not None and found.n == n else size

    def _own_entries(self, n_streams: int, n: int) -> int:
        if self.decoder.graphs is None and self.decoder.run_stage is None:
            return n_streams
        return n_entries(n_streams, n + 1, self.decoder.cache.n_slots)

    def _shape(self, sampling: Sampled | None, n: int, size: int) -> Shape:
        """Of the graph of a step whose plan has this shape; of its verification alone if there is none, or if the host
        drafts."""
        if sampling is None or not self.decoder.is_whole:
            return Shape("verify", n, size)
        return Shape("step", n, size, *sampling, self.decoder.n_uniforms(n))

    def _nearest(self, wanted: Shape, n_streams: int) -> Shape | None:
        """The graph that n_streams streams go through in place of `wanted`. Policies ask for it many times a step."""
        assert self.decoder.graphs is not None
        captured = self.decoder.graphs.captured
        if self._known[0] != len(captured):
            self._known = len(captured), {}
        known, key = self._known[1], (wanted, n_streams)
        if key not in known:
            shapes = [name for name in self.decoder.graphs.names() if isinstance(name, Shape)]
            known[key] = nearest(shapes, wanted, n_streams)
        return known[key]

    def form(self, slots: Sequence[Slot], n: int) -> Form:
        """Of a step of these slots with n drafted tokens."""
        decoder, graphs = self.decoder, self.decoder.graphs
        size = self._own_entries(len(slots), n)
        if graphs is None:
            return Form(n, size, decoder.plan(slots, n, size), None, None)
        sampling = self.decoder.chooser.sampled(slots)
        wanted = self._shape(None if sampling is None else self._general(sampling), n, size)
        if self.is_on_demand or graphs.has(wanted):
            return Form(n, size, decoder.plan(slots, n, size, wanted.sampling), wanted, wanted)
        found = self._nearest(wanted, len(slots))
        if found is None:
            return Form(n, len(slots), decoder.plan(slots, n, len(slots)), None, wanted)
        return Form(found.n, found.size, decoder.plan(slots, found.n, found.size, found.sampling), found, wanted)

    def _general(self, sampling: Sampled) -> Sampled:
        """What steps that are sampled like this have graphs for."""
        if self.is_on_demand:
            return sampling
        n_candidates, n_biases = sampling
        # else a power of two of candidates, so that few numbers occur
        own = min(1 << (n_candidates - 1).bit_length(), self.decoder.target.n_vocab) if n_candidates else 0, n_biases
        return next((wider for wider in self._samplings if covers(wider, sampling)), own)

    def is_due(self, form: Form) -> bool:
        """Whether the graph that the step lacks has been missed enough."""
        if self.decoder.graphs is None or form.wanted is None or form.shape == form.wanted:
            return False
        if self.lacks.is_due(form.wanted) and not self.decoder.graphs.has_room():
            self.lacks = Lacks()  # not asked again soon
        return self.lacks.is_due(form.wanted)

    def serve(self, lengths: Sequence[int], sampling: Sequence[SamplingParams]) -> None:
        """From now on no step waits for a capture that it can do without: see `is_on_demand`.

        lengths: numbers of drafted tokens that steps will have; sampling: as requests will ask for it, beside greedy
        choice. What no step could do without is captured now, the rest by `capture_one`; with biases, as requests that
        go on past the end of text have them: the others get biases of nothing.
        """
        assert self.decoder.graphs is not None
        self.is_on_demand = False
        sampling = [SamplingParams(temperature=0.0), *sampling]
        # and as they are, where those with biases would be too slow for them
        every = [*(replace(params, ignore_eos=True) for params in sampling), *sampling]
        self._samplings = []
        for own in map(self.decoder.chooser.shape_of, every):
            if own is not None and not any(covers(other, own) for other in self._samplings):
                self._samplings = sorted([*self._samplings, own])
        stage, samplings = ("step", self._samplings[::-1]) if self.decoder.is_whole else ("verify", [(0, 0)])
        self.wishes = wishes(stage, lengths, self.decoder.cache.n_slots, samplings, self.decoder.n_uniforms)
        for shape in [s for s in self.wishes if is_end(s, lengths, self.decoder.cache.n_slots)]:
            if not self.decoder.graphs.has(shape):
                self.decoder.capture(shape)

    def capture_one(self) -> bool:
        """Capture what is missed most, or else what is wished for next. False: nothing is left, or no memory for it.

        Nothing that runs is touched. No step may be on its way.
        """
        if self.decoder.graphs is None or self.is_on_demand:
            return False
        self.wishes = [shape for shape in self.wishes if not self.decoder.graphs.has(shape)]
        shape = self.lacks.worst() or next(iter(self.wishes), None)
        if shape is None or not self.decoder.graphs.has_room():
            return False
        try:
            self.decoder.capture(shape)
        except torch.OutOfMemoryError as error:
            log.warning("no memory for more captured steps, those there are serve all: %s", str(error).splitlines()[0])
            self.wishes, self.lacks = [], Lacks()
            return False
        return True
