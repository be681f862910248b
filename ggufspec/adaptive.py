"""How many tokens to draft, decided before every step: `--spec-draft-n-max auto`. The math is in docs/adaptive.md.

Pure policy: numbers in, numbers out, no tensors and no clock. The engine asks `choose` before a step and tells
`record` what came of it. The text never depends on the choice, only the time does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
FIRST_LOOKS = 2  # at a drafter of which nothing is known: one may come to nothing
TRY_EVERY = 8  # steps between two tries of a width without a time beside the one in use,
WORTH_A_TRY = 1.1  # which would promise this much more if it took no longer than a narrower one
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

    @cached_property
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
        self._row: dict[int, int] = {}  # of each of them
        # what drafts are worth to each stream; last, over all streams: what a new one is expected to be like
        self.worth = Worth.fresh(1, len(self.n_max), top)
        self.speaks = np.zeros((0, len(self.n_max)))  # chance that a drafter has a draft when asked, per stream
        # the same over all streams; drafters on the device always have one, but for what --spec-draft-p-min cuts
        self.pool_speaks = np.full(len(self.n_max), SPEAKS_PRIOR if can_be_silent else 1.0)
        self.account = Account()  # what may be lost against plain decoding
        self.choice: Choice | None = None
        self.n_steps = 0
        every = range(len(self.n_max))
        self.subsets = [s for size in range(1, len(self.n_max) + 1) for s in combinations(every, size)]
        self.forced: deque[tuple[int, tuple[int, ...]]] = deque()  # widths and drafters of the next steps
        self._turn = 0
        self._n_since_plain = 0
        self._promise = 1.0  # tokens a millisecond of the best step with drafts, of those without
        self._timed: set[tuple[int, int]] = set()  # streams and limits for which first times are known
        self.stake = 0.0  # in plain steps: what the next look at drafts costs
        self._all_speak = len(self.n_max) == 1 and not can_be_silent  # and always did
        self._asked: dict[int, int] = {}  # first tries of each drafter
        self._looks: dict[int, int] = {}  # first looks at each drafter
        self._shown = -1
        self._limits: tuple[list[int], np.ndarray] = ([], np.zeros((0, 0), dtype=int))  # see _drafted
        self._inner = {subset: [s for s in self.subsets if set(s) <= set(subset)] for subset in self.subsets}

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
        widest = max(most)
        if (batch, widest) not in self._timed:
            first = self._unmeasured(batch, most)
            if first is not None:
                return first
            if self.costs.known(batch, 0, 0):
                self._timed.add((batch, widest))
        base = self.costs.of(batch, 0, 0)
        if not self.account.is_open:
            self.account.open(self.costs.of(batch, 1, self._first_width(0, widest)) / base)
        staked = 0.0 if pending is None else self._loss(batch, pending, base)
        best = self._best(jobs, most, self.account.total - staked)
        if self._n_since_plain >= PLAIN_EVERY:
            is_sure = self.costs.n_steps(batch, 0) >= FEW
            if self._promise < (CLOSE if is_sure else CLOSE_AT_FIRST):
                return plain
        if best.n == 0:
            first = self._first_look(batch, most, base) if pending is None or pending.n == 0 else None
            if first is not None:
                return first
            look = self._probe(jobs, most)
            if look is None:
                return plain
            self.stake = self._loss(batch, look, base)
            is_look = pending is not None and pending.is_probe
            return look if self.account.affords_look(self.stake, staked if is_look else 0.0) else plain
        if self.n_steps % TRY_EVERY == 0:
            best = self._untimed(jobs, most, best, self.account.credit - staked)
        if len(self.n_max) > 1 and self.n_steps % MEMBER_EVERY == 0:
            return self._other_member(jobs, most, best)
        return best

    def _follow(self, jobs: Sequence[int]) -> None:
        """Keep what is known of these jobs, in this order; new ones begin like those before them."""
        jobs = list(jobs)
        if jobs == self.jobs:
            return
        known, pool = self._row, len(self.jobs)
        n_new = sum(job not in known for job in jobs)
        fresh = iter(range(pool, pool + n_new))
        rows = [known[job] if job in known else next(fresh) for job in jobs]
        news = self.worth.take([pool] * n_new).softened()
        whole = self.worth.joined(news)
        self.worth = whole.take([row if row < pool else row + 1 for row in rows] + [pool])
        self.speaks = np.concatenate([self.speaks, np.tile(self.pool_speaks, (n_new, 1))])[rows]
        self.jobs = jobs
        self._row = {job: row for row, job in enumerate(jobs)}
        self.account.new_streams(n_new / len(jobs))

    def _loss(self, batch: int, choice: Choice, base: float) -> float:
        """In plain steps: what the step costs too much if no draft is right."""
        return self.costs.of(batch, _key(choice.asked), choice.n) / base - 1.0

    def _unmeasured(self, batch: int, most: Sequence[int]) -> Choice | None:
        """Before anything is known: plain steps and short drafts of each drafter."""
        costs = self.costs
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
        best_rate = PLAIN * batch / base
        best: tuple[int, tuple[int, ...], int] | None = None
        now = self.choice.n if self.choice is not None and not self.choice.is_probe else -1
        widest = max(most)
        ways = {s: self._drafted(s, most) for s in self.subsets}
        of: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray | None]] = {}
        for subset, inner in self._inner.items():
            of[subset] = tokens, which = _most_of([ways[s][0] for s in inner])
            sums = np.add.reduce(tokens, axis=1).tolist()
            key = _key(subset)
            for i, n in enumerate(self.widths[1:], start=1):
                if n > widest:
                    break
                cost = self.costs.of(batch, key, n)
                if cost / base - 1.0 > budget:
                    break
                if self.can_be_silent:
                    rows = which[i] if which is not None else np.zeros(batch, dtype=int)
                    silences = np.stack([ways[s][1] for s in inner])[rows, np.arange(batch)]
                    cost += silences.prod() * (base - cost)
                rate = sums[i] / (cost + self.costs.newness(batch, key, n))
                if n == now:
                    rate *= STAY
                if rate > best_rate:
                    best, best_rate = (n, subset, i), rate
        self._promise = best_rate * base / batch
        if best is None:
            return Choice.plain(batch)
        n, subset, i = best
        inner, which = self._inner[subset], of[subset][1]
        members = [subset] * batch if which is None else [inner[w] for w in which[i]]
        return Choice(n, [min(n, limit) for limit in most], members)

    def _drafted(self, subset: tuple[int, ...], most: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Mean tokens of every stream with these drafters [widths, streams], each stream within its own limit; and the
        chance that none of them has a draft [streams]."""
        if self._limits[0] != most:
            own = np.minimum(np.array(self.widths)[:, None], np.array(most)[None])
            self._limits = list(most), own + np.arange(len(most)) * (self.widths[-1] + 1)
        tokens, silent = self._expected(subset)
        return tokens.take(self._limits[1]), silent  # of [streams, 1 + positions], laid flat

    def _untimed(self, jobs: Sequence[int], most: Sequence[int], best: Choice, budget: float) -> Choice:
        """Steps do not get dearer in proportion to their width, so the line through its neighbours may be wrong about a
        width that was never timed. The one beside the best instead of it, if that could win much and can be paid."""
        batch, key, at = len(jobs), _key(best.asked), self.widths.index(best.n)
        near = [i for i in (at + 1, at - 1) if 0 < i < len(self.widths) and self.widths[i] <= max(most)]
        near = [i for i in near if not self.costs.known(batch, key, self.widths[i])]
        if not near:
            return best
        base = self.costs.of(batch, 0, 0)
        sums = self._drafted(best.asked, most)[0].sum(axis=1)
        least = WORTH_A_TRY * sums[at] / self.costs.of(batch, key, best.n)
        for i in near:
            n, narrower = self.widths[i], self.widths[:i]
            ms = max((self.costs.of(batch, key, w) for w in narrower if self.costs.known(batch, key, w)), default=base)
            is_promising = sums[i] / (ms + self.costs.newness(batch, key, n)) > least
            if is_promising and self.costs.of(batch, key, n) / base - 1.0 <= budget:
                return self._uniform(n, best.asked, most)
        return best

    def _expected(self, members: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of every stream, when `members` are asked in this order until one has a draft: mean tokens of a step
        [streams, 1 + positions], and the chance that none has [streams]."""
        tokens = self.worth.tokens()[:-1]
        if len(members) == 1:
            speaks = self.speaks[:, members[0]]
            if self._all_speak:
                return tokens[:, members[0]], 1.0 - speaks
            return 1.0 + speaks[:, None] * (tokens[:, members[0]] - 1.0), 1.0 - speaks
        silent = np.ones(len(self.jobs))
        total = np.zeros(tokens.shape[::2])
        for m in members:
            total += (silent * self.speaks[:, m])[:, None] * tokens[:, m]
            silent = silent * (1.0 - self.speaks[:, m])
        return total + silent[:, None], silent

    def _first_look(self, batch: int, most: Sequence[int], base: float) -> Choice | None:
        """The cheapest step with a drafter of which no draft was ever verified: paid by what may be lost at first, as
        no plain step will say what such a drafter is worth."""
        for m, n_max in enumerate(self.n_max):
            widths = [n for n in self.widths[1:] if n <= min(max(most), n_max)]
            if not widths or self._looks.get(m, 0) == FIRST_LOOKS or self.worth.tried[-1, m].any():
                continue
            look = self._uniform(min(widths, key=lambda n: self.costs.of(batch, _key((m,)), n)), (m,), most)
            if self._loss(batch, look, base) <= self.account.credit:
                self._looks[m] = self._looks.get(m, 0) + 1
                return look
        return None

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
        self.worth = Worth.fresh(1, len(self.n_max), top)
        self.speaks, self.jobs, self._row, self._looks = self.speaks[:0], [], {}, {}
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
            self.worth.age(len(self.jobs))
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
        n_max, pool, rows = self.worth.right.shape[-1], len(self.jobs), self._row
        # of the length that was asked for: a draft that ended before is as good as one that was wrong there
        if self._all_speak and list(jobs) == self.jobs and min(n_drafted) > 0 < min(choice.lengths):
            outcomes = counts(choice.lengths, n_accepted, n_max)
            summed = np.add.reduce(outcomes, axis=1, keepdims=True)
            self.worth.record(None, (), np.concatenate((outcomes, summed), axis=1))
            return
        asked = [b for b, job in enumerate(jobs) if job in rows and choice.lengths[b] > 0]  # others ended with the step
        self._hear([rows[jobs[b]] for b in asked], [choice.members[b] for b in asked],
                   [sources[b] if n_drafted[b] > 0 else -1 for b in asked])
        drafted = [b for b in asked if n_drafted[b] > 0]
        if not drafted:
            return
        outcomes = counts([choice.lengths[b] for b in drafted], [n_accepted[b] for b in drafted], n_max)
        by = np.array([sources[b] for b in drafted])
        seen = np.unique(by)
        summed = np.stack([outcomes[:, by == m].sum(axis=1) for m in seen], axis=1)
        streams = [rows[jobs[b]] for b in drafted] + [pool] * len(seen)
        self.worth.record(streams, np.concatenate((by, seen)), np.concatenate((outcomes, summed), axis=1))

    def _hear(self, rows: list[int], members: list[tuple[int, ...]], spoke: list[int]) -> None:
        """Who had a draft when asked, -1: nobody. Members are asked in order until one has."""
        rate = 1.0 - FORGET_SPEAKS
        if self._all_speak and -1 not in spoke:
            return
        self._all_speak = False
        for row, asked, speaker in zip(rows, members, spoke):
            for m in asked:
                is_heard = m == speaker
                self.speaks[row, m] += rate * (is_heard - self.speaks[row, m])
                self.pool_speaks[m] += rate / len(rows) * (is_heard - self.pool_speaks[m])
                if is_heard:
                    break

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


def _most_of(ways: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """The best of several ways [widths, streams] everywhere, and which that is; None: there is one."""
    if len(ways) == 1:
        return ways[0], None
    every = np.stack(ways)
    return every.max(axis=0), every.argmax(axis=0)


@lru_cache(maxsize=1024)
def _key(members: tuple[int, ...]) -> int:
    """A set of drafters as bits; 0: a plain step."""
    return sum(1 << m for m in set(members))
