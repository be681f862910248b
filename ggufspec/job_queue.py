"""Jobs that wait for a slot: submitted by any thread, taken in by the engine's own before a step.

In a tensor split requests reach the first rank alone. What came in goes to all ranks before every step, so that all of
them take the same jobs at the same step.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from .job import Event, Job, JobState, Request


@dataclass
class Inbox:
    """What other threads asked for since the last step."""

    submitted: list[Job] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    erased: list[int] = field(default_factory=list)  # slots of a tensor split, which all ranks forget at one step
    emitted: int = 0  # digest of the last step's tokens: ranks compare theirs
    step_ms: float | None = None  # what the last step took, on the first rank: all ranks' policies go by it

    def __bool__(self) -> bool:
        return bool(self.submitted or self.cancelled or self.erased)


class Link(Protocol):
    """Joins the engines of a tensor split, so that all of them take the same requests at the same step."""

    def share(self, inbox: Inbox) -> Inbox:
        """The first rank's inbox, on every rank; an error when its `emitted` is not this rank's."""
        ...

    def total(self, n: int) -> int:
        """The sum of all ranks' n, on every rank."""
        ...

    def lost(self, error: RuntimeError) -> Exception:
        """What to raise for an error in the middle of a step: the reason in one line if other ranks have ended."""
        ...


class JobQueue:
    """`submit`, `cancel`, `erase`, `has_news` and `len` are for any thread, the rest for the engine's."""

    def __init__(self, link: Link | None):
        self.jobs: list[Job] = []  # taken in, oldest first
        self._link = link
        self._inbox = Inbox()
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Jobs that have no slot yet."""
        return len(self.jobs) + len(self._inbox.submitted)

    @property
    def has_news(self) -> bool:
        """Whether anything was submitted, cancelled or erased that is not taken in."""
        return bool(self._inbox)

    def submit(self, request: Request) -> Job:
        job = Job(next(self._ids), request)
        job.stats.t_submit = time.perf_counter()
        with self._lock:
            self._inbox.submitted.append(job)
        return job

    def cancel(self, job: Job) -> None:
        with self._lock:
            self._inbox.cancelled.append(job.id)

    def erase(self, slot_id: int) -> None:
        """Let all ranks forget a slot at the next step."""
        with self._lock:
            self._inbox.erased.append(slot_id)

    def take_in(self, emitted: int, step_ms: float | None) -> Inbox:
        """What came in since the last step, the same on every rank; the jobs wait from now on.

        emitted, step_ms: this rank's share in what the ranks tell each other, see `Inbox`.
        """
        with self._lock:
            inbox, self._inbox = self._inbox, Inbox()
        inbox.emitted, inbox.step_ms = emitted, step_ms
        if self._link is not None:
            inbox = self._link.share(inbox)
        self.jobs.extend(inbox.submitted)
        return inbox

    def drop(self, ids: set[int]) -> list[Event]:
        """End the cancelled jobs among those that wait."""
        dropped = [job for job in self.jobs if job.id in ids]
        self.jobs = [job for job in self.jobs if job.id not in ids]
        for job in dropped:
            job.finish_reason, job.state = "cancelled", JobState.DONE
        return [Event(job, "done") for job in dropped]
