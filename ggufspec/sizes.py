"""Loading that only measures: the loaders run as they are, and every tensor they ask for is counted, not read.

    weights = SizeWeights(file)
    model = load_model(file, placement, weights=weights)   # a model without a byte in it
    weights.n_bytes                                        # {device: bytes} that loading would take

So the planner cannot forget a tensor that a loader reads, nor count one that it leaves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from .kernels.fused import GatedPair
from .kernels.matmul import PackedWeight, WeightGroup
from .kernels.matmul.cuda import ROW_MULTIPLE
from .kernels.matmul.sizes import has_arrays, launch_bytes, packed_bytes
from .weights import Part, Range, Weights, extent

if TYPE_CHECKING:
    from .gguf_file import GGUFFile


@dataclass(frozen=True)
class Vector:
    """Stands for a small tensor: its shape and place."""

    shape: tuple[int, ...]
    device: torch.device
    count: Callable[[int], None] | None = field(default=None, compare=False, repr=False)  # is told of copies' bytes

    @property
    def T(self) -> Vector:  # noqa: N802  # as a tensor calls it
        return Vector(self.shape[::-1], self.device, self.count)

    def contiguous(self) -> Vector:
        """Only asked for where the order of elements changes: a copy, in float32."""
        if self.count is not None:
            self.count(4 * prod(self.shape))
        return self

    def to(self, target: Any) -> Vector:
        return Vector(self.shape, target) if isinstance(target, torch.device) else self

    def split(self, sizes: Sequence[int]) -> list[Vector]:
        return [Vector((n,), self.device) for n in sizes]


class SizeWeights(Weights):
    """`Weights` whose matrices and vectors have shapes but no contents. Devices are names: none has to exist."""

    def __init__(self, file: GGUFFile):
        super().__init__(file)
        self.n_bytes: Counter[torch.device] = Counter()
        self.by_unit: Counter[str] = Counter()  # the same by "blk.N", "embedding" and "output" (all the rest)

    def _add(self, device: torch.device, name: str, n_bytes: int, otherwise: str = "output") -> None:
        block = re.match(r"blk\.\d+", name)
        self.n_bytes[device] += n_bytes
        self.by_unit[block[0] if block else otherwise] += n_bytes

    def _pack(self, part: Part, device: torch.device) -> PackedWeight:
        info = self._info(part.name, part.shape)
        for columns in part.columns or ():
            self._byte_range(info, columns)  # refuses cuts inside a block
        shape = extent(part.rows, part.shape[0]), extent(part.columns, part.shape[1])
        return PackedWeight(info.layout.name, shape, device)

    def matrix(self, name: str, shape: Sequence[int], device: torch.device, *,
               rows: Sequence[Range] | None = None, columns: Sequence[Range] | None = None) -> PackedWeight:
        part = Part.of(name, shape, rows, columns)
        if (part, device) not in self._packed:
            self._packed[part, device] = self._pack(part, device)
            self._add(device, name, self._alone(self._packed[part, device]), "embedding")
        return self._packed[part, device]

    def group(self, device: torch.device, *parts: Part | tuple[str, Sequence[int]]) -> WeightGroup:
        named = tuple(part if isinstance(part, Part) else Part.of(*part) for part in parts)
        if (named, device) not in self._groups:
            held = [self._packed.get((part, device)) for part in named]
            weights = tuple(have or self._pack(part, device) for part, have in zip(named, held))
            self._add(device, named[0].name, self._fused(weights, [have is not None for have in held]))
            self._groups[named, device] = WeightGroup(weights)
        return self._groups[named, device]

    def subgroup(self, name: str, group: WeightGroup, start: int) -> WeightGroup:
        weights = group.weights[start:]
        device = weights[0].device
        stays = [not (device.type == "cuda" and has_arrays(w.type_name)) for w in weights]
        self._add(device, name, self._fused(weights, stays))
        return WeightGroup(weights)

    def pair(self, device: torch.device, gate: Part, up: Part) -> GatedPair:
        weights = self._pack(gate, device), self._pack(up, device)
        first, second = weights
        if device.type == "cuda" and first.type_name == second.type_name and has_arrays(first.type_name):
            n_bytes = launch_bytes(first.type_name, [2 * first.shape[0]], first.shape[1])  # rows of both in turn
        else:
            n_bytes = self._fused(weights, (False, False))
        self._add(device, gate.name, n_bytes)
        return GatedPair(group=WeightGroup(weights))

    def vector(self, name: str, shape: Sequence[int], device: torch.device,  # type: ignore[override]
               rows: Sequence[Range] | None = None) -> Vector:
        info = self._info(name, shape)
        size = 8 if info.layout.name in ("I32", "I64") else 4
        n = extent(rows, shape[0])
        self._add(device, name, size * prod((n, *shape[1:])))
        return Vector((n, *shape[1:]), device, partial(self._add, device, name))

    def _alone(self, weight: PackedWeight) -> int:
        return packed_bytes(weight.type_name, weight.shape, weight.device.type == "cuda")

    def _fused(self, weights: Sequence[PackedWeight], held: Sequence[bool]) -> int:
        """What a group adds: on CUDA the weights of a type move into common arrays, on the CPU they stay apart."""
        total = 0
        by_type: dict[str, list[int]] = {}
        for k, weight in enumerate(weights):
            if weight.device.type == "cuda" and has_arrays(weight.type_name):
                by_type.setdefault(weight.type_name, []).append(k)
            elif not held[k]:
                total += self._alone(weight)
        for type_name, members in by_type.items():
            first = weights[members[0]]
            n_bytes = launch_bytes(type_name, [weights[k].shape[0] for k in members], first.shape[1])
            if len(members) == 1 and held[members[0]] and first.shape[0] % ROW_MULTIPLE == 0:
                n_bytes -= self._alone(first)  # one weight that needs no padding is used where it lies
            total += n_bytes
        return total
