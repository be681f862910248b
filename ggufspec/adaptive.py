"""How many tokens to draft, decided before every step: `--spec-draft-n-max auto`. The math is in docs/adaptive.md.

Pure policy: numbers in, numbers out, no tensors and no clock. The engine asks `choose` before a step and tells
`record` what came of it. The text never depends on the choice, only the time does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from .account import Account
from .costs import Costs
from .worth import Worth, counts

log = logging.getLogger(__name__)

AUTO_N_MAX = 7  # the longest draft of drafters that were not trained for a length
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 23, 31, 47, 63)
PLAIN = 0.98  # without drafts nothing is learned about them: plain steps must promise this much more
STAY = 1.01  # another length must promise this much more
PLAIN_EVERY = 32  # steps after which a plain one is taken, where drafts pay only if its time is still true:
CLOSE = 1.15  # they promise less than this times as much,
CLOSE_AT_FIRST, FEW = 1.5, 10  # or while plain steps were few, less than this
FORCED_TIMES = 3  # steps of each kind when times are taken at the start
FIRST_N = 3  # the first width that is timed beside plain steps: the longest up to here, or the shortest there is
FIRST_TRIES = 4  # of a drafter that has nothing to say at first
MEMBER_EVERY = 32  # steps between two tries of a drafter that is not in use
SPEAKS_PRIOR = 0.8  # chance that a drafter has a draft, before it was asked
FORGET_SPEAKS = 0.9


@dataclass(frozen=True)
class Choice:
    """What to draft in a step: a length for every stream, in the order asked, and which of several drafters each may
    use (in the chain's order)."""

    n: int  # the step's width
    lengths: list[int]
    members: list[tuple[int, ...]]
    is_probe: bool = False

    @classmethod
    def plain(cls, batch: int) -> Choice:
        return cls(0, [0] * batch, [()] * batch)

    @property
    def asked(self) -> tuple[int, ...]:
        return tuple(sorted({m for members in self.members for m in members})) if self.n else ()


class Adaptive:
    """The policy of one engine. Jobs are known by their ids; a job is forgotten when it is not in a step."""

    def __init__(self, n_max: Sequence[int], n_min: int = 0, can_be_silent: bool = False):
        """n_max: of each drafter, in the chain's order. n_min: shorter drafts are thrown away, so never asked for.
        can_be_silent: a step for which no drafter has a draft costs no more than a plain one (drafters on the host).
        """
        self.n_max = list(n_max)
        self.can_be_silent = can_be_silent
        top = max(self.n_max)
        self.widths = sorted({n for n in LENGTHS if n < top and (n == 0 or n >= n_min)} | {0, top})
        self.costs = Costs()
        self.jobs: list[int] = []  # the streams of the last step
        self.worth = Worth.fresh(0, len(self.n_max), top)
        self.speaks = np.zeros((0, len(self.n_max)))  # chance that a drafter has a draft when asked, per stream
        self.pool = Worth.fresh(1, len(self.n_max), top)  # over all streams: what a new one is expected to be like
        self.account = Account()  # what may be lost against plain decoding
        self.choice: Choice | None = None
        self.n_steps = 0
        every = range(len(self.n_max))
        self.subsets = [s for size in range(1, len(self.n_max) + 1) for s in combinations(every, size)]
        self.forced: deque[tuple[int, tuple[int, ...]]] = deque()  # widths and drafters of the next steps
        self._turn = 0
        self._n_since_plain = 0
        self._promise = 1.0  # tokens a millisecond of the best step with drafts, of those without
        self.stake = 0.0  # in plain steps: what the next look at drafts costs
        self._asked: dict[int, int] = {}  # first tries of each drafter
        self._shown = -1

    # -- before a step -----------------------------------------------------------------------------------------

    def choose(self, jobs: Sequence[int], most: Sequence[int], pending: Choice | None = None) -> Choice:
        """Lengths for the next step of `jobs`, job b at most most[b] (its own limit).

        pending: a step on its way whose outcome is not recorded yet. What it can lose counts as lost.
        """
        self._follow(jobs)
        self.n_steps += 1
        choice = self._choose(jobs, most, pending)
        self.choice = choice
        self._n_since_plain = self._n_since_plain + 1 if choice.n else 0
        if choice.n != self._shown and not choice.is_probe:
            log.debug("draft length %d for %d stream(s): %s", choice.n, len(jobs), self.shown(len(jobs)))
            self._shown = choice.n
        return choice

    def _choose(self, jobs: Sequence[int], most: Sequence[int], pending: Choice | None) -> Choice:
        batch, plain = len(jobs), Choice.plain(len(jobs))
        if not any(most):
            return plain
        if self.forced:
            n, members = self.forced.popleft()
            return self._uniform(n, members, most) if n else plain
        first = self._unmeasured(jobs, most)
        if first is not None:
            return first
        base = self.costs.of(batch, 0, 0)
        self.account.open(self.costs.of(batch, 1, self._first_width(0, max(most))) / base)
        staked = 0.0 if pending is None else self._loss(batch, pending, base)
        best = self._best(jobs, most, self.account.total - staked)
        if self._n_since_plain >= PLAIN_EVERY:
            is_sure = self.costs.n_steps(batch, 0) >= FEW
            if self._promise < (CLOSE if is_sure else CLOSE_AT_FIRST):
                return plain
        if best.n == 0:
            look = self._probe(jobs, most)
            if look is None:
                return plain
            self.stake = self._loss(batch, look, base)
            is_look = pending is not None and pending.is_probe
            return look if self.account.affords_look(self.stake, staked if is_look else 0.0) else plain
        if len(self.n_max) > 1 and self.n_steps % MEMBER_EVERY == 0:
            return self._other_member(jobs, most, best)
        return best

    def _follow(self, jobs: Sequence[int]) -> None:
        """Keep what is known of these jobs, in this order; new ones begin like those before them."""
        jobs = list(jobs)
        if jobs == self.jobs:
            return
        known = {job: row for row, job in enumerate(self.jobs)}
        n_new = sum(job not in known for job in jobs)
        fresh = iter(range(len(self.jobs), len(self.jobs) + n_new))
        rows = [known[job] if job in known else next(fresh) for job in jobs]
        self.worth = self.worth.joined(self.pool.take([0] * n_new).softened()).take(rows)
        self.speaks = np.concatenate([self.speaks, np.full((n_new, len(self.n_max)), SPEAKS_PRIOR)])[rows]
        self.jobs = jobs
        self.account.new_streams(n_new / len(jobs))

    def _loss(self, batch: int, choice: Choice, base: float) -> float:
        """In plain steps: what the step costs too much if no draft is right."""
        return self.costs.of(batch, _key(choice.asked), choice.n) / base - 1.0

    def _unmeasured(self, jobs: Sequence[int], most: Sequence[int]) -> Choice | None:
        """Before anything is known: plain steps and short drafts of each drafter."""
        costs, batch = self.costs, len(jobs)
        if costs.is_first(batch) and (not costs.ms or costs.is_seen(batch, 0, 0)):
            if not costs.known(batch, 0, 0):
                return Choice.plain(batch)
            for m in range(len(self.n_max)):
                n = self._first_width(m, max(most))
                if n and costs.n_steps(batch, _key((m,))) < 2 and self._asked.get(m, 0) < FIRST_TRIES:
                    self._asked[m] = self._asked.get(m, 0) + 1
                    return self._uniform(n, (m,), most)
        return None

    def _first_width(self, m: int, most: int) -> int:
        """The width that a drafter's times begin with; 0: there is none."""
        widths = [n for n in self.widths[1:] if n <= min(self.n_max[m], most)]
        return max((n for n in widths if n <= FIRST_N), default=min(widths, default=0))

    def _uniform(self, n: int, members: tuple[int, ...], most: Sequence[int], is_probe: bool = False) -> Choice:
        return Choice(n, [min(n, limit) for limit in most], [members] * len(most), is_probe)

    def _best(self, jobs: Sequence[int], most: Sequence[int], budget: float) -> Choice:
        """The width and drafters with the most expected tokens a millisecond, of those whose failure can be paid."""
        batch, base = len(jobs), self.costs.of(len(jobs), 0, 0)
        best, best_rate = Choice.plain(batch), PLAIN * batch / base
        now = self.choice.n if self.choice is not None and not self.choice.is_probe else -1
        limits = np.asarray(most)
        expected = {subset: self._expected(subset) for subset in self.subsets}
        for subset in self.subsets:
            inner = [s for s in self.subsets if set(s) <= set(subset)]
            for n in self.widths[1:]:
                cost = self.costs.of(batch, _key(subset), n)
                if n > limits.max() or cost / base - 1.0 > budget:
                    break
                tokens = np.stack([expected[s][0][np.arange(batch), np.minimum(n, limits)] for s in inner])
                which = tokens.argmax(axis=0)
                if self.can_be_silent:
                    silences = np.stack([expected[s][1] for s in inner])[which, np.arange(batch)]
                    cost += silences.prod() * (base - cost)
                cost += self.costs.newness(batch, _key(subset), n)
                rate = tokens.max(axis=0).sum() / cost * (STAY if n == now else 1.0)
                if rate > best_rate:
                    best = Choice(n, [min(n, limit) for limit in most], [inner[i] for i in which])
                    best_rate = rate
        self._promise = best_rate * base / batch
        return best

    def _expected(self, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of every stream, when `members` are asked in this order until one has a draft: mean tokens of a step
        [streams, 1 + positions], and the chance that none has [streams]."""
        tokens = self.worth.tokens()
        silent = np.ones(len(self.jobs))
        total = np.zeros(tokens.shape[::2])
        for m in members:
            total += (silent * self.speaks[:, m])[:, None] * tokens[:, m]
            silent = silent * (1.0 - self.speaks[:, m])
        return total + silent[:, None], silent

    def _probe(self, jobs: Sequence[int], most: Sequence[int]) -> Choice | None:
        """A look at what drafting would give, with each drafter in turn: the cheapest width, so that looks are
        frequent. One token that was right pays for a longer draft right after."""
        self._turn += 1
        m, batch = self._turn % len(self.n_max), len(jobs)

        def stake(n: int) -> float:
            return self.costs.of(batch, _key((m,)), n) + self.costs.newness(batch, _key((m,)), n)

        widths = [n for n in self.widths[1:] if n <= min(max(most), self.n_max[m])]
        return self._uniform(min(widths, key=stake), (m,), most, is_probe=True) if widths else None

    def _other_member(self, jobs: Sequence[int], most: Sequence[int], best: Choice) -> Choice:
        """The best step's width with a drafter that it would not ask."""
        others = [m for m in range(len(self.n_max)) if m not in best.asked]
        if not others:
            return best
        self._turn += 1
        other = self._uniform(best.n, (others[self._turn % len(others)],), most)
        loss = self._loss(len(jobs), other, self.costs.of(len(jobs), 0, 0))
        return other if loss <= self.account.credit else best

    def start_steps(self, every_width: bool = False) -> list[tuple[int, tuple[int, ...]]]:
        """Steps to take times of at the start: plain, short and of full width with each drafter; or all there are."""
        steps: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for m, n_max in enumerate(self.n_max):
            chosen = (1, min(FIRST_N, n_max), min(AUTO_N_MAX, n_max), n_max)
            steps += [(n, (m,)) for n in self.widths[1:] if n <= n_max and (every_width or n in chosen)]
        return [step for step in steps for _ in range(FORCED_TIMES)]

    def forget_texts(self) -> None:
        """Keep the times, forget the rest: what was decoded so far were no texts."""
        top = self.worth.right.shape[-1]
        self.worth, self.pool = Worth.fresh(0, len(self.n_max), top), Worth.fresh(1, len(self.n_max), top)
        self.speaks, self.jobs = self.speaks[:0], []
        self.account, self.choice = Account(), None
        self.forced.clear()

    # -- after it ----------------------------------------------------------------------------------------------

    def record(self, jobs: Sequence[int], choice: Choice, n_drafted: Sequence[int], n_accepted: Sequence[int],
               sources: Sequence[int], ms: float | None) -> None:
        """What a step came to. sources: the drafter whose draft each stream had. ms None: not the step's own time."""
        batch = len(jobs)
        is_silent = self.can_be_silent and not any(n_drafted)
        width, asked = (0, 0) if is_silent else (choice.n, _key(choice.asked))
        if ms is not None:
            self.costs.record(batch, asked, width, ms)
        if choice.n > 0:
            self._learn(jobs, choice, n_drafted, n_accepted, sources)
        else:
            self.worth.age()
        base, cost = self.costs.of(batch, 0, 0), self.costs.of(batch, asked, width)
        if inf in (base, cost):
            return
        loss, won = cost / base - 1.0, sum(n_accepted) / batch
        if choice.n == 0:
            self.account.plain(self.stake)
        elif choice.is_probe:
            self.account.look(loss, won)
        else:
            self.account.open(cost / base, is_tried=True)
            self.account.draft(won - loss)

    def _learn(self, jobs: Sequence[int], choice: Choice, n_drafted: Sequence[int], n_accepted: Sequence[int],
               sources: Sequence[int]) -> None:
        rows = {job: row for row, job in enumerate(self.jobs)}
        asked = [b for b, job in enumerate(jobs) if job in rows and choice.lengths[b] > 0]  # others ended with the step
        for b in asked:
            for m in choice.members[b]:
                spoke, row = n_drafted[b] > 0 and m == sources[b], rows[jobs[b]]
                self.speaks[row, m] += (1.0 - FORGET_SPEAKS) * (spoke - self.speaks[row, m])
                if spoke:
                    break
        drafted = [b for b in asked if n_drafted[b] > 0]
        if not drafted:
            return
        by = np.array([sources[b] for b in drafted])
        n_max = self.worth.right.shape[-1]
        # of the length that was asked for: a draft that ended before is as good as one that was wrong there
        tried, right = counts([choice.lengths[b] for b in drafted], [n_accepted[b] for b in drafted], n_max)
        self.worth.record([rows[jobs[b]] for b in drafted], by, tried, right)
        members_seen = np.unique(by)
        summed = [np.stack([counted[by == m].sum(axis=0) for m in members_seen]) for counted in (tried, right)]
        self.pool.record([0] * len(members_seen), members_seen, *summed)

    # -- what is shown -----------------------------------------------------------------------------------------

    def shown(self, batch: int) -> str:
        """One line: for each length that was tried, expected tokens and milliseconds."""
        rows = self.table(batch)
        return ", ".join(f"{n}: {tokens:.2f} tokens / {ms:.2f} ms" for n, tokens, ms in rows) or "nothing measured yet"

    def table(self, batch: int | None = None) -> list[tuple[int, float, float]]:
        """(length, expected tokens a stream, milliseconds) of the widths measured at this number of streams."""
        batch = batch or len(self.jobs)
        asked = self.choice.asked if self.choice is not None and self.choice.n else self.subsets[0]
        if not self.jobs:
            return []
        tokens = self._expected(asked)[0].mean(axis=0)
        known = [n for n in self.widths if self.costs.known(batch, _key(asked), n)]
        return [(n, float(tokens[n]), self.costs.of(batch, _key(asked), n)) for n in known]


def adaptive_for(drafter: Any, n_min: int = 0) -> Adaptive:
    """The policy for a drafter or a chain."""
    members = getattr(drafter, "members", [drafter])
    return Adaptive([member.n_max for member in members], n_min, can_be_silent=not drafter.capturable)


def _key(members: Sequence[int]) -> int:
    """A set of drafters as bits; 0: a plain step."""
    return sum(1 << m for m in set(members))
