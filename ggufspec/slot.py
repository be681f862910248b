"""A slot: one sequence's place in every cache, and what the engine knows of it on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .job import Job, JobState
from .prompt_cache import common_prefix
from .stream import TextStream


@dataclass
class Checkpoint:
    """The recurrent state (and the drafters' own) after the first `n_past` tokens of a slot."""

    n_past: int
    states: list[Tensor]  # of `Cache.save_recurrent`
    drafter: Any


@dataclass
class Slot:
    id: int
    job: Job | None = None
    tokens: list[int] = field(default_factory=list)  # evaluated by the target: what the caches hold
    last: int = -1  # sampled, not yet evaluated
    checkpoints: list[Checkpoint] = field(default_factory=list)  # ascending n_past
    stream: TextStream | None = None
    grammar: Any = None  # state of the constraint after `last`
    sampler: Any = None  # state of a sequential sampler after `last`
    t_used: float = 0.0  # when a job last held the slot

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    @property
    def generating(self) -> bool:
        return self.job is not None and self.last >= 0

    @property
    def reading(self) -> bool:
        """Some of its prompt is still to be evaluated."""
        return self.job is not None and self.job.state is JobState.PROMPT

    def reusable(self, prompt: list[int], recurrent: bool) -> int:
        """How many leading tokens of `prompt` need no evaluation here; the last one always does (its logits)."""
        common = min(common_prefix(self.tokens, prompt), max(len(prompt) - 1, 0))
        if not recurrent or common == len(self.tokens):
            return common
        return max((c.n_past for c in self.checkpoints if c.n_past <= common), default=0)

    def history(self, n: int) -> list[int]:
        """The last n tokens before the next choice: evaluated ones and `last`."""
        if n <= 0:
            return []
        tail = self.tokens[-n:]
        return [*tail, self.last][-n:] if self.last >= 0 else tail
