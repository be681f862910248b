"""Milliseconds of a prompt's micro-batch by stage, on a card.

    python tests/gpu/time_prefill.py -m target.gguf [--rows 2048] [--past 0,2048] [--sweep] [--check]

Prints for each depth: wall clock of one forward, the time until the host had queued it, the sum of its kernels and how
many there are, milliseconds and launches by stage, and the longer kernels of every stage but the products. `--sweep`
times the chunked delta rule under other launch choices at the sizes of a 27-billion-parameter model; `--check` first
compares it and a product with float64.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from ggufspec.gguf_file import open_gguf
from ggufspec.kernels import gdn
from ggufspec.kernels.gdn import plain, prompt, scan
from ggufspec.kernels.gdn.chunked import padded
from ggufspec.kernels.matmul import wide
from ggufspec.models import load_model
from ggufspec.rows import prompt_rows

STAGES = {
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    "unpack": ("unpack",),
    "gated DeltaNet": ("prompt_inputs_kernel", "tail_kernel", "system_kernel", "scan_kernel", "output_kernel",
                       "step_kernel"),
    "attention": ("prompt_kernel", "attend", "split_kernel", "combine_kernel", "store_kernel", "spin_kernel", "flash",
                  "fmha"),
    "norms, activations": ("norm_kernel", "norm_input", "activation_input", "gated_input", "prepare_"),
}  # fmt: skip
SPEC = gdn.GdnSpec(16, 48, 128, 4, 1e-6)
CONFIGS = (
    scan.Config(),
    scan.Config(scan_values=32, scan_warps=4),
    scan.Config(scan_values=32, scan_warps=4, scan_stages=1),
    scan.Config(scan_values=64, scan_warps=4),
    scan.Config(scan_values=128, scan_warps=8, scan_stages=1),
    scan.Config(system_warps=8),
    scan.Config(output_values=128, output_warps=8),
    scan.Config(output_values=32),
)


def stage_of(name: str) -> str:
    """The first stage that knows a part of the kernel's name."""
    return next((stage for stage, parts in STAGES.items() if any(part in name for part in parts)), "rest")


def milliseconds(run: Callable[[], object], n: int = 5) -> float:
    """Best of n calls on an otherwise idle card, by events."""
    run()
    best = float("inf")
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best


def kernels_of(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches of each kernel that one call runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    us: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us[event.name] += event.device_time_total
            count[event.name] += 1
    return us, count


def report(run: Callable[[], object], rows: int) -> None:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    wall = 1000 * (time.perf_counter() - start)
    us, count = kernels_of(run)
    print(f"wall {wall:.2f} ms ({rows / wall * 1000:.0f} tok/s), queued after {1000 * queued:.2f} ms, "
          f"kernels {sum(us.values()) / 1000:.2f} ms in {sum(count.values())} launches")  # fmt: skip
    by_stage: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for name, t in us.items():
        by_stage[stage_of(name)] += t
        launches[stage_of(name)] += count[name]
    for stage, t in by_stage.most_common():
        print(f"  {t / 1000:9.2f} ms {launches[stage]:6d} launches  {stage}")
    for stage in ("gated DeltaNet", "attention", "norms, activations", "rest"):
        for name, t in us.most_common():
            if stage_of(name) == stage and t > 50:
                print(f"    {stage}: {t / 1000:8.2f} ms x {count[name]:5d} {t / count[name]:9.2f} us  {name[:90]}")


@torch.inference_mode()
def model(path: str, rows: int, depths: list[int]) -> None:
    target = load_model(open_gguf(path))
    cache = target.new_cache(1, max(depths) + rows + 64)
    tokens = torch.randint(0, target.n_vocab, (rows,), generator=torch.Generator().manual_seed(0)).to(target.device)
    for depth in depths:
        batch = prompt_rows(tokens, 0, depth)
        print(f"---- {rows} rows behind {depth}")
        report(lambda batch=batch: target.forward(batch, cache, logits="last"), rows)


def delta_rule(T: int) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, g, beta [1, T, ..] on the CPU, as prompts have them."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(random(SPEC.n_k, SPEC.d), dim=-1) for _ in range(2))
    return q, k, random(SPEC.n_v, SPEC.d), -random(SPEC.n_v).abs() * 0.1, random(SPEC.n_v).sigmoid()


def as_scanned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> list:
    """To what `scan` takes, on the card."""

    def pair(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x.half(), (x - x.half().float()).half())).cuda()

    def by_chunk(x: torch.Tensor) -> torch.Tensor:
        return padded(x, -(-x.shape[1] // scan.CHUNK) * scan.CHUNK).transpose(1, 2).contiguous().cuda()

    G = by_chunk(g).unflatten(2, (-1, scan.CHUNK)).cumsum(3).flatten(2)
    return [pair(q), pair(k), pair(v), G, by_chunk(beta)]


def check() -> None:
    """Largest errors of the delta rule under every choice, and of a product, against float64."""
    T = 200
    parts, slots = delta_rule(T), torch.zeros(1, dtype=torch.int64, device="cuda")
    empty = torch.zeros(SPEC.n_v, SPEC.d, SPEC.d, dtype=torch.float64)
    expected, after = plain.naive(*(x[0].double() for x in parts), empty)
    for config in CONFIGS:
        state = gdn.allocate(SPEC, 1, "cuda")
        out = scan.scan(*as_scanned(*parts), state, slots, SPEC, config)
        errors = [(a.cpu().double() - b).abs().max().item() for a, b in ((out[0], expected), (state.state[0], after))]
        print(f"error of o {errors[0]:.1e}, of the state {errors[1]:.1e}  {config}")
    a, w = torch.randn(300, 512, device="cuda").half(), torch.randn(640, 512, device="cuda").half()
    out = torch.full((300, 1000), torch.nan, device="cuda")
    wide.product(a, w, 0.125, out[:, 100:740])
    off = (out[:, 100:740].double() - 0.125 * (a.double() @ w.double().T)).abs().max().item()
    print(f"error of a product {off:.1e}; written elsewhere: {not bool(out[:, :100].isnan().all())}")


def sweep(T: int) -> None:
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    n_rows, state = torch.full((1,), T, device="cuda"), gdn.allocate(SPEC, 1, "cuda")
    weights = gdn.GdnWeights(torch.randn(SPEC.conv_dim, 4).cuda(), torch.randn(48).cuda(), -torch.rand(48).cuda())
    rows = [torch.randn(1, T, n, device="cuda") for n in (SPEC.conv_dim, 48, 48)]
    ms = milliseconds(lambda: prompt.inputs(*rows, weights, state, slots, n_rows, SPEC))
    print(f"inputs of {T} rows {ms:.3f} ms")
    parts = as_scanned(*delta_rule(T))
    for config in CONFIGS:
        ms = milliseconds(lambda config=config: scan.scan(*parts, state, slots, SPEC, config))
        us, count = kernels_of(lambda config=config: scan.scan(*parts, state, slots, SPEC, config))
        each = ", ".join(f"{name.split('_')[0]} {t / count[name]:.0f}" for name, t in us.most_common(3))
        print(f"{ms:8.3f} ms ({each} us)  {config}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--past", default="0,2048")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        check()
    if options.sweep:
        sweep(options.rows)
    if options.model:
        model(options.model, options.rows, [int(n) for n in options.past.split(",")])


if __name__ == "__main__":
    main()
