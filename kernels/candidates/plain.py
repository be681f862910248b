"""Keys and their merge in PyTorch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

from torch import Tensor

from ggufspec.kernels.select.plain import id_of, logit_of, packed

NOTHING = -(2**63 - 1)  # the key of no token


def keys(x: Tensor, ids: Tensor, first: int, k: int) -> Tensor:
    out = ids.new_full((ids.shape[0], k), NOTHING)
    out[:, : ids.shape[1]] = packed(x.gather(1, ids), ids + first)
    return out


def merge(keys: Tensor) -> tuple[Tensor, Tensor]:
    N, T, k = keys.shape
    best = keys.transpose(0, 1).reshape(T, N * k).sort(dim=1, descending=True).values[:, :k]
    return logit_of(best), id_of(best)
