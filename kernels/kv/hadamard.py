"""The Walsh-Hadamard rotation of quantized caches: it spreads outliers over a vector before rounding.

H_1 = 1, H_2s = [[H_s, H_s], [H_s, -H_s]], scaled by 1/sqrt(n): symmetric and its own inverse.
"""

import torch
from torch import Tensor

from ggufspec.kernels.kv.blocks import BLOCKS


def rotation_size(type_name: str, hd: int, grow: bool) -> int:
    """Size n of the rotation of a cache of this type and head size, 0 for none.

    Only quantized caches with a head size divisible by 64 rotate; K takes the largest power of two that
    divides the head size (`grow`), V always 64.
    """
    if type_name not in BLOCKS or hd % 64:
        return 0
    n = 64
    while grow and hd % (2 * n) == 0:
        n *= 2
    return n


def rotate(x: Tensor, n: int) -> Tensor:
    """Multiply every run of n numbers of the last dimension by H; n = 0: unchanged. Applying it twice undoes
    it.

    Made of sums and differences of pairs, so that a row's result does not depend on the number of rows.
    """
    if n == 0:
        return x
    y, half = x, 1
    while half < n:
        a, b = y.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        y = torch.stack((a + b, a - b), -2)
        half *= 2
    return y.reshape(x.shape) * n**-0.5
