"""Two weights [F, K] that multiply the same input and then each other: a gated feed-forward layer's gate and up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ggufspec.kernels.matmul import Activation, PackedWeight, WeightGroup, fuse, matmul

if TYPE_CHECKING:
    from ggufspec.kernels.matmul.cuda import Launch

EIGHT = 8  # rows of gate, then of up: both halves of a tensor core's sixteen rows are one thread's


@dataclass(frozen=True)
class GatedPair:
    """Either a launch whose rows are eight of gate and eight of up in turn, or the two as a group."""

    launch: Launch | None = None
    group: WeightGroup | None = None


def join(gate: PackedWeight, up: PackedWeight) -> GatedPair:
    """One launch where a kernel for it exists: weights of one type in the kernels' arrays. Drop the ones given."""
    kernel = gate.device.type == "cuda" and gate.type_name == up.type_name and gate.shape[0] % EIGHT == 0
    if kernel and "low" in gate.parts and "low" in up.parts:
        from ggufspec.kernels.matmul import cuda

        if cuda.capability(gate.device.index) >= (8, 0):
            return GatedPair(launch=cuda.interleave(gate, up, EIGHT))
    return GatedPair(group=fuse([gate, up]))


def split(a: Activation, pair: GatedPair) -> tuple[Tensor, Tensor]:
    """The two products [T, F], float32; views of one tensor where the weights are one launch."""
    if pair.group is not None:
        gate, up = matmul(a, pair.group)
        return gate, up
    from ggufspec.kernels.matmul import cuda, narrow, wide

    assert pair.launch is not None
    (n_rows,) = pair.launch.n_rows
    if a.rows.shape[0] <= cuda.NARROW_TOKENS:
        (y,) = narrow.run(pair.launch, a)
    else:
        y = wide.multiply_launch(a, pair.launch)[:, :n_rows]
    halves = y.unflatten(1, (-1, 2, EIGHT))
    return halves[:, :, 0].flatten(1), halves[:, :, 1].flatten(1)
