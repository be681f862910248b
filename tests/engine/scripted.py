"""Drafters without a model for tests: right a scripted number of times, random, or nonsense."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ggufspec.drafters import Draft
from ggufspec.drafters.statistics import Statistics


class Scripted:
    """Proposes by `script(slot, n_past, n) -> tokens`. Knows nothing of the model."""

    name = "scripted"
    taps: tuple[int, ...] = ()
    capturable = False

    def __init__(self, script: Callable[[int, int, int], Sequence[int]], n_max: int = 7):
        self.script = script
        self.n_max = n_max
        self.stats = Statistics(self.name, n_max)
        self.calls: list[tuple[int, int]] = []  # (n_past, tokens proposed)

    def begin(self, slot: int, prompt: list[int]) -> None: ...
    def observe(self, rows: object, output: object) -> None: ...
    def accept(self, slots: Tensor, n_accepted: Tensor) -> None: ...
    def reset(self, slot: int) -> None: ...
    def save(self, slot: int, n_past: int) -> None: ...
    def check(self, state: object) -> None: ...
    def restore(self, slot: int, state: object) -> None: ...
    def checkpoint(self, slot: int, n_past: int) -> None: ...
    def rewind(self, slot: int, state: object) -> None: ...

    def mutable(self) -> list[Tensor]:
        return []

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        tokens = torch.zeros(len(slots), n, dtype=torch.int64)
        counts = torch.zeros(len(slots), dtype=torch.int64)
        for b, (slot, past) in enumerate(zip(slots.tolist(), n_past.tolist())):
            drafted = list(self.script(slot, past, n))[:n]
            tokens[b, : len(drafted)] = torch.tensor(drafted, dtype=torch.int64)
            counts[b] = len(drafted)
            self.calls.append((past, len(drafted)))
        return Draft(tokens, counts, torch.ones(len(slots), n))


def knowing(stream: Sequence[int], n_prompt: int, right: Callable[[int], int], n_vocab: int) -> Scripted:
    """Knows the answer `stream` after a prompt of `n_prompt` tokens: step k's draft is right for right(k) tokens."""
    step = -1
    noise = random.Random(5)

    def script(slot: int, n_past: int, n: int) -> list[int]:
        nonlocal step
        step += 1
        at = n_past - n_prompt + 1  # index in stream of the first token to guess
        good = list(stream[at : at + min(right(step), n)])
        return good + [noise.randrange(n_vocab) for _ in range(n - len(good))]

    return Scripted(script)


def lengths(stream: Sequence[int], n_prompt: int, script: Sequence[int]) -> Scripted:
    """Drafts of scripted lengths, all right."""
    step = -1

    def propose(slot: int, n_past: int, n: int) -> list[int]:
        nonlocal step
        step += 1
        at = n_past - n_prompt + 1
        return list(stream[at : at + min(script[step % len(script)], n)])

    return Scripted(propose)


def noise(n_vocab: int, seed: int = 1, outside: bool = False) -> Scripted:
    generator = random.Random(seed)
    top = n_vocab * 3 if outside else n_vocab
    return Scripted(lambda slot, past, n: [generator.randrange(-5 if outside else 0, top) for _ in range(n)])
