"""`--tensor-split auto`: the shares that leave room for the longest context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .cache import KVLayer, RecurrentLayer
from .errors import ConfigError
from .kernels.kv import CELL_CHUNK
from .measured import META
from .planner import Planner
from .question import Question

UNITS = 16  # a tensor split's shares are sixteenths
STEP_BYTES = 16 << 20  # how closely the room of devices is made equal


def best_split(q: Question) -> tuple[float, ...]:
    """Shares for `q` (its own are ignored), () where there is nothing to choose.

    ConfigError when no split has room for 256 cells a slot, or where a device has no limit to weigh.
    """
    if len(q.devices) < 2 or q.split == "none" or q.gpu_layers == 0:
        return ()
    if any(memory is None for memory in q.memory):
        raise ConfigError("--tensor-split auto weighs the memory of GPUs; give numbers for CPU devices")
    shares = _tensor(q) if q.is_tensor else _LayerSplit(q).best()
    if shares is None:
        raise ConfigError(f"--tensor-split auto: no split over {len(q.devices)} devices has room for {q.file.path}")
    return shares


class _LayerSplit:
    """Layers in order on devices in order. Everything is measured once, on one device, and added up by layer."""

    def __init__(self, q: Question):
        self.q = q
        device = q.devices[0]
        self.planner = Planner(replace(q, devices=(device,), memory=(None,), shares=(), split="none", main_gpu=0,
                                       gpu_layers=-1, draft_device=device))
        (self.whole,) = self.planner.processes
        self.n_units = q.config.block_count + 1  # MTP blocks count, the output too: llama.cpp's reckoning
        self.active = min(q.gpu_layers, self.n_units) if q.gpu_layers >= 0 else self.n_units

    def best(self) -> tuple[float, ...] | None:
        """The longest context for which filling the devices in order places every layer; of the splits that have
        it, the one that leaves the same room everywhere."""
        most = -(-self.q.config.context_length // CELL_CHUNK)
        cells = _last(lambda n: self.fill(n * CELL_CHUNK, 0) is not None, 1, most)
        if cells is None:
            return None
        n_ctx = cells * CELL_CHUNK
        top = max(memory or 0 for memory in self.q.memory) // STEP_BYTES
        reserve = _last(lambda r: self.fill(n_ctx, r * STEP_BYTES) is not None, 0, top)
        assert reserve is not None
        counts = self.fill(n_ctx, reserve * STEP_BYTES)
        return None if counts is None else tuple(map(float, counts))

    def fill(self, n_ctx: int, reserve: int) -> list[int] | None:
        """Units per device when each takes as many as it can, `reserve` bytes left free; None: some found no place."""
        q = self.q
        sums = self.planner.plan(n_ctx).parts[q.devices[0]]
        drafter = sums["draft weights"] + sums["draft KV"]
        costs = [self.cost(i, n_ctx) for i in range(self.n_units - self.active, self.n_units)]
        costs[-1] += self.whole.by_unit["output"] + (drafter if q.draft_device is None else 0)
        if self.active == self.n_units:
            costs[0] += self.whole.by_unit["embedding"]
        counts, at = [], 0
        for device, memory in zip(q.devices, q.memory):
            room = (memory or 0) - reserve - sums["workspace"] - (drafter if device == q.draft_device else 0)
            first = at
            while at < len(costs) and costs[at] <= room:
                room -= costs[at]
                at += 1
            counts.append(at - first)
        return counts if at == len(costs) else None

    def cost(self, unit: int, n_ctx: int) -> int:
        """Bytes of a layer with its caches; 0 for units that are no layer of the target."""
        if unit >= len(self.whole.model.cache_layers):
            return 0
        layer = self.whole.model.cache_layers[unit]
        assert isinstance(layer, KVLayer | RecurrentLayer)
        return self.whole.by_unit[f"blk.{unit}"] + self.planner.layer_bytes(replace(layer, device=META), n_ctx)


def _tensor(q: Question) -> tuple[float, ...] | None:
    """Climb from equal shares and from shares like the memories: a sixteenth at a time moves while that helps."""
    known: dict[tuple[int, ...], tuple[int, int]] = {}

    def worth(units: tuple[int, ...]) -> tuple[int, int]:
        """(largest context, least room left at it)"""
        if units not in known:
            planner = Planner(replace(q, shares=tuple(map(float, units))))
            n_ctx = planner.largest()
            plan = planner.plan(max(n_ctx, CELL_CHUNK))  # without room: how little is missing
            known[units] = n_ctx, min((memory or 0) - plan.total(device) for device, memory in zip(q.devices, q.memory))
        return known[units]

    total = sum(memory or 0 for memory in q.memory)
    starts = {_whole([1.0] * len(q.devices)), _whole([len(q.devices) * (memory or 0) / total for memory in q.memory])}
    for units in starts:
        best = units
        while True:
            better = max(_neighbours(best), key=worth, default=best)
            if worth(better) <= worth(best):
                break
            best = better
    best = max(known, key=worth)
    return tuple(map(float, best)) if worth(best)[0] > 0 else None


def _whole(weights: list[float]) -> tuple[int, ...]:
    """Weights to whole units, at least one each, that sum to UNITS (or one a device where there are more)."""
    units = max(UNITS, len(weights))
    counts = [max(1, int(units * w / sum(weights))) for w in weights]
    while sum(counts) != units:
        at = max(range(len(counts)), key=lambda i: (units * weights[i] / sum(weights) - counts[i])
                 * (1 if sum(counts) < units else -1))
        counts[at] += 1 if sum(counts) < units else -1
    return tuple(counts)


def _neighbours(units: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i in range(len(units)):
        for j in range(len(units)):
            if i != j and units[i] > 1:
                yield tuple(n - (k == i) + (k == j) for k, n in enumerate(units))


def _last(holds, low: int, high: int) -> int | None:  # type: ignore[no-untyped-def]
    """The largest n in low..high for which `holds`, which is true up to some n; None if not even for low."""
    if not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
