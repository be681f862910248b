"""What a step costs in milliseconds: measured by its size, drafters and width; the rest is inferred from these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

RATE = 0.1  # weight of a new time in the running average
OUTLIER = 2.0  # a time counts as at most this many times the average, and not at all unless the next is like it
SPREAD = 2000  # steps over which a width that was never used must win back what its first use costs


def _unpadded(n_streams: int, n: int) -> int:
    return n_streams


@dataclass
class Costs:
    """Milliseconds by (entries of the step, drafters asked, width).

    A captured step has more entries than streams: what counts is how many are computed. `entries` says how many a step
    has, given its streams and its width.
    """

    entries: Callable[[int, int], int] = _unpadded
    ms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    n_seen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    capture_ms: float = inf  # what the first step of a width costs beyond the step: the least of what looked like it
    _odd: set[tuple[int, int, int]] = field(default_factory=set)  # the last time was an outlier
    # what was asked since the last time came in, and sizes, as long as `entries` is the same
    _answers: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _lines: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    _sizes_of: Callable[[int, int], int] | None = None

    def record(self, batch: int, members: int, n: int, ms: float) -> None:
        """The first time of a key is dropped: it compiles or captures. `members` is 0 where n is."""
        self._take(batch, members, n, ms)
        self._answers.clear()
        self._lines.clear()

    def _take(self, batch: int, members: int, n: int, ms: float) -> None:
        key = self._key(batch, members, n)
        self.n_seen[key] = self.n_seen.get(key, 0) + 1
        if self.n_seen[key] == 1:
            self._look_for_capture(ms, self.of(batch, members, n))
            return
        old = self.ms.get(key)
        if old is None:  # nor is a time believed at once that is far from what the others say
            if ms > OUTLIER * self.of(batch, members, n) and key not in self._odd:
                self._odd.add(key)
                return
            self._odd.discard(key)
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
        if rate > RATE:  # it settles, nothing has changed
            return
        change = (new / old) ** 0.5
        for other in self.ms:  # half of a lasting change is the machine's or the context's: it concerns all lengths
            if other[0] == key[0] and other != key:
                self.ms[other] *= change

    def _size(self, batch: int, n: int) -> int:
        """`entries`, remembered."""
        if self._sizes_of is not self.entries:
            self._sizes_of = self.entries
            self._sizes.clear()
            self._answers.clear()
            self._lines.clear()
        size = self._sizes.get((batch, n))
        if size is None:
            size = self._sizes[batch, n] = self.entries(batch, n)
        return size

    def _key(self, batch: int, members: int, n: int) -> tuple[int, int, int]:
        return self._size(batch, n), members if n else 0, n

    def _look_for_capture(self, ms: float, expected: float) -> None:
        if OUTLIER * expected < ms:
            self.capture_ms = min(self.capture_ms, ms - expected)

    def newness(self, batch: int, members: int, n: int) -> float:
        """Milliseconds to add to a step that was never taken: on a GPU the first captures it."""
        if self.capture_ms == inf or self.is_seen(batch, members, n):
            return 0.0
        return self.capture_ms / SPREAD

    def shown(self, batch: int) -> str:
        """The measured widths of a number of streams, with any drafters."""
        rows = sorted((n, ms) for (size, _, n), ms in self.ms.items() if size == self._size(batch, n))
        return ", ".join(f"{n} drafted {ms:.2f} ms" for n, ms in rows) or "none"

    def known(self, batch: int, members: int, n: int) -> bool:
        return self._key(batch, members, n) in self.ms

    def is_seen(self, batch: int, members: int, n: int) -> bool:
        """Whether there was such a step, its time kept or not."""
        return self._key(batch, members, n) in self.n_seen

    def n_steps(self, batch: int, members: int) -> int:
        """Steps of this size with these drafters, of any width."""
        every = self.n_seen.items()
        return sum(seen for (size, m, n), seen in every if m == members and size == self._size(batch, n))

    def is_first(self, batch: int) -> bool:
        """Whether nothing is measured but steps of this size."""
        return all(size == self._size(batch, n) for size, _, n in self.ms)

    def of(self, batch: int, members: int, n: int) -> float:
        """Expected milliseconds; inf when nothing at all is known."""
        key = (batch, members, n)
        answer = self._answers.get(key) if self._sizes_of is self.entries else None
        if answer is None:
            answer = self._of(batch, members, n)  # clears the answers where sizes have changed
            self._answers[key] = answer
        return answer

    def _of(self, batch: int, members: int, n: int) -> float:
        members = members if n else 0
        found = self.ms.get(self._key(batch, members, n))
        if found is not None and n > 0:
            return found
        if found is not None:  # a plain step does not take longer than one with drafts: its time would be an accident
            return min(ms for (size, _, n), ms in self.ms.items() if size == self._size(batch, n))
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
        """Measured widths of one number of streams and set of drafters, the plain step included."""
        line = self._lines.get((batch, members))
        if line is None:
            every, these = self.ms.items(), (members, 0)
            line = {n: ms for (size, m, n), ms in every if m in these and size == self._size(batch, n)}
            self._lines[batch, members] = line
        return line

    def _like(self, batch: int, members: int, n: int) -> float:
        """From the nearest size that is measured better, scaled by a width that both know."""
        here, mine = self._line(batch, members), self._size(batch, n)
        for other in sorted({size for size, _, _ in self.ms}, key=lambda size: abs(size - mine)):
            line = {n: ms for (size, m, n), ms in self.ms.items() if size == other and m in (members, 0)}
            if len(line) > 1 or n in line:
                scale = next((ms / line[m] for m, ms in here.items() if m in line), 1.0)
                return scale * (line[n] if n in line else _on_line(line, n))
        return inf


def _on_line(line: dict[int, float], n: int) -> float:
    """Between measured widths straight on; beyond the last with the last slope, never below the last."""
    widths = sorted(line)
    above = next((i for i, w in enumerate(widths) if w >= n), len(widths) - 1)
    above = max(above, 1)
    low, high = widths[above - 1], widths[above]
    value = line[low] + (line[high] - line[low]) * (n - low) / (high - low)
    return max(value, line[high]) if n > high else value
