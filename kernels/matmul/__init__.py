"""Quantized matmul: weights stay quantized in memory, a few rows are multiplied at the speed of reading them.

    weight = pack(raw, "Q4_K", (rows, columns), device)   # once, at load; unpack(weight) gives the bytes back
    group = fuse([q, k, v])                               # weights that share an input: one launch a type
    a = prepare(x)                                        # x [T, K], once per layer input
    q_out, k_out, v_out = matmul(a, group)                # float32 [T, rows_i] each

A row's result does not depend on the rows beside it: on the CPU for any number of rows, on CUDA for 1..192.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ggufspec.kernels.matmul import cuda, plain
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup, check_group, check_pack

__all__ = [
    "Activation", "PackedWeight", "WeightGroup", "fuse", "gather", "matmul", "pack", "prepare", "unpack",
]  # fmt: skip


def pack(
    raw: Tensor,
    type_name: str,
    shape: tuple[int, int],
    device: torch.device | str = "cpu",
    keep_dense: bool | None = None,
) -> PackedWeight:
    """File bytes uint8 [rows, row_bytes] (CPU) to the form the device's kernel reads.

    shape: (rows, columns). keep_dense: also hold float32 values, the CPU's default (4 bytes a weight, decoded
    once); False decodes at every use. Raises FileError when bytes and shape disagree, UnsupportedError for other
    types.
    """
    device = torch.device(device)
    check_pack(raw, type_name, shape)
    if device.type == "cpu":
        return plain.pack(raw, type_name, shape, device, keep_dense is not False)
    return cuda.pack(raw, type_name, shape, device)


def unpack(weight: PackedWeight) -> Tensor:
    """The bytes `pack` was given, uint8 [rows, row_bytes] on the CPU."""
    if weight.raw is not None:
        return weight.raw
    return cuda.unpack(weight)


def fuse(weights: Sequence[PackedWeight]) -> WeightGroup:
    """Weights with the same columns and device as one group, multiplied together."""
    check_group(tuple(weights))
    if weights[0].device.type == "cpu":
        return WeightGroup(tuple(weights))
    return cuda.fuse(tuple(weights))


def prepare(x: Tensor) -> Activation:
    """x [T, K] float to the order and type the kernels read; once per layer input, for every group of K columns."""
    if x.device.type == "cpu":
        return plain.prepare(x)
    from ggufspec.kernels.matmul import triton, wide

    with torch.cuda.device(x.device):  # Triton launches on the current device, not the tensors'
        return triton.prepare(x) if x.shape[0] <= cuda.NARROW_TOKENS else wide.prepare(x)


def matmul(a: Activation | Tensor, group: WeightGroup) -> tuple[Tensor, ...]:
    """Rows [T, K] times each weight's transpose: one float32 [T, rows_i] per weight, in the group's order."""
    if isinstance(a, Tensor):
        a = prepare(a)
    if a.n_columns != group.n_columns:
        raise ValueError(f"activation has {a.n_columns} columns, the weights {group.n_columns}")
    if a.rows.device.type == "cpu":
        return plain.matmul(a, group)
    with torch.cuda.device(a.rows.device):
        return cuda.matmul(a, group)


def gather(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] (int64) of the weight as float32 [T, columns]: the embedding lookup."""
    if weight.device.type == "cpu":
        return plain.gather(weight, ids)
    from ggufspec.kernels.matmul import triton

    with torch.cuda.device(weight.device):
        return triton.gather(weight, ids)
