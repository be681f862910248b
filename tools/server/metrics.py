"""GET /metrics: llama-server's names, and this server's own for drafting. The client library writes the text.

Counters are kept by the engine's thread (`after_step`) and read by the event loop at a scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ggufspec.job import Event
from ggufspec.stats import EngineStats

TABLE_EVERY = 16  # steps between two looks at the numbers behind a draft length
MS_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass
class Totals:
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_ms: float = 0.0
    predicted_tokens: int = 0
    predicted_ms: float = 0.0
    n_rated: int = 0  # generated tokens that cost a decode step: all but each stream's first
    n_decode: int = 0
    n_tokens_max: int = 0


@dataclass
class Snapshot:
    """What a scrape shows beside the totals; copied after every step."""

    steps: EngineStats = field(default_factory=EngineStats)
    n_processing: int = 0
    n_waiting: int = 0
    drafters: list[dict[str, Any]] = field(default_factory=list)
    adaptive: Adaptive | None = None


@dataclass(frozen=True)
class Adaptive:
    """What `--spec-draft-n-max auto` decided last, and by which numbers: (length, tokens a stream, milliseconds)."""

    length: int
    table: list[tuple[int, float, float]]


class Metrics:
    def __init__(self) -> None:
        self.start_time = int(time.time())
        self.totals = Totals()
        self.snapshot = Snapshot()
        self._scraped = Totals()
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]  # has collect(): that is the protocol
        self._draft_ms = self._histogram("draft_ms", "Time to draft, per step with a draft")
        self._verify_ms = self._histogram("verify_ms", "Time of the target's forward over drafted rows")
        self._decode_ms = self._histogram("decode_ms", "Time of the target's forward without a draft")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"ggufspec:{name}", f"{text}, in milliseconds", registry=self.registry, buckets=MS_BUCKETS)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def after_step(self, engine: Any, events: list[Event]) -> None:
        stats, before = engine.stats, self.snapshot
        drafter = engine.drafter
        now = Snapshot(
            replace(stats, accepted_at=list(stats.accepted_at)),
            n_processing=sum(slot.job is not None for slot in engine.slots),
            n_waiting=engine.n_waiting,
            drafters=[] if drafter is None else [drafter_stats(part) for part in parts(drafter)],
            adaptive=adaptive_state(getattr(engine, "policy", None), before.adaptive, stats.n_decode),
        )
        done, old = now.steps, before.steps
        with self._lock:
            totals = self.totals
            totals.n_decode += (done.n_decode > old.n_decode) + (done.prompt_tokens > old.prompt_tokens)
            for event in events:
                if event.kind == "done":
                    self._finished(event.job)
            self.snapshot = now
        if done.n_decode > old.n_decode:
            if done.n_drafts > old.n_drafts:
                self._draft_ms.observe(done.draft_ms - old.draft_ms)
                self._verify_ms.observe(done.verify_ms - old.verify_ms)
            else:
                self._decode_ms.observe(done.verify_ms - old.verify_ms)

    def _finished(self, job: Any) -> None:
        stats, totals = job.stats, self.totals
        totals.prompt_tokens += stats.prompt_n
        totals.prompt_tokens_cached += stats.cache_n
        totals.prompt_ms += stats.prompt_ms
        totals.predicted_tokens += stats.predicted_n
        totals.predicted_ms += stats.predicted_ms
        totals.n_rated += max(stats.predicted_n - 1, 0)
        totals.n_tokens_max = max(totals.n_tokens_max, len(job.request.prompt) + max(stats.predicted_n - 1, 0))

    # -- a scrape --------------------------------------------------------------------------------------------

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            totals, snap, last = Totals(**vars(self.totals)), self.snapshot, self._scraped
            self._scraped = totals
        steps = snap.steps
        for name, text, value in (
            ("prompt_tokens", "Number of prompt tokens processed, excluding cached tokens", totals.prompt_tokens),
            ("prompt_tokens_cached", "Number of prompt tokens reused from the cache", totals.prompt_tokens_cached),
            ("prompt_seconds", "Total time spent processing prompts", totals.prompt_ms / 1000),
            ("tokens_predicted", "Number of generation tokens processed", totals.predicted_tokens),
            ("tokens_predicted_seconds", "Total time spent generating tokens", totals.predicted_ms / 1000),
            ("n_decode", "Total number of forward passes of the target", totals.n_decode),
            ("spec_decode_num_draft_tokens", "Speculative: Total draft tokens generated", steps.draft_n),
            (
                "spec_decode_num_accepted_tokens",
                "Speculative: Total draft tokens accepted by the target model",
                steps.draft_n_accepted,
            ),
            ("spec_decode_num_drafts", "Speculative: Total speculative decoding verification steps", steps.n_drafts),
        ):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
        if steps.accepted_at:
            family = CounterMetricFamily(
                "llamacpp:spec_decode_num_accepted_tokens_per_pos",
                "Speculative: Accepted draft tokens per draft position",
                labels=["position"],
            )
            for i, n in enumerate(steps.accepted_at):
                family.add_metric([str(i)], n)
            yield family
        yield from self._per_drafter(snap.drafters)
        if snap.adaptive is not None:
            yield from self._adaptive(snap.adaptive)
        for name, text, value in (
            ("n_tokens_max", "Largest observed sequence length (prompt + generation)", totals.n_tokens_max),
            (
                "prompt_tokens_seconds",
                "Average prompt throughput in tokens/s",
                _rate(totals.prompt_tokens - last.prompt_tokens, totals.prompt_ms - last.prompt_ms),
            ),
            (
                "predicted_tokens_seconds",
                "Average generation throughput in tokens/s",
                _rate(totals.n_rated - last.n_rated, totals.predicted_ms - last.predicted_ms),
            ),
            ("requests_processing", "Number of requests processing", snap.n_processing),
            ("requests_deferred", "Number of requests deferred", snap.n_waiting),
            (
                "n_busy_slots_per_decode",
                "Average number of busy slots per decode step",
                steps.n_slots_decoded / steps.n_decode if steps.n_decode else 0,
            ),
        ):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)

    @staticmethod
    def _per_drafter(drafters: list[dict[str, Any]]) -> Iterable[Metric]:
        proposed = CounterMetricFamily("ggufspec:draft_tokens", "Tokens drafted", labels=["drafter"])
        accepted = CounterMetricFamily(
            "ggufspec:draft_accepted",
            "Drafted tokens accepted, by position in the draft",
            labels=["drafter", "position"],
        )
        for drafter in drafters:
            proposed.add_metric([drafter["name"]], drafter["draft_n"])
            for i, n in enumerate(drafter["accepted_at"]):
                accepted.add_metric([drafter["name"], str(i)], n)
        yield from (proposed, accepted)

    @staticmethod
    def _adaptive(state: Adaptive) -> Iterable[Metric]:
        yield GaugeMetricFamily("ggufspec:draft_length", "Tokens drafted a step, as chosen last", value=state.length)
        tokens = GaugeMetricFamily(
            "ggufspec:draft_expected_tokens", "Tokens a stream that a step of this draft length is expected to emit",
            labels=["length"],
        )
        ms = GaugeMetricFamily(
            "ggufspec:draft_step_ms", "Milliseconds of a step of this draft length, running average", labels=["length"]
        )
        for length, expected, took in state.table:
            tokens.add_metric([str(length)], expected)
            ms.add_metric([str(length)], took)
        yield from (tokens, ms)

    def speculation(self) -> dict[str, Any]:
        """GET /speculation: what the page's live panel shows, as totals since the start."""
        snap = self.snapshot
        steps = snap.steps
        return {
            "drafters": snap.drafters,
            "n_drafts": steps.n_drafts,
            "draft_n": steps.draft_n,
            "draft_n_accepted": steps.draft_n_accepted,
            "accepted_at": steps.accepted_at,
            "n_decode": steps.n_decode,
            "draft_ms": steps.draft_ms,
            "verify_ms": steps.verify_ms,
            "sample_ms": steps.sample_ms,
            "decode_ms": steps.decode_ms,
            "n_processing": snap.n_processing,
            "n_waiting": snap.n_waiting,
            "adaptive": None if snap.adaptive is None else {
                "length": snap.adaptive.length,
                "table": [
                    {"length": n, "tokens": tokens, "ms": ms} for n, tokens, ms in snap.adaptive.table
                ],
            },
        }


def parts(drafter: Any) -> list[Any]:
    """A chain's drafters, or the drafter itself."""
    return list(getattr(drafter, "members", [drafter]))


def drafter_stats(drafter: Any) -> dict[str, Any]:
    stats = drafter.stats
    return {
        "name": drafter.name,
        "n_max": drafter.n_max,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "n_drafts": stats.n_drafts,
        "accepted_at": list(stats.accepted_at),
    }


def adaptive_state(policy: Any, before: Adaptive | None, n_decode: int) -> Adaptive | None:
    """The policy's last choice; its numbers are taken over now and then."""
    if policy is None or policy.choice is None:
        return None
    is_fresh = before is not None and n_decode % TABLE_EVERY
    return Adaptive(policy.choice.n, before.table if before is not None and is_fresh else policy.table())


def _rate(n: int, ms: float) -> float:
    return 1000 * n / ms if ms > 0 else 0.0
