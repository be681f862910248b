"""Counters of one drafter over its life, as a dictionary and as llama.cpp's two log lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Call = Literal["begin", "propose", "accept"]


@dataclass
class Statistics:
    """Host numbers only: a step is recorded once the host has its counts, so counting never synchronizes."""

    name: str
    n_max: int = 0
    n_begin: int = 0  # calls
    n_propose: int = 0
    n_accept: int = 0
    n_drafts: int = 0  # drafts that were not empty
    n_accepted_drafts: int = 0  # ... of which at least one token was right
    draft_n: int = 0  # tokens
    draft_n_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # drafts with at least i+1 tokens right
    begin_ms: float = 0.0
    propose_ms: float = 0.0
    accept_ms: float = 0.0

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """One slot's verified draft."""
        if n_drafted == 0:
            return
        self.n_drafts += 1
        self.draft_n += n_drafted
        self.draft_n_accepted += n_accepted
        self.n_accepted_drafts += n_accepted > 0
        count_positions(self.accepted_at, n_accepted)

    def add(self, call: Call, ms: float) -> None:
        """One call that took `ms`. The caller measures: a captured call runs no Python when it is replayed."""
        setattr(self, f"n_{call}", getattr(self, f"n_{call}") + 1)
        setattr(self, f"{call}_ms", getattr(self, f"{call}_ms") + ms)

    @contextmanager
    def timed(self, call: Call) -> Iterator[None]:
        """Measure and `add` a call on the host's clock."""
        start = time.perf_counter()
        yield
        self.add(call, 1000 * (time.perf_counter() - start))

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step, the target's own included."""
        return mean_length(self.draft_n_accepted, self.n_drafts)

    def per_position(self) -> list[float]:
        """Share of drafts with at least i+1 tokens right, for i below the drafter's n_max."""
        counts = self.accepted_at + [0] * (self.n_max - len(self.accepted_at))
        return [count / self.n_drafts if self.n_drafts else 0.0 for count in counts]

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "n_drafts": self.n_drafts,
            "n_accepted_drafts": self.n_accepted_drafts,
            "accepted_per_position": self.per_position(),
            "mean_accepted_length": self.mean_accepted_length,
            "calls": {"begin": self.n_begin, "draft": self.n_propose, "accept": self.n_accept},
            "ms": {"begin": self.begin_ms, "draft": self.propose_ms, "accept": self.accept_ms},
        }

    def line(self) -> str:
        """The line llama.cpp prints per drafter when a request ends.

        It counts an accept call for each draft that was not empty, and shows positions up to the last one accepted.
        """
        text = (
            f"statistics {self.name:>16}: "
            f"#calls(b,g,a) = {self.n_begin:4d} {self.n_propose:6d} {self.n_drafts:6d}, "
            f"#gen drafts = {self.n_drafts:6d}, #acc drafts = {self.n_accepted_drafts:5d}, "
            f"#gen tokens = {self.draft_n:6d}, #acc tokens = {self.draft_n_accepted:5d}"
        )
        if self.n_drafts:
            rates = ", ".join(f"{count / self.n_drafts:.3f}" for count in self.accepted_at)
            text += f", #mean acc len = {self.mean_accepted_length:.2f}, #acc rate/pos = ({rates})"
        return f"{text}, dur(b,g,a) = {self.begin_ms:.3f}, {self.propose_ms:.3f}, {self.accept_ms:.3f} ms"


def count_positions(counts: list[int], n_accepted: int) -> None:
    """Add one draft of which the first `n_accepted` tokens were right: counts[i] drafts had at least i + 1."""
    counts += [0] * (n_accepted - len(counts))
    for i in range(n_accepted):
        counts[i] += 1


def mean_length(n_accepted: int, n_steps: int) -> float:
    return 1.0 + n_accepted / n_steps if n_steps else 1.0


def acceptance_line(draft_n: int, draft_n_accepted: int, n_steps: int) -> str:
    """The line llama.cpp prints per request; only shown when something was drafted."""
    ratio = draft_n_accepted / draft_n if draft_n else 0.0
    return (
        f"draft acceptance = {ratio:0.5f} ({draft_n_accepted:5d} accepted / {draft_n:5d} generated), "
        f"mean len = {mean_length(draft_n_accepted, n_steps):5.2f}"
    )
