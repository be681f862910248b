"""A request and its life in the engine. The engine schedules jobs; a job knows only its own stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grammar import GrammarSpec
    from .sampling import SamplingParams


@dataclass
class Speculation:
    """Per-request limits on drafting; None means the engine's own setting."""

    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None


@dataclass
class Request:
    prompt: list[int]
    sampling: SamplingParams
    n_predict: int = -1  # -1: until the context is full
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    n_probs: int = 0  # top alternatives reported per token
    post_sampling_probs: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    cache_prompt: bool = True  # reuse a slot's or the host cache's common prefix
    slot: int | None = None  # a particular slot, or any
    want_embedding: bool = False  # no generation: pool the prompt's hidden rows
    timings_per_token: bool = False
    parse_special_out: bool = True  # control tokens appear in the text


class JobState(enum.Enum):
    QUEUED = "queued"
    PROMPT = "prompt"
    RUNNING = "running"
    DONE = "done"


@dataclass
class TokenOut:
    """One generated token as reported to the client."""

    id: int
    piece: bytes
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)  # (id, log-probability), best first


@dataclass
class Event:
    """What a step did for one job. `text` is safe to show: whole characters, no part of a stop string.

    `rest` is U+FFFD when the job has ended inside a character. It is part of the job's text, but a client that reads
    along does not see it: as in llama.cpp only whole characters are streamed.
    """

    job: Job
    kind: str  # "prompt" (progress), "text", "done", "error"
    text: str = ""
    tokens: list[TokenOut] = field(default_factory=list)
    rest: str = ""
    error: Exception | None = None


@dataclass
class Job:
    id: int
    request: Request
    state: JobState = JobState.QUEUED
    slot: int = -1
    generated: list[int] = field(default_factory=list)  # ids, EOG included when it ended the stream
    text: str = ""  # everything emitted so far
    finish_reason: str = ""  # "stop" | "length" | "cancelled" | "error"
    stop_kind: str = ""  # llama.cpp's stop_type: "eos" | "word" | "limit" | "none"
    stopping_word: str = ""
    truncated: bool = False
    n_prompt_cached: int = 0
    n_prompt_done: int = 0
    embedding: Any = None  # [n, D] float32 rows on the CPU when asked for
    stats: JobStats = field(default_factory=lambda: JobStats())


@dataclass
class JobStats:
    """Counters and times of one job; `timings()` has llama.cpp's keys."""

    t_submit: float = 0.0
    t_start: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    n_verify: int = 0  # steps that had a draft
    accepted_per_position: list[int] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0

    def timings(self) -> dict[str, float | int]:
        def per(n: int, ms: float) -> tuple[float, float]:
            return (ms / n if n else 0.0, 1000.0 * n / ms if n and ms > 0 else 0.0)

        prompt_per_token, prompt_per_second = per(self.prompt_n, self.prompt_ms)
        # the first token comes out of the prompt's last chunk: it costs no decode step
        predicted_ms = max(self.predicted_ms, 0.001) if self.predicted_n else 0.0
        predicted_per_token, predicted_per_second = per(max(self.predicted_n - 1, 0), predicted_ms)
        out: dict[str, float | int] = {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": prompt_per_token,
            "prompt_per_second": prompt_per_second,
            "predicted_n": self.predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_per_token,
            "predicted_per_second": predicted_per_second,
        }
        if self.draft_n > 0:
            out["draft_n"] = self.draft_n
            out["draft_n_accepted"] = self.draft_n_accepted
        return out
