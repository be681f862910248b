"""How many tokens to draft, decided before every step: `--spec-draft-n-max auto`. The math is in docs/adaptive.md.

Pure policy: numbers in, numbers out, no tensors and no clock. The engine asks `choose` before a step and tells
`record` what came of it. The text never depends on the choice, only the time does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from .worth import Worth, counts

log = logging.getLogger(__name__)

AUTO_N_MAX = 7  # the longest draft of drafters that were not trained for a length
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 23, 31, 47, 63)
EARN = 0.0185  # of plain decoding's time may be spent on probes
EARN_NEW = 0.15  # in plain steps: a stream that begins may be looked at sooner
MOST_AT_START, MOST_CREDIT = 3.0, 5.0  # in plain steps: what may be lost at first, and at any time after gains
MOST_SAVED = 2.0  # in plain steps: what probes may have to spend
PLAIN = 0.98  # without drafts nothing is learned about them: plain steps must promise this much more
STAY = 1.01  # another length must promise this much more
FORCED_TIMES = 3  # steps of each kind when times are taken at the start
FIRST_N = 3  # the first width that is timed beside plain steps
FIRST_TRIES = 4  # of a drafter that has nothing to say at first
MEMBER_EVERY = 32  # steps between two tries of a drafter that is not in use
SPEAKS_PRIOR = 0.8  # chance that a drafter has a draft, before it was asked
FORGET_SPEAKS = 0.9
RATE = 0.1  # weight of a new time in the running average
OUTLIER = 2.0  # a time counts as at most this many times the average, and not at all unless the next is like it
SPREAD = 2000  # steps over which a width that was never used must win back what its first use costs


@dataclass
class Costs:
    """Milliseconds of a step by (streams, drafters asked, width), measured; the rest is inferred from these."""

    ms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    n_seen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    capture_ms: float = inf  # what the first step of a width costs beyond the step: the least of what looked like it
    _odd: set[tuple[int, int, int]] = field(default_factory=set)  # the last time was an outlier

    def record(self, batch: int, members: int, n: int, ms: float) -> None:
        """The first time of a key is dropped: it compiles or captures. `members` is 0 where n is."""
        key = (batch, members, n)
        self.n_seen[key] = self.n_seen.get(key, 0) + 1
        if self.n_seen[key] == 1:
            self._look_for_capture(ms, self.of(batch, members, n))
            return
        old = self.ms.get(key)
        if old is None:
            self.ms[key] = ms
            return
        # once is a capture (of this step or, where the host runs ahead, of the next); twice is a fact
        if ms > OUTLIER * old and key not in self._odd:
            self._odd.add(key)
            self._look_for_capture(ms, old)
            return
        if ms * OUTLIER < old:  # nothing makes a step too short: what was believed was one of those
            self.ms[key] = ms
            return
        self._odd.discard(key)
        # early times weigh more: the average of the first ten
        rate = max(RATE, 1.0 / self.n_seen[key])
        new = self.ms[key] = old + rate * (min(ms, OUTLIER * old) - old)
        for other in self.ms:  # half of a lasting change is the machine's or the context's: it concerns all lengths
            if other[0] == batch and other != key:
                self.ms[other] *= (new / old) ** 0.5

    def _look_for_capture(self, ms: float, expected: float) -> None:
        if OUTLIER * expected < ms:
            self.capture_ms = min(self.capture_ms, ms - expected)

    def newness(self, batch: int, members: int, n: int) -> float:
        """Milliseconds to add to a step that was never taken: on a GPU the first captures it."""
        if (batch, members if n else 0, n) in self.n_seen or self.capture_ms == inf:
            return 0.0
        return self.capture_ms / SPREAD

    def shown(self, batch: int) -> str:
        """The measured widths of a batch size, with any drafters."""
        rows = sorted((n, ms) for (b, _, n), ms in self.ms.items() if b == batch)
        return ", ".join(f"{n} drafted {ms:.2f} ms" for n, ms in rows) or "none"

    def known(self, batch: int, members: int, n: int) -> bool:
        return (batch, members if n else 0, n) in self.ms

    def of(self, batch: int, members: int, n: int) -> float:
        """Expected milliseconds; inf when nothing at all is known."""
        members = members if n else 0
        found = self.ms.get((batch, members, n))
        if found is not None:
            return found
        line = self._line(batch, members)
        if len(line) > 1:
            return _on_line(line, n)
        like = self._like(batch, members, n)
        if like < inf or members & (members - 1) == 0:
            return like
        # several drafters that were never asked together: what each adds to a plain step
        plain, each = self.of(batch, 0, 0), [1 << m for m in range(members.bit_length()) if members >> m & 1]
        return plain + sum(self.of(batch, one, n) - plain for one in each) if plain < inf else inf

    def _line(self, batch: int, members: int) -> dict[int, float]:
        """Measured widths of one batch size and set of drafters, the plain step included."""
        return {n: ms for (b, m, n), ms in self.ms.items() if b == batch and (m == members or n == 0)}

    def _like(self, batch: int, members: int, n: int) -> float:
        """From the nearest batch size that is measured better, scaled by a width that both know."""
        best = inf
        for other in sorted({b for b, _, _ in self.ms} - {batch}, key=lambda b: abs(b - batch)):
            line = self._line(other, members)
            if len(line) > 1 or n in line:
                here = self._line(batch, members)
                scale = next((ms / line[m] for m, ms in here.items() if m in line), None)
                if scale is None:
                    scale = 1.0
                best = scale * (line[n] if n in line else _on_line(line, n))
                break
        return best


def _on_line(line: dict[int, float], n: int) -> float:
    """Between measured widths straight on; beyond the last with the last slope, never below the last."""
    widths = sorted(line)
    above = next((i for i, w in enumerate(widths) if w >= n), len(widths) - 1)
    above = max(above, 1)
    low, high = widths[above - 1], widths[above]
    value = line[low] + (line[high] - line[low]) * (n - low) / (high - low)
    return max(value, line[high]) if n > high else value


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
        self.credit = 0.0  # in plain steps: for steps that look worth it
        self._is_started = False  # the first credit follows from what drafts cost
        self.saved = 0.0  # in plain steps: for probes
        self.choice: Choice | None = None
        self.n_steps = 0
        every = range(len(self.n_max))
        self.subsets = [s for size in range(1, len(self.n_max) + 1) for s in combinations(every, size)]
        self.forced: deque[tuple[int, tuple[int, ...]]] = deque()  # widths and drafters of the next steps
        self._turn = 0
        self._asked: dict[int, int] = {}  # first tries of each drafter
        self._shown = -1

    # -- before a step -----------------------------------------------------------------------------------------

    def choose(self, jobs: Sequence[int], most: Sequence[int]) -> Choice:
        """Lengths for the next step of `jobs`, job b at most most[b] (its own limit)."""
        self._follow(jobs)
        self.n_steps += 1
        choice = self._choose(jobs, most)
        self.choice = choice
        if choice.n != self._shown and not choice.is_probe:
            log.debug("draft length %d for %d stream(s): %s", choice.n, len(jobs), self.shown(len(jobs)))
            self._shown = choice.n
        return choice

    def _choose(self, jobs: Sequence[int], most: Sequence[int]) -> Choice:
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
        self._start(self.costs.of(batch, 1, min(FIRST_N, self.n_max[0])) / base)
        best = self._best(jobs, most)
        if best.n == 0:
            probe = self._probe(jobs, most)
            return probe if probe is not None and self._loss(batch, probe, base) <= self.saved else plain
        if self._loss(batch, best, base) > self.credit:
            return replace(best, is_probe=True)  # paid from what was saved
        if len(self.n_max) > 1 and self.n_steps % MEMBER_EVERY == 0:
            return self._other_member(jobs, most, best)
        return best

    def _start(self, cost: float) -> None:
        """The first credit, as soon as it is known what drafts cost (in plain steps)."""
        if not self._is_started and 0.0 < cost < inf:
            self.credit, self._is_started = min(1.0 + 1.5 * (cost - 1.0), MOST_AT_START), True

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
        if self._is_started:
            self.saved = min(self.saved + EARN_NEW * n_new / len(jobs), MOST_SAVED)

    def _loss(self, batch: int, choice: Choice, base: float) -> float:
        """In plain steps: what the step costs too much if no draft is right."""
        return self.costs.of(batch, _key(choice.asked), choice.n) / base - 1.0

    def _unmeasured(self, jobs: Sequence[int], most: Sequence[int]) -> Choice | None:
        """Before anything is known: plain steps and short drafts of each drafter."""
        costs, batch = self.costs, len(jobs)
        if not costs.ms or (len({b for b, _, _ in costs.ms}) == 1 and (batch, 0, 0) in costs.n_seen):
            if not costs.known(batch, 0, 0):
                return Choice.plain(batch)
            for m in range(len(self.n_max)):
                n = max(n for n in self.widths if n <= min(self.n_max[m], max(most), FIRST_N) or n == 0)
                tries = sum(seen for (b, key, _), seen in costs.n_seen.items() if b == batch and key == _key((m,)))
                if n and tries < 2 and self._asked.get(m, 0) < FIRST_TRIES:
                    self._asked[m] = self._asked.get(m, 0) + 1
                    return self._uniform(n, (m,), most)
        return None

    def _uniform(self, n: int, members: tuple[int, ...], most: Sequence[int], is_probe: bool = False) -> Choice:
        return Choice(n, [min(n, limit) for limit in most], [members] * len(most), is_probe)

    def _best(self, jobs: Sequence[int], most: Sequence[int]) -> Choice:
        """The width and drafters with the most expected tokens a millisecond, of those whose failure can be paid."""
        batch, base = len(jobs), self.costs.of(len(jobs), 0, 0)
        best, best_rate = Choice.plain(batch), PLAIN * batch / base
        now = self.choice.n if self.choice is not None and not self.choice.is_probe else -1
        budget, limits = max(self.credit, self.saved), np.asarray(most)
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
        probe = self._uniform(best.n, (others[self._turn % len(others)],), most, is_probe=True)
        loss = self._loss(len(jobs), probe, self.costs.of(len(jobs), 0, 0))
        return probe if loss <= self.credit else best

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
        self.credit, self.saved, self._is_started, self.choice = 0.0, 0.0, False, None
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
        base, cost = self.costs.of(batch, 0, 0), self.costs.of(batch, asked, width)
        if inf in (base, cost):
            return
        if choice.n:
            self._start(cost / base)
        gain = (batch + sum(n_accepted)) / batch - cost / base
        if choice.n == 0:
            self.saved += EARN
        elif choice.is_probe:  # what a probe wins pays it back first: the next one can follow at once
            stake, won = cost / base - 1.0, sum(n_accepted) / batch
            self.saved -= max(stake - won, 0.0)
            self.credit += max(won - stake, 0.0)
        else:
            self.credit += gain
        self.credit, self.saved = min(self.credit, MOST_CREDIT), min(self.saved, MOST_SAVED)

    def _learn(self, jobs: Sequence[int], choice: Choice, n_drafted: Sequence[int], n_accepted: Sequence[int],
               sources: Sequence[int]) -> None:
        rows = {job: row for row, job in enumerate(self.jobs)}
        present = [b for b, job in enumerate(jobs) if job in rows]  # others ended with the step
        for b in present:
            for m in choice.members[b]:
                spoke, row = n_drafted[b] > 0 and m == sources[b], rows[jobs[b]]
                self.speaks[row, m] += (1.0 - FORGET_SPEAKS) * (spoke - self.speaks[row, m])
                if spoke:
                    break
        drafted = [b for b in present if n_drafted[b] > 0]
        if not drafted:
            return
        by = np.array([sources[b] for b in drafted])
        n_max = self.worth.right.shape[-1]
        tried, right = counts([n_drafted[b] for b in drafted], [n_accepted[b] for b in drafted], n_max)
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
