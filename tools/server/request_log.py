"""One line in the log for every request that ends, and a warning when a drafter never drafts."""

from __future__ import annotations

import logging
from typing import Any

from ggufspec.drafters.statistics import acceptance_line
from ggufspec.job import Event, Job

log = logging.getLogger("ggufspec.server")

ENOUGH = 64  # tokens without a single draft that make a drafter suspicious


class RequestLog:
    """Called on the engine's thread after every step."""

    def __init__(self) -> None:
        self.n_undrafted = 0
        self.warned = False

    def after_step(self, engine: Any, events: list[Event]) -> None:
        for event in events:
            if event.kind == "done":
                log.info("%s", line(event.job))
                if event.job.stats.draft_n > 0:
                    log.info("%s", acceptance_line(*_counts(event.job)))
                self._watch(engine, event.job)

    def _watch(self, engine: Any, job: Job) -> None:
        """Speculation that is on and never drafts costs memory and gives nothing: say so once."""
        if engine.drafter is None or self.warned or job.request.speculation.n_max == 0:
            return
        self.n_undrafted = 0 if job.stats.draft_n > 0 else self.n_undrafted + job.stats.predicted_n
        if self.n_undrafted >= ENOUGH:
            self.warned = True
            why = "" if engine.policy is None else ": drafting has not paid here, --spec-draft-n-max N would insist"
            log.warning(
                "speculation is on (%s), but the last %d tokens had no draft%s",
                engine.drafter.name,
                self.n_undrafted,
                why,
            )


def line(job: Job) -> str:
    timings = job.stats.timings()
    return (
        f"request {job.id} on slot {job.slot}: {job.finish_reason}; prompt {timings['prompt_n']} tokens "
        f"and {timings['cache_n']} cached ({timings['prompt_per_second']:.2f} tokens per second), "
        f"answer {timings['predicted_n']} tokens ({timings['predicted_per_second']:.2f} tokens per second)"
    )


def _counts(job: Job) -> tuple[int, int, int]:
    return job.stats.draft_n, job.stats.draft_n_accepted, job.stats.n_verify
