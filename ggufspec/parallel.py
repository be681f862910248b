"""Tensor parallelism: one process a device, every matrix cut by rows or by whole blocks of columns.

Row-cut matrices (q, k, v, gate, up, the head) give each rank some of the outputs; column-cut ones (attention output,
down, SSM output) give each rank a part of the sum, which `Shard.sum` adds up in rank order, so that the result does
not depend on how many rows a step has. What cannot be cut into whole units for every rank is mirrored: each rank
computes all of it.

Sums of a step's few rows go through memory that all ranks map, where the cards allow it (see kernels.peer and peers),
and are left undone until the next norm, which does them on the way: `later` and `add_rms_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PlacementError
from .kernels import peer, prepared
from .kernels.matmul import Activation

Range = tuple[int, int]  # start, stop

# Renamed in newer PyTorch; the old name warns there.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

WIDE_ROWS = 64  # from here on sums go through the library's all-reduce: prompts need no invariance across widths


@dataclass(frozen=True)
class Shard:
    """One rank's part. `shares` are the ratios of `--tensor-split`, one a rank."""

    rank: int = 0
    shares: tuple[float, ...] = (1.0,)
    group: Any = None  # a torch.distributed process group; None: one process
    link: peer.Link | None = field(default=None, compare=False)  # memory that all ranks map; None: through the group

    @property
    def size(self) -> int:
        return len(self.shares)

    def bounds(self, n: int, granularity: int = 1) -> list[Range] | None:
        """Each rank's range of n: cumulative share, rounded down to the granularity; the last rank takes the rest.

        None when a rank would get nothing: then the thing is mirrored.
        """
        if self.size == 1:
            return [(0, n)]
        total, ends = sum(self.shares), []
        for r in range(self.size - 1):
            exact = n * sum(self.shares[: r + 1]) / total
            ends.append(int(exact) // granularity * granularity)
        ranges = list(zip([0, *ends], [*ends, n]))
        return ranges if all(stop > start for start, stop in ranges) else None

    def sum(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors [.., D], in rank order for a step's few rows."""
        if self.group is None:
            return x
        if self.link is not None and self.link.takes(x):
            return peer.sum_parts(x, self.link)
        if x.numel() // x.shape[-1] > WIDE_ROWS:
            dist.all_reduce(x, group=self.group)
            return x
        parts = x.new_empty(self.size, *x.shape)
        all_gather(parts.view(-1), x.contiguous().view(-1), group=self.group)
        total = parts[0]
        for r in range(1, self.size):
            total = total + parts[r]
        return total

    def later(self, x: Tensor) -> Addend:
        """`sum`, left to whoever adds it to something when that is cheaper."""
        if self.link is not None and self.link.takes(x):
            return Unsummed(x, self.link)
        return self.sum(x)

    def join(self, x: Tensor, bounds: Sequence[Range]) -> Tensor:
        """The ranks' columns [T, n_r] as one [T, n], on every rank."""
        if self.group is None:
            return x
        widest = max(stop - start for start, stop in bounds)
        padded = x if x.shape[-1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        parts = x.new_empty(self.size, x.shape[0], widest)
        all_gather(parts.view(-1), padded.contiguous().view(-1), group=self.group)
        return torch.cat([parts[r, :, : stop - start] for r, (start, stop) in enumerate(bounds)], dim=-1)


WHOLE = Shard()


@dataclass(frozen=True)
class Unsummed:
    """This rank's part [.., D] of a sum that is still to be made."""

    part: Tensor
    link: peer.Link

    def view(self, shape: Sequence[int]) -> Unsummed:
        return Unsummed(self.part.view(shape), self.link)


Addend = Tensor | Unsummed  # what a sub-layer adds to the residual stream


def summed(y: Addend) -> Tensor:
    """The addend itself, the same on every rank."""
    return peer.sum_parts(y.part, y.link) if isinstance(y, Unsummed) else y


def add_rms_norm(x: Tensor, delta: Addend | None, weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    """`kernels.prepared.add_rms_norm`, with the sum between ranks in the same launch if it is still to be made."""
    if isinstance(delta, Unsummed):
        return peer.sum_add_rms_norm(x, delta.part, weight, eps, delta.link)
    return prepared.add_rms_norm(x, delta, weight, eps)


@dataclass(frozen=True)
class Cut:
    """How a sub-layer of n units is cut: this rank's range, or all of it when it is mirrored."""

    start: int
    stop: int
    mirrored: bool

    @property
    def n(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, shard: Shard, n: int, granularity: int = 1) -> Cut:
        bounds = shard.bounds(n, granularity)
        if bounds is None:
            return cls(0, n, True)
        start, stop = bounds[shard.rank]
        return cls(start, stop, shard.size == 1)

    def scaled(self, size: int, offset: int = 0) -> Range:
        """The units as a range of rows or columns, `size` of them a unit."""
        return offset + self.start * size, offset + self.stop * size


def unit_granularity(unit: int, block: int) -> int:
    """Units of `unit` columns that fill whole blocks of `block` columns."""
    return lcm(unit, block) // unit


def check_group(shard: Shard) -> None:
    """Refuse shares that leave a rank without work; devices with share 0 take no part in a group."""
    if min(shard.shares) <= 0:
        raise PlacementError(f"--tensor-split {shard.shares}: every rank of a tensor split needs a share above 0")
