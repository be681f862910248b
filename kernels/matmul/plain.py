"""Quantized matmul on the CPU: the kernels' twin.

Rows are multiplied in tiles of exactly 16, padded with zeros, so that the library meets one shape only and a
row's result does not depend on how many rows stand beside it, nor on which.
"""

import torch
from torch import Tensor

from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

TILE_ROWS = 16
DECODE_ROWS = 4096  # weight rows decoded at a time when no dense copy is kept


def pack(raw: Tensor, type_name: str, shape: tuple[int, int], device: torch.device, keep_dense: bool = True
         ) -> PackedWeight:
    """Keep the bytes (no copy) and, with `keep_dense`, their float32 values: fast, at 4 bytes a weight. device: the CPU
    or one of its logical devices, for the weight's users."""
    dense = decode(raw, type_name) if keep_dense else None
    return PackedWeight(type_name, shape, device, raw=raw, dense=dense)


def prepare(x: Tensor) -> Activation:
    return Activation(x.float().contiguous(), x.shape[-1])


def dense_rows(weight: PackedWeight, start: int, stop: int) -> Tensor:
    """Rows start..stop of the weight in float32."""
    if weight.dense is not None:
        return weight.dense[start:stop]
    assert weight.raw is not None
    return decode(weight.raw[start:stop], weight.type_name)


def multiply(a: Activation, weight: PackedWeight) -> Tensor:
    """[T, K] times the weight's transpose: float32 [T, rows].

    Weights decoded piecewise give the same bits as dense ones: every piece meets the same tiles, and a result is
    a sum over K alone.
    """
    x, n_rows = a.rows, weight.shape[0]
    n_tiles = -(-x.shape[0] // TILE_ROWS)
    tiles = x.new_zeros(n_tiles * TILE_ROWS, x.shape[1])
    tiles[: x.shape[0]] = x
    out = x.new_empty(n_tiles * TILE_ROWS, n_rows)
    step = n_rows if weight.dense is not None else DECODE_ROWS
    for row in range(0, n_rows, step):
        w = dense_rows(weight, row, row + step)
        for tile, target in zip(tiles.split(TILE_ROWS), out.split(TILE_ROWS)):
            # weight first: a 16-column product is the shape the library is quickest at
            target[:, row : row + step] = torch.mm(w, tile.T).T
    return out[: x.shape[0]]


def matmul(a: Activation, group: WeightGroup) -> tuple[Tensor, ...]:
    return tuple(multiply(a, weight) for weight in group.weights)


def gather(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] of the weight, float32 [T, columns]."""
    if weight.dense is not None:
        return weight.dense[ids]
    assert weight.raw is not None
    return decode(weight.raw[ids], weight.type_name)
