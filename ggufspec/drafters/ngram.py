"""What the n-gram drafters share: history on the host, lists in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from . import Draft
from .history import History, Tokens
from .statistics import Statistics

if TYPE_CHECKING:
    from ..rows import Rows


class NgramDrafter:
    """A drafter without a model. Subclasses say how one slot's text is continued."""

    taps: tuple[int, ...] = ()
    capturable = False

    def __init__(self, name: str, n_max: int, n_slots: int, n_ctx: int) -> None:
        self.name = name
        self.n_max = n_max  # what is asked of it; a kind's own size stays as set
        self.history = History(n_slots, n_ctx)
        self.drafted: dict[int, int] = {}  # slot -> tokens of the draft that awaits acceptance
        self.stats = Statistics(name, n_max)

    # Filled in by the kinds.

    def index(self, slot: int, prompt: Tokens) -> None:
        """A prompt is complete."""

    def continue_text(self, slot: int, text: Tokens, last: int) -> list[int]:
        raise NotImplementedError

    def learn(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        """A draft of this drafter was verified."""

    def forget(self, slot: int) -> None:
        """The slot starts over."""

    # The protocol.

    def begin(self, slot: int, prompt: list[int]) -> None:
        self.history.write(slot, 0, prompt)
        self.index(slot, self.history.text(slot, len(prompt)))

    def observe(self, rows: Rows, output: Any) -> None:
        self.history.observe(rows)

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        tokens = np.zeros((len(slots), n), dtype=np.int64)
        n_tokens = np.zeros(len(slots), dtype=np.int64)
        for b, (slot, id, past) in enumerate(zip(slots.tolist(), last.tolist(), n_past.tolist())):
            draft = self.continue_text(slot, self.history.text(slot, past), id)
            self.drafted.pop(slot, None)
            if draft:
                self.drafted[slot] = len(draft)
            n_tokens[b] = min(len(draft), n)
            tokens[b, : n_tokens[b]] = draft[:n]
        device = slots.device
        scores = torch.ones((len(slots), n), dtype=torch.float32, device=device)
        return Draft(torch.from_numpy(tokens).to(device), torch.from_numpy(n_tokens).to(device), scores)

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        for slot, accepted in zip(slots.tolist(), n_accepted.tolist()):
            # Without an open draft the step was plain or another drafter's: nothing to learn from it.
            n_drafted = self.drafted.pop(slot, 0)
            if n_drafted:
                self.learn(slot, n_drafted, accepted)

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        self.stats.record(n_drafted, n_accepted)

    def mutable(self) -> list[Tensor]:
        return []

    def reset(self, slot: int) -> None:
        self.drafted.pop(slot, None)
        self.forget(slot)

    def save(self, slot: int, n_past: int) -> Tensor:
        return torch.from_numpy(self.history.text(slot, n_past).copy())

    def check(self, state: Tensor) -> None:
        n_ctx = self.history.tokens.shape[1]
        if len(state) > n_ctx:
            raise ConfigError(f"the saved slot's text has {len(state)} tokens, a slot here holds {n_ctx}")

    def restore(self, slot: int, state: Tensor) -> None:
        self.reset(slot)
        self.history.write(slot, 0, state.numpy())

    def checkpoint(self, slot: int, n_past: int) -> None:
        """Nothing is lost by going back: the text before stays, `begin` drops what was indexed beyond it."""

    def rewind(self, slot: int, state: None) -> None:
        self.drafted.pop(slot, None)


def check_range(option: str, value: int, low: int, high: int | None) -> None:
    """An n-gram size outside what llama.cpp accepts is refused in one line."""
    if value < low or (high is not None and value > high):
        allowed = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ConfigError(f"{option} is {value}, expected {allowed}")
