"""Counts and times of decode steps: of the engine, its jobs and its drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .drafters.statistics import count_positions

if TYPE_CHECKING:
    from .drafters import Drafter
    from .flight import Decoded


@dataclass
class EngineStats:
    """Totals over the engine's life; times in milliseconds. `decode_ms` is from one step's results to the next ones',
    where steps follow one another; the phases are the device's own times."""

    prompt_tokens: int = 0
    predicted_tokens: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    n_decode: int = 0
    n_slots_decoded: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    n_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    last_draft_ms: float = 0.0
    last_verify_ms: float = 0.0

    def record_draft(self, n_drafted: int, n_accepted: int) -> None:
        if n_drafted == 0:
            return
        self.n_drafts += 1
        self.draft_n += n_drafted
        self.draft_n_accepted += n_accepted
        count_positions(self.accepted_at, n_accepted)


def account(stats: EngineStats, drafter: Drafter | None, decoded: Decoded, ms: float) -> None:
    """Count a step, before its tokens are handed to the jobs."""
    stats.decode_ms += ms
    stats.draft_ms += decoded.draft_ms
    stats.verify_ms += decoded.verify_ms
    stats.sample_ms += decoded.sample_ms
    stats.last_draft_ms, stats.last_verify_ms = decoded.draft_ms, decoded.verify_ms
    if drafter is not None and decoded.proposed:
        drafter.stats.add("propose", decoded.draft_ms)
        drafter.stats.add("accept", 0.0)
    stats.n_decode += 1
    stats.n_slots_decoded += len(decoded.slots)
    for slot, n_drafted, tokens in zip(decoded.slots, decoded.n_drafted, decoded.emitted):
        assert slot.job is not None
        job_stats, n_accepted = slot.job.stats, len(tokens) - 1
        job_stats.draft_ms += decoded.draft_ms
        job_stats.verify_ms += decoded.verify_ms
        job_stats.sample_ms += decoded.sample_ms
        stats.record_draft(n_drafted, n_accepted)
        if n_drafted > 0:
            job_stats.draft_n += n_drafted
            job_stats.draft_n_accepted += n_accepted
            job_stats.n_verify += 1
            counts = job_stats.accepted_per_position
            counts += [0] * (n_drafted - len(counts))
            count_positions(counts, n_accepted)
        if drafter is not None:
            drafter.record(slot.id, n_drafted, n_accepted)
