"""Microseconds of a step's attention over a long past, for several choices of its constants, graph-captured.

    python tests/gpu/time_attention.py [--types f16,q8_0] [--widths 1,8] [--depths 128,8192,32768] [--variants all]

For each type, width and depth, a line a variant: microseconds of both kernels together (the way a step runs them) and
of the first alone, the share of the copy rate that the cells' bytes make of them, and how far the result is from a
float32 product of the same cells. Layers of a 27-billion-parameter hybrid model: 24 query heads, 4 key heads of 256.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from time_kernels import COPIES, HD, N_KV, H, copy_rate, microseconds, random

from ggufspec.kernels import attention, kv
from ggufspec.kernels.ahead import compiled_ahead
from ggufspec.kernels.attention import narrow, shape
from ggufspec.kernels.kv.hadamard import rotate

# Values of constants of `shape` and `narrow`. Where programs take fewer registers, those of the second kernel find room
# before the first one's have ended.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "224 registers": {"REGISTERS": 28_672},
    "192 registers": {"REGISTERS": 24_576},
    "2 last warps": {"LAST_WARPS": 2},
    "1 last warp": {"LAST_WARPS": 1},
    "224, 2 last": {"REGISTERS": 28_672, "LAST_WARPS": 2},
    "192, 2 last": {"REGISTERS": 24_576, "LAST_WARPS": 2},
    "16 columns": {"COLUMNS": 16},
}


def variants(names: list[str], type_name: str) -> list[str]:
    """Those that are not another type's."""
    types = ("q8_0", "f16")
    return [name for name in names if name.split()[0] == type_name or name.split()[0] not in types]


def filled(type_name: str, n_cells: int, n: int, device: str = "cuda") -> list[kv.KV]:
    """Caches of random values, one slot each."""
    caches = [kv.allocate(type_name, type_name, 1, n_cells, N_KV, HD, HD, device) for _ in range(n)]
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
        k, v = ((x[0, : depth + W, :, :HD].view(torch.int8).float() * 0.01).transpose(0, 1) for x in (cache.k, cache.v))
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


@contextmanager
def constants(name: str) -> Iterator[None]:
    """Inside, `shape` and `narrow` have a variant's constants."""
    homes = {key: shape if hasattr(shape, key) else narrow for key in VARIANTS[name]}
    kept = {key: getattr(home, key) for key, home in homes.items()}
    for key, value in VARIANTS[name].items():
        setattr(homes[key], key, value)
    try:
        yield
    finally:
        for key, value in kept.items():
            setattr(homes[key], key, value)


class Step:
    """Attention of one step of W rows behind `depth` cells, in caches used in turn."""

    def __init__(self, type_name: str, W: int, depth: int, n_caches: int = COPIES) -> None:
        self.caches = filled(type_name, max(1024, depth + W), n_caches)
        self.slots = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.n_past, self.n_rows = torch.full((1,), depth, device="cuda"), torch.full((1,), W, device="cuda")
        self.q, self.gate = random(1, W, H, HD) / 4, random(1, W, H, HD)
        self.spec = attention.AttentionSpec(HD**-0.5)

    def inputs(self, i: int) -> tuple[Any, ...]:
        return self.q, self.caches[i % len(self.caches)], self.slots, self.n_past, self.n_rows, self.spec

    def attend(self, i: int) -> torch.Tensor:
        return attention.attend(*self.inputs(i), self.gate, True)

    def both(self, i: int) -> object:
        return attention.attend_prepared(*self.inputs(i), self.gate, True)

    def first(self, i: int) -> object:
        return narrow.pieces(*self.inputs(i))


def measure(type_name: str, W: int, depth: int, names: list[str], rate: float) -> None:
    step = Step(type_name, W, depth)
    cache = step.caches[0]
    expected = exact(step.q, cache, depth, step.gate)
    n_bytes = 2 * (depth + W) * N_KV * cache.k.shape[-1] * cache.k.element_size()
    print(f"{type_name}, width {W}, depth {depth}: {n_bytes / rate / 1e3:.1f} us at the copy rate", flush=True)
    for name in names:
        with constants(name):
            off = (step.attend(0) - expected).norm() / expected.norm()
            both, first = microseconds(step.both), microseconds(step.first)
        share = n_bytes / both / 1e3 / rate
        print(f"  {name:32s} {both:8.2f} us, first {first:8.2f} us {share:6.2f}  off by {off:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default="q8_0,f16")
    parser.add_argument("--widths", default="1,8")
    parser.add_argument("--depths", default="128,8192,32768")
    parser.add_argument("--variants", default="all", help=f"of {', '.join(VARIANTS)}; separated by semicolons")
    options = parser.parse_args()
    chosen = list(VARIANTS) if options.variants == "all" else options.variants.split(";")
    widths = [int(W) for W in options.widths.split(",")]
    types = options.types.split(",")
    with compiled_ahead():
        for type_name in types:
            for W in widths:
                step = Step(type_name, W, 128, 1)
                for name in variants(chosen, type_name):
                    with constants(name):
                        step.attend(0), step.both(0), step.first(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate:.0f} GB/s")
    for type_name in types:
        for W in widths:
            for depth in map(int, options.depths.split(",")):
                measure(type_name, W, depth, variants(chosen, type_name), rate)


if __name__ == "__main__":
    main()
