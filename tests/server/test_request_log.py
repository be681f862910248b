"""The log of finished requests, and the warning about a drafter that never drafts."""

import logging
from types import SimpleNamespace

from ggufspec.job import Event, Job, Request
from ggufspec.sampling import SamplingParams
from ggufspec.tools.server.request_log import RequestLog


def done(n_tokens, draft_n=0, accepted=0):
    job = Job(3, Request([1, 2], SamplingParams()), slot=1, finish_reason="length")
    job.stats.predicted_n, job.stats.draft_n, job.stats.draft_n_accepted = n_tokens, draft_n, accepted
    return Event(job, "done")


def test_lines(caplog):
    engine = SimpleNamespace(drafter=SimpleNamespace(name="draft-mtp"), policy=None)
    with caplog.at_level(logging.INFO, "ggufspec.server"):
        RequestLog().after_step(engine, [done(10, 12, 6), Event(done(1).job, "text")])
    assert [r.message.split(":")[0] for r in caplog.records][0] == "request 3 on slot 1"
    assert "0.50000" in caplog.text and len(caplog.records) == 2


def test_a_silent_drafter_is_reported_once(caplog):
    engine = SimpleNamespace(drafter=SimpleNamespace(name="draft-mtp"), policy=None)
    log = RequestLog()
    for n in (40, 10, 14, 60):
        log.after_step(engine, [done(n)])
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["speculation is on (draft-mtp), but the last 64 tokens had no draft"]


def test_no_warning_without_cause(caplog):
    log = RequestLog()
    log.after_step(SimpleNamespace(drafter=None), [done(500)])
    engine = SimpleNamespace(drafter=SimpleNamespace(name="draft-mtp"), policy=None)
    for _ in range(4):
        log.after_step(engine, [done(40), done(40, 3, 1)])
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]
