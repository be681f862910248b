"""Jobs that wait: what other threads asked for reaches every rank once, in order."""

from __future__ import annotations

from dataclasses import replace

from ggufspec.job import Job, JobState, Request
from ggufspec.job_queue import Inbox, JobQueue
from ggufspec.sampling import SamplingParams


def request(token: int) -> Request:
    return Request([token], SamplingParams())


def test_jobs_are_taken_in_once_and_in_order() -> None:
    queue = JobQueue(None)
    jobs = [queue.submit(request(token)) for token in range(3)]
    assert [job.id for job in jobs] == [0, 1, 2] and len(queue) == 3
    assert queue.has_news and not queue.jobs
    inbox = queue.take_in(7, 1.5)
    assert (inbox.submitted, inbox.cancelled, inbox.emitted, inbox.step_ms) == (jobs, [], 7, 1.5)
    assert queue.jobs == jobs and len(queue) == 3 and not queue.has_news
    assert not queue.take_in(0, None) and queue.jobs == jobs


def test_a_cancelled_job_leaves_the_queue() -> None:
    queue = JobQueue(None)
    first, second = queue.submit(request(1)), queue.submit(request(2))
    queue.take_in(0, None)
    queue.cancel(first)
    assert queue.has_news and len(queue) == 2
    events = queue.drop(set(queue.take_in(0, None).cancelled))
    assert [(event.job, event.kind) for event in events] == [(first, "done")]
    assert (first.state, first.finish_reason, second.state) == (JobState.DONE, "cancelled", JobState.QUEUED)
    assert queue.jobs == [second] and not queue.drop({first.id})


def test_ranks_take_what_the_first_one_has() -> None:
    """A follower's own inbox counts for the check of its tokens alone."""
    shared = Inbox([Job(5, request(9))], emitted=3, step_ms=2.0)

    class First:
        def share(self, inbox: Inbox) -> Inbox:
            assert inbox == Inbox(emitted=3, step_ms=8.0)
            return replace(shared)

    queue = JobQueue(First())
    assert queue.take_in(3, 8.0).step_ms == 2.0
    assert queue.jobs == shared.submitted
