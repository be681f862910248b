"""Drafters propose tokens for the next step. They never sample for the target and never touch its cache.

A step asks `propose` for up to n tokens per slot, runs `[last, draft...]` through the target, hands those
rows to `observe` and the number of right ones to `accept`. Whatever a drafter wrote into its own cache while
proposing lies at positions >= n_past and is overwritten by the next `observe` or `propose`: visibility is by
n_past alone.

Drafters with a model keep everything in device tensors (no host synchronization); n-gram drafters are host
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..handover import hand_over
from ..kernels.kv import KV, fits
from ..kernels.select import n_passing

if TYPE_CHECKING:
    from ..rows import Rows
    from .statistics import Statistics


@dataclass(frozen=True)
class Draft:
    """What was proposed. Tokens at or past `n_tokens` are meaningless."""

    tokens: Tensor  # [B, n] int64
    n_tokens: Tensor  # [B] int64, 0..n
    scores: Tensor  # [B, n] float32, what p_min is compared with; 1 where a drafter has none

    def to(self, device: torch.device) -> Draft:
        return Draft(*hand_over([self.tokens, self.n_tokens, self.scores], device))


@dataclass(frozen=True)
class DraftOptions:
    """Limits shared by the drafters that have a model; llama.cpp's defaults."""

    n_max: int = 3
    n_min: int = 0  # a shorter draft is thrown away
    p_min: float = 0.0  # stop before the first token whose score is below


class Drafter(Protocol):
    name: str  # llama.cpp's type name, "draft-mtp"...
    n_max: int  # tokens it can propose per step, after clamping to what it was trained for
    taps: tuple[int, ...]  # target layers whose input it reads
    capturable: bool  # propose, observe and accept are work of the steps' devices alone: CUDA graphs can hold them
    stats: Statistics  # the caller adds calls and their times, `record` the counts

    def begin(self, slot: int, prompt: list[int]) -> None:
        """A prompt is complete in the target; n-gram drafters index it."""

    def observe(self, rows: Rows, output: Any) -> None:
        """After every target forward, prompt chunks included: bring the own cache up to date with all rows.

        `output` has `hidden` [B, W, D] and `taps` [B, W, m*D] (see `models.Output`).
        """

    def propose(self, slots: Tensor, last: Tensor, n_past: Tensor, n: int) -> Draft:
        """Draft what follows `last` [B], which will stand at position `n_past` [B] of `slots` [B].

        `n` <= n_max is the width of the result, and of a block, whose tokens depend on it a little. Entries with
        n_past -1 are padding: their slots stay as they are.
        """

    def accept(self, slots: Tensor, n_accepted: Tensor) -> None:
        """How many drafted tokens were right in the last tentative step, per slot [B]; 0 without a draft, -1 for
        padding."""

    def record(self, slot: int, n_drafted: int, n_accepted: int) -> None:
        """Count a verified draft in the statistics, once the host knows the numbers."""

    def mutable(self) -> list[Tensor]:
        """Tensors that running a stage twice would change twice."""

    def reset(self, slot: int) -> None:
        """Forget the slot: its next position is 0."""

    def save(self, slot: int, n_past: int) -> Any:
        """All of the slot's state after `n_past` committed tokens, on the host; goes with the target's."""

    def check(self, state: Any) -> None:
        """ConfigError when a saved state does not fit this drafter; nothing is written."""

    def restore(self, slot: int, state: Any) -> None:
        """Put a saved state, which has been checked, into any slot."""

    def checkpoint(self, slot: int, n_past: int) -> Any:
        """What going back to `n_past` in the same slot would otherwise lose; small, stays on the device."""

    def rewind(self, slot: int, state: Any) -> None:
        """Go back to a checkpoint of the same slot and the same text."""


def check_cells(kvs: Sequence[KV], saved: Sequence[Any], name: str) -> None:
    """ConfigError unless each saved pair of cells fits its cache."""
    if len(kvs) != len(saved) or not all(fits(own, pair) for own, pair in zip(kvs, saved)):
        raise ConfigError(f"the saved slot's {name} cache has other types, sizes or layers than this drafter's")


def limit(tokens: Tensor, scores: Tensor, n: int, n_min: int, p_min: float) -> Draft:
    """Apply p_min (stop before the first score below it), n_min (shorter is nothing), then cut to n tokens.

    tokens [B, N] int64, scores [B, N] float32, n <= N.
    """
    if p_min <= 0.0:  # the count is known
        count = 0 if tokens.shape[1] < n_min else n
        return Draft(tokens[:, :n], torch.full_like(tokens[:, 0], count), scores[:, :n])
    kept = n_passing(scores, p_min)
    kept = torch.where(kept < n_min, 0, kept)
    return Draft(tokens[:, :n], kept.clamp(max=n), scores[:, :n])


def device_of(drafter: Drafter | None, default: torch.device) -> torch.device:
    """Where the drafters with a model lie; they all lie on one device."""
    members = getattr(drafter, "members", [drafter])
    return next((member.device for member in members if hasattr(member, "device")), default)
