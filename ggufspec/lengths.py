"""How many tokens a step drafts: as many as allowed, or as the engine's policy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .adaptive import Adaptive, Choice
from .drafters.chain import Chain
from .flight import Decoded, Flight
from .slot import Slot

if TYPE_CHECKING:
    from .engine import Engine

SHORT_MS = 1.0  # where steps take less than this, deciding takes a part of it that shows:
KEPT = 3  # a length that was chosen twice running then stands for so many more steps


class Lengths:
    """Asks the policy one step ahead, while the device works: from what is known up to the step before the last."""

    def __init__(self, engine: Engine):
        self.engine = engine
        if isinstance(engine.policy, Adaptive):
            engine.policy.costs.entries = engine.decoder.n_entries
        self.step_ms: float | None = None  # what the last step took; in a tensor split, on the first rank
        self._untold: Callable[[float | None], None] | None = None  # the last step's results, for the policy
        self._sent: Choice | None = None  # for the step that was launched last
        self._prepared: tuple[list[int], list[int], Choice] | None = None  # jobs, limits and the choice for them
        self._n_kept = 0  # steps that the choice has stood for without being made again

    def choose(self, slots: Sequence[Slot], rooms: Sequence[int]) -> Choice:
        """Lengths for the next step of these slots. rooms: the most drafted tokens that each will have room for.

        The width stays when room runs out: other widths would be other graphs to capture.
        """
        choice = self._choose(slots)
        fits = any(min(n, room) > 0 for n, room in zip(choice.lengths, rooms))
        self._sent = choice if fits else Choice.plain(len(slots))
        return self._sent

    def _choose(self, slots: Sequence[Slot]) -> Choice:
        most, policy = [self._most(slot) for slot in slots], self.engine.policy
        if policy is None:
            return Choice(max(most), most, [()] * len(most))
        jobs = _jobs(slots)
        if self._prepared is None or self._prepared[:2] != (jobs, most):
            self._prepared = jobs, most, policy.choose(jobs, most, self._sent)
            self._n_kept = 0
        choice = self._prepared[2]
        if isinstance(self.engine.drafter, Chain):
            self.engine.drafter.allowed = choice.members
        return choice

    def prepare(self) -> None:
        """While the device works: tell the policy of the step before this one and ask it for the next."""
        if self.engine.policy is None or self._prepared is None:
            return
        if self._untold is not None:
            self._untold(self.step_ms)
            self._untold = None
        jobs, most, before = self._prepared
        policy = self.engine.policy
        if 0 < self._n_kept <= KEPT and not policy.forced:
            self._n_kept += 1
            return
        choice = policy.choose(jobs, most, self._sent)
        self._prepared = jobs, most, choice
        is_short = self.step_ms is not None and self.step_ms < SHORT_MS
        is_steady = choice.n == before.n and not choice.is_probe and not before.is_probe
        self._n_kept = int(is_short and is_steady)

    def keep(self, flight: Flight, decoded: Decoded, ms: float | None) -> None:
        """Keep what the policy is told once all ranks know the time that the step took. Nothing of the step is in the
        slots yet."""
        live = flight.live()
        self.step_ms = ms if len(live) == len(flight.slots) else None  # else it was a larger step's
        policy = self.engine.policy
        if policy is None:
            return
        chain = self.engine.drafter if isinstance(self.engine.drafter, Chain) else None
        sources = [chain.source(slot.id) if chain is not None else 0 for slot in decoded.slots]
        accepted = [len(tokens) - 1 for tokens in decoded.emitted]
        chosen = flight.choice
        # a draft that the end of its text cuts short is no sign of what the drafter knows
        lengths = [min(chosen.lengths[b], self.engine.room(slot)) for b, slot in zip(live, decoded.slots)]
        choice = Choice(chosen.n, lengths, [chosen.members[b] for b in live], chosen.is_probe)
        self._untold = partial(policy.record, _jobs(decoded.slots), choice, decoded.n_drafted, accepted, sources)

    def _most(self, slot: Slot) -> int:
        """The most drafted tokens that this slot may have."""
        assert slot.job is not None
        own = slot.job.request.speculation.n_max
        return self.engine.n_max if own is None else min(self.engine.n_max, own)


def _jobs(slots: Sequence[Slot]) -> list[int]:
    return [slot.job.id for slot in slots if slot.job is not None]
