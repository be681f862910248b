"""The end of the default sampler chain: filter sorted candidates, weigh them, draw one."""

from dataclasses import dataclass

from torch import Tensor

from ggufspec.kernels.draw import plain
from ggufspec.kernels.draw.plain import uniform_of_keys

__all__ = ["Limits", "draw", "uniform_of_keys"]

LARGEST_K = 1024  # candidates that one program of the kernel holds


@dataclass
class Limits:
    """What filters and draws a row, [R] each."""

    key: Tensor  # int64, start of the row's stream of random numbers
    temperature: Tensor  # float64, <= 0: the largest logit
    top_k: Tensor  # int64, 1..K
    top_p: Tensor  # float64, >= 1 off
    min_p: Tensor  # float64, <= 0 off
    min_keep: Tensor  # int64, >= 1


def draw(values: Tensor, ids: Tensor, limits: Limits, positions: Tensor) -> tuple[Tensor, Tensor]:
    """values [R, K] float32, falling, and their ids [R, K] int64 to (tokens [R], weights [R, K]), both int64.

    top_k, top_p, min_p, then temperature; weights are floor(2**40 * exp((value - largest) / temperature)), 0 for what
    was filtered out, so that sums are exact. The token is the first whose running weight exceeds u * total, with u the
    number of (key, position): SplitMix64 started at `key`, its output number `position`.
    """
    if values.is_cuda and values.shape[1] <= LARGEST_K:
        from ggufspec.kernels.draw import triton

        return triton.draw(values, ids, limits, positions)
    return plain.draw(values, ids, limits, positions)
