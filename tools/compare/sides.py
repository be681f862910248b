"""Both sides of a comparison on the same prompts, in turn; what they said and how fast."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ggufspec.engine import Engine
from ggufspec.job import Request
from ggufspec.sampling import SamplingParams
from ggufspec.tools.bench.attach import Bench, DrafterChoice
from ggufspec.tools.bench.summary import first_difference

from .peers import Answer, PeerSettings, Server, open_peer

N_TOP = 5
TIE = 1e-3  # log-probabilities nearer than this are one value to arithmetic in float32


@dataclass
class Difference:
    """Where two streams part, with what each side thought likeliest there."""

    prompt: int
    at: int
    ours: list[tuple[int, float]]
    theirs: list[tuple[int, float]]

    @property
    def gap(self) -> float:
        """Between the peer's first and second choice; infinite when it does not say."""
        return self.theirs[0][1] - self.theirs[1][1] if len(self.theirs) > 1 else math.inf

    @property
    def is_tie(self) -> bool:
        return self.gap < TIE


@dataclass
class Row:
    """One configuration: plain, or a drafter with a draft length."""

    name: str
    n_max: int
    n_prompts: int = 0
    differences: list[Difference] = field(default_factory=list)
    drafted: tuple[int, int] = (0, 0)  # ours, theirs; prompts whose tokens are equal
    accepted: tuple[int, int] = (0, 0)
    n_tokens: int = 0  # of those prompts
    ours_per_second: list[float] = field(default_factory=list)
    theirs_per_second: list[float] = field(default_factory=list)

    @property
    def n_equal(self) -> int:
        return self.n_prompts - len(self.differences)

    @property
    def rates(self) -> tuple[float, float]:
        """Accepted share of drafted tokens, ours and theirs."""
        ours, theirs = (a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted))
        return ours, theirs

    @property
    def points(self) -> float:
        """How far the shares are apart, in percentage points."""
        return 100 * (self.rates[0] - self.rates[1])

    @property
    def lengths(self) -> tuple[float, float]:
        """Tokens a step, ours and theirs: every step gives one token and the drafts it accepted."""
        made = self.n_tokens - self.n_equal  # the first token of a stream comes with its prompt
        ours, theirs = (made / (made - a) if made > a else 1.0 for a in self.accepted)
        return ours, theirs

    def ratio(self) -> tuple[float, float, float]:
        """Our speed over theirs: geometric mean of the pairs, and its 95% interval (bootstrap; NaN for one pair)."""
        logs = [math.log(a / b) for a, b in zip(self.ours_per_second, self.theirs_per_second)]
        if len(logs) < 2:
            return math.exp(logs[0]), math.nan, math.nan
        rng = random.Random(1)
        means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(2000))
        mean, low, high = statistics.fmean(logs), means[50], means[-51]
        return math.exp(mean), math.exp(low), math.exp(high)

    def as_dict(self) -> dict[str, Any]:
        ratio, low, high = self.ratio()
        return asdict(self) | {
            "n_equal": self.n_equal, "rates": self.rates, "points": self.points, "lengths": self.lengths,
            "speed_ratio": {"mean": ratio, "low": low, "high": high} if low == low else {"mean": ratio},
        }  # fmt: skip


def compare(
    bench: Bench, peer: str, settings: PeerSettings, choice: DrafterChoice | None, n_max: int,
    prompts: Sequence[Sequence[int]], n_tokens: int, n_repetitions: int, tick: Callable[[], object],
) -> Row:  # fmt: skip
    """One row: ours and theirs alternate on every prompt. llama.cpp keeps MTP's last hidden row from one request to
    the next, so there it gets a fresh process each time.
    """
    drafter = None if choice is None else bench.load_drafter(choice, n_max)
    engine = bench.engine(drafter, ignore_eos=False)
    n_max = engine.n_max
    row = Row("plain" if choice is None else choice.label, n_max)
    fresh = choice is not None and choice.kind == "draft-mtp"
    server = None if fresh else open_peer(peer, settings)
    try:
        for i, prompt in enumerate(prompts):
            for repetition in range(n_repetitions):
                ours = run_ours(engine, prompt, n_tokens)
                theirs = _ask(server, peer, settings, prompt, n_tokens)
                row.ours_per_second.append(ours.tokens_per_second)
                row.theirs_per_second.append(theirs.tokens_per_second)
                if repetition == 0:
                    _count(row, i, ours, theirs)
                tick()
        for difference in row.differences:
            _explain(difference, bench, peer, settings, prompts[difference.prompt])
    finally:
        if server is not None:
            server.close()
    return row


def _ask(server: Server | None, peer: str, settings: PeerSettings, prompt: Sequence[int], n_tokens: int) -> Answer:
    if server is not None:
        return server.complete(prompt, n_tokens)
    with open_peer(peer, settings) as own:
        return own.complete(prompt, n_tokens)


def run_ours(engine: Engine, prompt: Sequence[int], n_tokens: int, top: int = 0) -> Answer:
    """The same request to our engine. Speeds count what llama.cpp counts: from the first token on."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=top)
    request = Request(list(prompt), sampling, n_predict=n_tokens, cache_prompt=False, n_probs=top)
    outs: list[Any] = []
    job = None
    for event in engine.generate(request):
        outs += event.tokens
        job = event.job
    assert job is not None
    return Answer(
        job.generated, job.stats.draft_n, job.stats.draft_n_accepted,
        float(job.stats.timings()["predicted_per_second"]), [out.top for out in outs],
    )  # fmt: skip


def _count(row: Row, i: int, ours: Answer, theirs: Answer) -> None:
    row.n_prompts += 1
    at = first_difference(ours.tokens, theirs.tokens)
    if at is None and len(ours.tokens) != len(theirs.tokens):
        at = min(len(ours.tokens), len(theirs.tokens))
    if at is not None:
        row.differences.append(Difference(i, at, [], []))
        return
    row.n_tokens += len(ours.tokens)
    row.drafted = (row.drafted[0] + ours.n_drafted, row.drafted[1] + theirs.n_drafted)
    row.accepted = (row.accepted[0] + ours.n_accepted, row.accepted[1] + theirs.n_accepted)


def _explain(difference: Difference, bench: Bench, peer: str, settings: PeerSettings, prompt: Sequence[int]) -> None:
    """Both sides' likeliest tokens where the streams part, from our tokens before it as a prompt."""
    plain = bench.engine(None, ignore_eos=False)
    before = [*prompt, *run_ours(plain, prompt, difference.at).tokens] if difference.at else list(prompt)
    difference.ours = list(run_ours(plain, before, 1, N_TOP).top[0][:N_TOP])
    without = PeerSettings(
        settings.model, settings.n_ctx, settings.n_threads, settings.type_k, settings.type_v, settings.flash_attn,
        gpu_layers=settings.gpu_layers,
    )  # fmt: skip
    with open_peer(peer, without) as server:
        top = server.complete(before, 1, N_TOP).top
    difference.theirs = top[0][:N_TOP] if top else []
