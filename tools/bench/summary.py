"""From runs to the figures of a table: medians with quartiles, paired ratios, acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .steady import Run


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2, unit: str = "") -> str:
        """`2.13x ±0.04`: half the distance of the quartiles. One value has none."""
        half = (self.high - self.low) / 2
        return f"{self.median:.{digits}f}{unit}" + (f" ±{half:.{digits}f}" if half else "")


@dataclass(frozen=True)
class Pair:
    """A plain run and the drafted run right after it, of the same prompts."""

    plain: Run
    drafted: Run

    @property
    def decode_speedup(self) -> float:
        return self.plain.ms_per_token / self.drafted.ms_per_token

    @property
    def wall_speedup(self) -> float:
        return self.plain.wall_ms_per_token / self.drafted.wall_ms_per_token


@dataclass
class Cell:
    """One row of the table. Times are milliseconds a step unless said."""

    drafter: str
    n_max: int | str  # or "auto"
    temperature: float
    n_streams: int
    workload: str
    n_runs: int
    mean_length: float  # tokens a step, the target's own included
    accept_rate: float  # accepted / drafted
    accepted_per_position: list[float]  # share of drafts with at least i + 1 tokens right
    drafted_per_step: float  # of a stream; less than n_max where the length is decided before every step
    n_drafted: int
    n_accepted: int
    draft_ms: Spread
    verify_ms: Spread
    sample_ms: Spread
    host_ms: Spread  # the rest of the step
    step_ms: Spread
    plain_step_ms: Spread
    plain_ms_per_token: Spread
    ms_per_token: Spread  # of all streams together
    tokens_per_second: Spread  # of all streams together
    plain_tokens_per_second: Spread
    stream_tokens_per_second: Spread  # of one stream: median over streams and runs
    plain_stream_tokens_per_second: Spread
    decode_speedup: Spread
    wall_speedup: Spread
    parity: str
    is_synthetic: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parity_of(pairs: Sequence[Pair]) -> tuple[int, int, str]:
    """(equal streams, streams, where the first difference is) over the tokens that both runs made."""
    n_equal = n_all = 0
    where = ""
    for pair in pairs:
        for i, (plain, drafted) in enumerate(zip(pair.plain.tokens, pair.drafted.tokens)):
            at = first_difference(plain, drafted)
            n_all += 1
            n_equal += at is None
            if at is not None and not where:
                where = f"stream {i}, token {at}: {plain[at]} without drafts, {drafted[at]} with them"
    return n_equal, n_all, where


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def parity_text(pairs: Sequence[Pair], is_synthetic: bool) -> str:
    if is_synthetic:
        return "synthetic"
    n_equal, n_all, where = parity_of(pairs)
    return "equal" if n_equal == n_all else f"{n_all - n_equal} of {n_all} differ ({where})"


def summarize(
    pairs: Sequence[Pair], *, drafter: str, n_max: int | str, temperature: float, n_streams: int, workload: str,
    is_synthetic: bool, n_positions: int | None = None,
) -> Cell:  # fmt: skip
    """`n_positions`: the longest draft there can be, where n_max is no number."""
    drafted, plain = [p.drafted for p in pairs], [p.plain for p in pairs]
    n_drafts = sum(run.stats.n_drafts for run in drafted)
    n_drafted = sum(run.stats.draft_n for run in drafted)
    n_accepted = sum(run.stats.draft_n_accepted for run in drafted)
    n_steps = sum(run.stats.n_slots_decoded for run in drafted)  # of streams
    n_emitting = n_drafts if isinstance(n_max, int) else n_steps  # plain steps among drafted ones are a part of auto
    counts = [0] * (n_max if isinstance(n_max, int) else n_positions or 0)
    for run in drafted:
        for i, count in enumerate(run.stats.accepted_at):
            counts[i] += count

    def per_step(runs: Sequence[Run], value: Callable[[Run], float]) -> Spread:
        return Spread.of([value(run) / max(run.stats.n_decode, 1) for run in runs])

    def streams(runs: Sequence[Run]) -> Spread:
        return Spread.of([rate for run in runs for rate in run.stream_tokens_per_second])

    return Cell(
        drafter=drafter, n_max=n_max, temperature=temperature, n_streams=n_streams, workload=workload,
        n_runs=len(pairs),
        mean_length=1 + n_accepted / n_emitting if n_emitting else 1.0,
        accept_rate=n_accepted / n_drafted if n_drafted else 0.0,
        accepted_per_position=[c / n_drafts if n_drafts else 0.0 for c in counts],
        drafted_per_step=n_drafted / n_steps if n_steps else 0.0, n_drafted=n_drafted, n_accepted=n_accepted,
        draft_ms=per_step(drafted, lambda r: r.stats.draft_ms),
        verify_ms=per_step(drafted, lambda r: r.stats.verify_ms),
        sample_ms=per_step(drafted, lambda r: r.stats.sample_ms),
        host_ms=per_step(
            drafted, lambda r: r.decode_ms - r.stats.draft_ms - r.stats.verify_ms - r.stats.sample_ms
        ),
        step_ms=per_step(drafted, lambda r: r.decode_ms),
        plain_step_ms=per_step(plain, lambda r: r.decode_ms),
        plain_ms_per_token=Spread.of([r.ms_per_token for r in plain]),
        ms_per_token=Spread.of([r.ms_per_token for r in drafted]),
        tokens_per_second=Spread.of([1000 / r.ms_per_token for r in drafted]),
        plain_tokens_per_second=Spread.of([1000 / r.ms_per_token for r in plain]),
        stream_tokens_per_second=streams(drafted),
        plain_stream_tokens_per_second=streams(plain),
        decode_speedup=Spread.of([p.decode_speedup for p in pairs]),
        wall_speedup=Spread.of([p.wall_speedup for p in pairs]),
        parity=parity_text(pairs, is_synthetic),
        is_synthetic=is_synthetic,
    )  # fmt: skip
