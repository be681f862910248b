"""Microseconds of a step's attention over a long past, for several choices of its constants, graph-captured.

    python tests/gpu/time_attention.py [--types f16,q8_0] [--widths 1,8] [--depths 128,8192,32768] [--variants all]

For each type, width and depth a line: the variant, microseconds of both kernels together (the way a step runs them) and
of the first alone, the share of the copy rate that the cells' bytes make of them, and how far the result is from a
float32 product of the same cells. Layers of a 27-billion-parameter hybrid model: 24 query heads, 4 key heads of 256.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from time_kernels import COPIES, HD, N_KV, H, copy_rate, microseconds, random

from ggufspec.kernels import attention, kv
from ggufspec.kernels.attention import narrow
from ggufspec.kernels.kv.hadamard import rotate

# Values of `narrow`'s constants. WAVE 264 is two programs on each of 132 multiprocessors; four warps of up to 168
# registers and tiles of 32 q8_0 cells let three in.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "4 warps": {"WARPS": 4, "REGISTERS": 255},
    "4 warps, 32 cells, 4 ahead": {"WARPS": 4, "REGISTERS": 255, "CELLS": 32, "STAGES": 5},
    "4 warps, 32 cells, 3 programs": {"WARPS": 4, "REGISTERS": 168, "CELLS": 32, "STAGES": 4, "WAVE": 396},
    "f16 in tiles of 64": {"TILE_BYTES": 70_000},
    "one wave of 132": {"WAVE": 132},
    "two waves of 264": {"WAVE": 508},
    "tiles of 16": {"TILE": 16},
}


def filled(type_name: str, n_cells: int, device: str = "cuda") -> list[kv.KV]:
    """Caches of random values, one slot each."""
    caches = [kv.allocate(type_name, type_name, 1, n_cells, N_KV, HD, HD, device) for _ in range(COPIES)]
    for cache in caches:
        for cells in (cache.k, cache.v):
            if cells.dtype == torch.uint8:  # 256 codes, then the scales
                cells.random_(0, 256)
                cells.view(torch.float16)[..., HD // 2 :] = 0.01
            else:
                cells.normal_()
    return caches


def exact(q: torch.Tensor, cache: kv.KV, depth: int, gate: torch.Tensor) -> torch.Tensor:
    """[1, W, H, HD] of q, rotated as the keys are, in float32."""
    W = q.shape[1]
    if cache.type_k == "q8_0":
        k, v = (
            (x[0, : depth + W, :, :HD].view(torch.int8).float() * 0.01).transpose(0, 1) for x in (cache.k, cache.v)
        )
    else:
        k, v = (x[0, : depth + W].float().transpose(0, 1) for x in (cache.k, cache.v))
    k, v = (x.repeat_interleave(H // N_KV, 0) for x in (k, v))
    scores = torch.einsum("whd,hsd->hws", q[0], k) * HD**-0.5
    position = depth + torch.arange(W, device=q.device)
    scores.masked_fill_(torch.arange(depth + W, device=q.device) > position[:, None], -torch.inf)
    out = torch.einsum("hws,hsd->whd", scores.softmax(-1), v)[None]
    if cache.rotation_v:
        out = rotate(out, cache.rotation_v)
    return out * torch.sigmoid(gate)


def measure(type_name: str, W: int, depth: int, names: list[str], rate: float) -> None:
    caches = filled(type_name, max(1024, depth + W))
    slots, n_past = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), depth, device="cuda")
    n_rows, mask = torch.full((1,), W, device="cuda"), attention.AttentionSpec(HD**-0.5)
    q, gate = random(1, W, H, HD) / 4, random(1, W, H, HD)
    expected = exact(q, caches[0], depth, gate)
    n_bytes = 2 * (depth + W) * N_KV * caches[0].k.shape[-1] * caches[0].k.element_size()
    print(f"{type_name}, width {W}, depth {depth}: {n_bytes / rate / 1e3:.1f} us at the copy rate", flush=True)
    kept = {name: getattr(narrow, name) for name in {key for values in VARIANTS.values() for key in values}}
    for name in names:
        for key, value in (kept | VARIANTS[name]).items():
            setattr(narrow, key, value)
        try:
            out = attention.attend(q, caches[0], slots, n_past, n_rows, mask, gate, True)
            off = (out - expected).norm() / expected.norm()
            both = microseconds(
                lambda i: attention.attend_prepared(q, caches[i % COPIES], slots, n_past, n_rows, mask, gate, True)
            )
            first = microseconds(lambda i: narrow.pieces(q, caches[i % COPIES], slots, n_past, n_rows, mask))
            share = n_bytes / both / 1e3 / rate
            print(f"  {name:30s} {both:8.2f} us, first {first:8.2f} us {share:6.2f}  off by {off:.1e}", flush=True)
        finally:
            for key, value in kept.items():
                setattr(narrow, key, value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default="q8_0,f16")
    parser.add_argument("--widths", default="1,8")
    parser.add_argument("--depths", default="128,8192,32768")
    parser.add_argument("--variants", default="all", help=f"of {', '.join(VARIANTS)}; separated by semicolons")
    options = parser.parse_args()
    names = list(VARIANTS) if options.variants == "all" else options.variants.split(";")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate:.0f} GB/s")
    for type_name in options.types.split(","):
        for W in map(int, options.widths.split(",")):
            for depth in map(int, options.depths.split(",")):
                measure(type_name, W, depth, names, rate)


if __name__ == "__main__":
    main()
