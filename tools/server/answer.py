"""What has been generated for one prompt so far, and what all APIs report of it: counts, probabilities."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from ggufspec.job import Job, JobStats, TokenOut

from .fields import Task
from .worker import Update

LOWEST_FLOAT = -3.4028234663852886e38  # stands for log(0), which JSON cannot hold


@dataclass
class Step:
    """The visible part of one update."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    probs: list[dict[str, Any]] = field(default_factory=list)


class Answer:
    """Accumulates the updates of one job. `index` is its place among the results of the request."""

    def __init__(self, index: int, task: Task, prompt: list[int], tokenizer: Any):
        self.index = index
        self.task = task
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.job: Job | None = None
        self.text = ""  # whole characters
        self.rest = ""  # U+FFFD when the generation ended inside a character: only whole plain completions show it
        self.tokens: list[int] = []
        self.probs: list[dict[str, Any]] = []
        self.finish_reason = ""  # "stop", "length"
        self.stop_kind = "none"
        self.stopping_word = ""
        self.truncated = False
        self.timings: dict[str, Any] = {}
        self.n_cached = 0
        self.done = False
        self._t_first = 0.0
        self._started = False
        self._n_reported = 0

    @property
    def n_decoded(self) -> int:
        return len(self.tokens)

    @property
    def id_slot(self) -> int:
        return self.job.slot if self.job is not None else -1

    @property
    def has_new_line(self) -> bool:
        return "\n" in self.text

    def start_of_progress(self) -> bool:
        """True once: the first progress report shows what was found in the cache."""
        first, self._started = not self._started, True
        return first

    def end_of_prompt(self) -> bool:
        """True once, at the first generated token, unless the whole prompt was reported before."""
        first, self._n_reported = self._n_reported < len(self.prompt), len(self.prompt)
        return first

    def progress(self, n_done: int, ms: float) -> dict[str, int]:
        return {"total": len(self.prompt), "cache": self.n_cached, "processed": n_done, "time_ms": int(ms)}

    def empty(self) -> None:
        """An empty prompt has an empty answer."""
        self.finish_reason, self.done, self.timings = "length", True, JobStats().timings()

    def take(self, update: Update) -> Step:
        """Add an update; returns what is new."""
        if self.job is not None:
            self.n_cached = self.job.n_prompt_cached
        if update.timings:
            self.timings = update.timings
        if update.kind == "prompt":
            self._n_reported = update.n_prompt_done
        step = Step(update.text, [token.id for token in update.tokens])
        if self.task.sampling.n_probs > 0:
            post = self.task.sampling.post_sampling_probs
            step.probs = [entry(token, self.tokenizer, post) for token in update.tokens]
        if update.kind == "text" and not self._t_first:
            self._t_first = time.monotonic()
        before = len(self.text)
        self.text += step.text
        self.tokens += step.tokens
        self.probs += step.probs
        if update.kind == "done":
            self.rest = update.rest
            self._finish()
        elif self._over_limits():
            self.finish_reason, self.stop_kind, self.done = "length", "limit", True
            step.text = self.text[before:]
        return step

    def _finish(self) -> None:
        job = self.job
        assert job is not None
        self.done = True
        self.finish_reason = "length" if job.finish_reason == "length" else "stop"
        self.stop_kind = job.stop_kind or "none"
        self.stopping_word = job.stopping_word
        self.truncated = job.truncated
        if self.stop_kind == "word" and self.probs:
            n = len(self.tokenizer.encode(self.stopping_word, add_special=False, parse_special=False))
            del self.probs[max(0, len(self.probs) - n) :]

    def _over_limits(self) -> bool:
        """`t_max_predict_ms` and `n_indent`: both count only from the first line break on."""
        if not self.has_new_line:
            return False
        limit = self.task.t_max_predict_ms
        if limit > 0 and 1000 * (time.monotonic() - self._t_first) > limit:
            return True
        if self.task.n_indent > 0:
            at = 0
            while (at := self.text.find("\n", at) + 1) > 0:
                indent = len(self.text) - at - len(self.text[at:].lstrip(" \t"))
                if at + indent < len(self.text) and indent < self.task.n_indent:
                    self.text = self.text[: at + indent]
                    return True
        return False


def entry(token: TokenOut, tokenizer: Any, post_sampling: bool) -> dict[str, Any]:
    """`{"id", "token", "bytes", "logprob", "top_logprobs"}`; after the sampler chain `prob`, `top_probs`."""
    value, tops = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token_id, special=False)
        number = math.exp(logprob) if post_sampling else max(logprob, LOWEST_FLOAT)
        text = piece.decode("utf-8", errors="replace")
        return {"id": token_id, "token": text, "bytes": list(piece), value: number}

    top = [one(*pair) for pair in token.top if not post_sampling or pair[1] > -math.inf]
    logprob = 0.0 if token.logprob is None else token.logprob
    return {**one(token.id, logprob), tops: top}


def usage(answer: Answer) -> dict[str, Any]:
    n_prompt, n = len(answer.prompt), answer.n_decoded
    return {
        "completion_tokens": n,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n,
        "prompt_tokens_details": {"cached_tokens": answer.n_cached},
    }
