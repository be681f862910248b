"""An engine without a model: the same calls and events as the real one, text that follows from the prompt alone.

Each job's stream is a pure function of its prompt, so a mix-up between streams shows at once. `step_s` makes a
step take time; `die_after` raises in a step, as a lost device does.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from types import SimpleNamespace

from ggufspec.detokenizer import StopStrings
from ggufspec.errors import RequestError
from ggufspec.job import Event, Job, JobState, TokenOut
from ggufspec.stats import EngineStats


class ByteTokenizer:
    """One token a byte, and three control tokens."""

    eog = frozenset({256})
    bos, eos = None, 256
    add_bos = add_eos = False
    n_vocab = 259
    ids = SimpleNamespace(fim_pre=None, fim_suf=None, fim_mid=None, fim_rep=None, fim_sep=None, bos=None)
    tokens = [bytes([i]).decode("latin-1") for i in range(256)] + ["<eos>", "<a>", "<b>"]

    def text(self, token):
        return "" if token is None else self.tokens[token]

    def encode(self, text, add_special=True, parse_special=True):
        return list(text.encode())

    def piece(self, token, special=True):
        if not 0 <= token < self.n_vocab:
            raise RequestError(f"token id {token} is outside the vocabulary (0 to {self.n_vocab - 1})")
        return bytes([token]) if token < 256 else (self.tokens[token].encode() if special else b"")

    def decode(self, ids, skip_special=False):
        return b"".join(self.piece(i, not skip_special) for i in ids).decode(errors="replace")


def stream_of(prompt):
    """The tokens the fake model says after a prompt: words that name the prompt, then end of text."""
    seed = sum((i + 1) * t for i, t in enumerate(prompt)) % 9973
    text = " ".join(f"w{seed}.{i}é" for i in range(12 + seed % 7)) + "\n"
    return [*text.encode(), 256]


class FakeEngine:
    def __init__(self, n_slots=2, n_ctx=512, step_s=0.0, die_after=None, script=None):
        self.script = script  # text of every answer, in place of one that names the prompt
        self.tokenizer = ByteTokenizer()
        self.n_ctx, self.step_s, self.die_after = n_ctx, step_s, die_after
        self.drafter = None
        self.slots = [SimpleNamespace(id=i, job=None, n_past=0, tokens=[]) for i in range(n_slots)]
        self.stats = EngineStats()
        self.queue = deque()
        self.cancelled = set()
        self.ids = itertools.count()
        self.n_steps = 0

    @property
    def idle(self):
        return not self.queue and all(slot.job is None for slot in self.slots)

    @property
    def n_waiting(self):
        return len(self.queue)

    def submit(self, request):
        job = Job(next(self.ids), request)
        self.queue.append(job)
        return job

    def cancel(self, job):
        self.cancelled.add(job.id)

    def step(self):
        self.n_steps += 1
        if self.die_after is not None and self.n_steps > self.die_after:
            raise RuntimeError("device lost")
        time.sleep(self.step_s)
        events = []
        for job in [job for job in self.queue if job.id in self.cancelled]:
            self.queue.remove(job)
            events.append(self.end(job, None, "cancelled", "none"))
        for slot in self.slots:
            if slot.job is not None and slot.job.id in self.cancelled:
                events.append(self.end(slot.job, slot, "cancelled", "none"))
            if slot.job is None and self.queue:
                job = slot.job = self.queue.popleft()
                job.slot, job.state, job.n_prompt_done = slot.id, JobState.PROMPT, len(job.request.prompt)
                job.stops = StopStrings(job.request.stop)
                job.plan = [*self.script.encode(), 256] if self.script else stream_of(job.request.prompt)
                job.stats.prompt_n, job.stats.prompt_ms = len(job.request.prompt), 1.0
                events.append(Event(job, "prompt"))
            elif slot.job is not None:
                events.append(self.token(slot))
        self.stats.n_decode += 1
        self.cancelled.clear()
        return events

    def token(self, slot):
        job = slot.job
        token = job.plan[len(job.generated)]
        job.generated.append(token)
        job.stats.predicted_n = len(job.generated)
        job.stats.predicted_ms = float(len(job.generated))
        out = [TokenOut(token, self.tokenizer.piece(token), -0.5, [(token, -0.5), (1, -2.0)])]
        text = ""
        if token != 256:
            job.pending = getattr(job, "pending", b"") + self.tokenizer.piece(token)
            try:
                text, job.pending = job.pending.decode(), b""
            except UnicodeDecodeError:
                pass
        stopped = job.stops.feed(text)
        if stopped.stop:
            job.stopping_word = stopped.stop
            return self.end(job, slot, "stop", "word", stopped.text, out)
        if token == 256:
            return self.end(job, slot, "stop", "eos", stopped.text + job.stops.flush(), out)
        if 0 <= job.request.n_predict <= len(job.generated):
            return self.end(job, slot, "length", "limit", stopped.text + job.stops.flush(), out)
        job.text += stopped.text
        return Event(job, "text", stopped.text, out)

    def end(self, job, slot, reason, kind, text="", tokens=()):
        job.state, job.finish_reason, job.stop_kind = JobState.DONE, reason, kind
        job.text += text
        if slot is not None:
            slot.job, slot.n_past = None, len(job.request.prompt) + len(job.generated)
        return Event(job, "done", text, list(tokens))

    def capture_one(self):
        return False

    def erase_slot(self, slot):
        n, self.slots[slot].n_past = self.slots[slot].n_past, 0
        return n
