"""Filter, weigh and draw as one Triton kernel, a program a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap

if TYPE_CHECKING:
    from ggufspec.kernels.draw import Limits


@triton.jit
def mix(x):
    """SplitMix64's finalizer on a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def weigh(x, top, t, i, keep):
    """Weights int64 of values x, the largest of which is `top` and stands first."""
    finite = (x > float("-inf")) & (x < float("inf"))
    w = tl.where(finite, tl.exp((tl.where(finite, x, 0.0) - tl.where(finite, top, 0.0)) / t), 0.0)
    w = tl.where(i == 0, 1.0, w) * 1099511627776.0
    return tl.where(keep, w, 0.0).to(tl.int64)


@triton.jit
def draw_kernel(
    value_ptr, id_ptr, key_ptr, position_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, min_keep_ptr,
    token_ptr, weight_ptr, K, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < K
    x = tl.load(value_ptr + row * K + i, inside, float("-inf")).to(tl.float64)
    top = tl.load(value_ptr + row * K).to(tl.float64)
    mine = row + i * 0  # a block of equal addresses: Triton's interpreter can't spread a truth value over a block
    t, top_k = tl.load(temperature_ptr + mine), tl.load(top_k_ptr + mine)
    top_p, min_p, min_keep = tl.load(top_p_ptr + mine), tl.load(min_p_ptr + mine), tl.load(min_keep_ptr + mine)

    keep = inside & (i < top_k)
    must = i < min_keep
    w = weigh(x, top, 1.0, i, keep)
    before = (tl.cumsum(w, 0) - w).to(tl.float64)
    keep &= (top_p >= 1) | (before < top_p * tl.sum(w, 0).to(tl.float64)) | must | (i == 0)
    threshold = top + tl.log(tl.maximum(min_p, 1e-300))
    keep &= (min_p <= 0) | (x >= threshold) | must

    cold = t <= 0
    w = weigh(x, top, tl.where(cold, 1.0, t), i, keep & ((i == 0) | (cold == 0)))
    z = tl.load(key_ptr + row).to(tl.uint64, bitcast=True)
    z = mix(z + (tl.load(position_ptr + row) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)
    u = (z >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    total = tl.sum(w, 0)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    at = tl.sum((tl.cumsum(w, 0) <= target).to(tl.int32), 0)
    tl.store(token_ptr + row, tl.load(id_ptr + row * K + at))
    tl.store(weight_ptr + row * K + i, w, inside)


def draw(values: Tensor, ids: Tensor, limits: Limits, positions: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = values.contiguous(), ids.contiguous()
    R, K = values.shape
    tokens = torch.empty(R, dtype=torch.int64, device=values.device)
    w = torch.empty(R, K, dtype=torch.int64, device=values.device)
    draw_kernel[(R,)](
        values, ids, limits.key, positions.contiguous(), limits.temperature, limits.top_k, limits.top_p, limits.min_p,
        limits.min_keep, tokens, w, K, max(16, triton.next_power_of_2(K)), num_warps=1 if K <= 128 else 4,
        **overlap(values),
    )  # fmt: skip
    return tokens, w
