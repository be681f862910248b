"""Microseconds of each non-matmul kernel at the shapes of a 27-billion-parameter hybrid model, graph-captured.

    python tests/gpu/time_kernels.py [--widths 1,8] [--depths 128,8192,32768] [--cells 65536]

Prints a table: kernel, width, microseconds, bytes that must be moved, their share of the copy rate measured in the
same run. Weights and caches are rotated so that the card's cache cannot hold them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ggufspec.kernels import attention, conv, gdn, matmul, norm, prepared, rope, select
from ggufspec.kernels import kv as kvs
from ggufspec.kernels.attention import shape, wide
from ggufspec.kernels.gdn import step as gdn_step

D, F, V, H, N_KV, HD = 5120, 17408, 248320, 24, 4, 256
SPEC = gdn.GdnSpec(16, 48, 128, 4, 1e-6)
COPIES = 8  # of caches and states, used in turn


def microseconds(run: Callable[[int], object], n: int = 4 * COPIES) -> float:
    """Time of one call, from a graph of n calls; run(i) gets the number of the call."""
    for i in range(COPIES):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            run(i)
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / n)
    return best


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def copy_rate() -> float:
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * (1 << 30) / microseconds(lambda i: b.copy_(a), 8) / 1e3


def report(name: str, width: int, us: float, n_bytes: int, rate: float) -> None:
    share = n_bytes / us / 1e3 / rate
    print(f"{name:34s} {width:4d} {us:9.2f} us {n_bytes / 1e6:9.2f} MB {share:6.2f}", flush=True)


def elementwise(W: int, rate: float) -> None:
    x, y, w = random(W, D), random(W, D), random(D)
    report("add_rms_norm", W, microseconds(lambda i: norm.add_rms_norm(x, y, w, 1e-6)), 4 * W * D * 4, rate)
    report("add_rms_norm prepared", W, microseconds(lambda i: prepared.add_rms_norm(x, y, w, 1e-6)), 14 * W * D, rate)
    report("prepare alone", W, microseconds(lambda i: matmul.prepare(x)), 6 * W * D, rate)
    gate, up = random(W, F), random(W, F)
    report("swiglu prepared", W, microseconds(lambda i: prepared.swiglu(gate, up)), 10 * W * F, rate)
    report("swiglu", W, microseconds(lambda i: norm.swiglu(gate, up)), 3 * W * F * 4, rate)
    o, z, g = random(W, 48, 128), random(W, 48, 128), random(128)
    report("gated_norm", W, microseconds(lambda i: norm.gated_norm(o, z, g, 1e-6)), 3 * W * 6144 * 4, rate)
    us = microseconds(lambda i: prepared.gated_norm(o, z, g, 1e-6))
    report("gated_norm prepared", W, us, 10 * W * 6144, rate)
    positions, spec = torch.arange(W, device="cuda")[None], rope.RopeSpec(64)
    report("rope tables", W, microseconds(lambda i: rope.tables(positions, spec)), 0, rate)
    h, dyn, base = random(1, W, D), random(1, W, 2, 2, D // 16), random(2, 2, D)
    report("dynamic_conv", W, microseconds(lambda i: conv.dynamic_conv(h, dyn, base, 0)), 2 * W * D * 4, rate)


def attend(W: int, depth: int, type_name: str, rate: float, n_cells: int = 0) -> None:
    """n_cells: of the cache, at least what the depth needs; cells past the depth should cost nothing."""
    n_cells = max(depth + W, 1024, n_cells)
    caches = [kvs.allocate(type_name, type_name, 1, n_cells, N_KV, HD, HD, "cuda") for _ in range(COPIES)]
    slots, n_past = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), depth, device="cuda")
    n_rows = torch.full((1,), W, device="cuda")
    positions = n_past[:, None] + torch.arange(W, device="cuda")
    q_gate, k, v, w = random(1, W, H, 2, HD), random(1, W, N_KV, HD), random(1, W, N_KV, HD), random(HD)
    spec = rope.RopeSpec(64)
    cos, sin = rope.tables(positions, spec)

    def store(i: int) -> torch.Tensor:
        return kvs.norm_rope_store(caches[i % COPIES], q_gate[..., 0, :], k, v, slots, positions, (w, w, 1e-6),
                                   (cos, sin, spec))  # fmt: skip

    report(f"norm_rope_store {type_name}", W, microseconds(store), W * (2 * H + 4 * N_KV) * HD * 4, rate)
    q, mask = store(0), attention.AttentionSpec(HD**-0.5)
    n_bytes = 2 * depth * N_KV * caches[0].k.shape[-1] * caches[0].k.element_size()

    def run(i: int, attend: Callable[..., object] = attention.attend) -> object:
        return attend(q, caches[i % COPIES], slots, n_past, n_rows, mask, q_gate[..., 1, :], True)

    name = f"{type_name} depth {depth} of {caches[0].n_cells}"
    report(f"attend {name}", W, microseconds(run), n_bytes, rate)
    us = microseconds(lambda i: run(i, attention.attend_prepared))
    report(f"attend prepared {name}", W, us, n_bytes, rate)


def recurrent(W: int, rate: float) -> None:
    states = [gdn.allocate(SPEC, 1, "cuda") for _ in range(COPIES)]
    slots, n_rows = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), W, device="cuda")
    weights = gdn.GdnWeights(random(SPEC.conv_dim, 4), random(48), -random(48).abs())
    u, z, alpha, beta = random(1, W, SPEC.conv_dim), random(1, W, 6144), random(1, W, 48), random(1, W, 48)
    norm = random(128)
    size = states[0].state[0].numel() * 4
    for n_replay in (0, W):
        for state in states:
            state.n_replay.fill_(n_replay)

        for division in (gdn_step.Division(1), gdn_step.Division(2), gdn_step.Division(2, 4)):

            def run(i: int, division: gdn_step.Division = division) -> object:
                state = states[i % COPIES]
                return gdn_step.step_prepared(
                    u, z, alpha, beta, weights, norm, 1e-6, state, slots, n_rows, SPEC, division
                )

            us = microseconds(run)
            name = f"gdn step, {n_replay} replayed, {division.parts} of {division.warps} warps"
            report(name, W, us, size * (2 if n_replay else 1), rate)


def prompt(T: int, rate: float) -> None:
    state = gdn.allocate(SPEC, 1, "cuda")
    slots, n = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), T, device="cuda")
    weights = gdn.GdnWeights(random(SPEC.conv_dim, 4), random(48), -random(48).abs())
    rows = random(1, T, SPEC.conv_dim), random(1, T, 48), random(1, T, 48)
    report("gdn prompt chunk", T, microseconds(lambda i: gdn.chunk(*rows, weights, state, slots, n, SPEC), 4), 0, rate)
    for type_name in ("f16", "q8_0"):
        for depth in (0, 4096):
            attend(T, depth, type_name, rate)


def selection(W: int, rate: float) -> None:
    logits = [random(1, W, V) for _ in range(COPIES)]
    n_bytes = W * V * 4
    report("argmax", W, microseconds(lambda i: select.argmax(logits[i % COPIES])), n_bytes, rate)
    for k in (16, 40):
        report(f"top {k}", W, microseconds(lambda i, k=k: select.top_k(logits[i % COPIES], k)), n_bytes, rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", default="1,4,8,16")
    parser.add_argument("--depths", default="128,8192,32768")
    parser.add_argument("--cells", type=int, default=0, help="cells of the caches, at least the depth")
    parser.add_argument("--columns", type=int, default=shape.COLUMNS, help="pairs of a tile of the narrow attention")
    parser.add_argument("--prompt-tile", type=int, default=wide.TILE, help="pairs of a tile of a prompt's attention")
    parser.add_argument("--prompt-warps", type=int, default=wide.WARPS)
    parser.add_argument("--no-prompt", action="store_true")
    options = parser.parse_args()
    shape.COLUMNS, wide.TILE, wide.WARPS = options.columns, options.prompt_tile, options.prompt_warps
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate:.0f} GB/s")
    for W in map(int, options.widths.split(",")):
        elementwise(W, rate)
        recurrent(W, rate)
        for depth in map(int, options.depths.split(",")):
            for type_name in ("f16", "q8_0"):
                attend(W, depth, type_name, rate, options.cells)
        selection(W, rate)
    if not options.no_prompt:
        prompt(2048, rate)


if __name__ == "__main__":
    main()
