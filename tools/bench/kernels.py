"""`ggufspec bench kernels`: how near quantized matmuls come to the copy rate, and the search for their configs.

Each weight is copied until one pass over the copies is several times the L2 cache; a pass is captured in a CUDA graph
and replayed. Times are medians; the copy rate (bytes read plus written) is measured in the same run.
"""

import itertools
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch
from tqdm import tqdm

from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.kernels import tune as tuned
from ggufspec.kernels.matmul import cuda, narrow, repack
from ggufspec.kernels.matmul.cuda import Config, Launch
from ggufspec.kernels.matmul.triton import prepare
from ggufspec.kernels.matmul.weight import Activation, PackedWeight
from ggufspec.quant import layouts

WIDTHS = (1, 2, 4, 8, 16)
# rows x columns of Qwen3.8-27B's launches: weights that share an input stand together
SHAPES = {
    "Q4_K": {
        "gate|up": (34816, 5120), "down": (5120, 17408), "gdn qkv|z": (16384, 5120), "attn q|k|v": (14336, 5120),
        "out": (5120, 6144),
    },
    "Q6_K": {"head": (248320, 5120), "down": (5120, 17408), "gdn qkv": (10240, 5120)},
    "Q5_K": {"gate|up": (34816, 5120), "down": (5120, 17408)},
    "Q8_0": {"gate|up": (34816, 5120), "down": (5120, 17408)},
}  # fmt: skip
ROTATE_BYTES = 256 << 20


def random_weight(type_name: str, rows: int, columns: int) -> PackedWeight:
    """A packed weight of random quants and scales on the GPU, made without a file."""
    layout = layouts.BY_NAME[type_name]
    n_blocks = rows * columns // layout.n_elements
    raw = torch.randint(0, 256, (n_blocks, layout.n_bytes), dtype=torch.uint8, device="cuda")
    first = repack.scale_at(type_name)
    two = repack.FORMS[type_name].scale in ("six_bit", "half_min", "nibbles")
    for at in (first, first + 2) if two else (first,):
        d = (torch.rand(n_blocks, 1, device="cuda") * 1e-4 + 1e-5).half()
        raw[:, at : at + 2] = d.view(torch.uint8)
    return cuda.pack(raw.view(rows, -1), type_name, (rows, columns), torch.device("cuda"))


def graph_time_us(calls, n_replays: int = 7) -> float:
    """Median microseconds of one call, of calls captured back to back in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:1]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(n_replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times) / len(calls)


def copy_rate() -> float:
    """Device-to-device copy, bytes read plus written, in GB/s."""
    x = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(20):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * x.numel() * 4 / min(times) / 1e6


def rotation(type_name: str, rows: int, columns: int) -> list[Launch]:
    """Copies of one launch, together larger than the cache."""
    first = cuda.fuse((random_weight(type_name, rows, columns),)).launches[0]
    n = min(40, max(2, -(-ROTATE_BYTES // launch_bytes(first))))
    copies = [first]
    for _ in range(n - 1):
        parts = {name: part.clone() for name, part in first.parts.items()}
        copies.append(replace(first, parts=parts))
    return copies


def launch_bytes(launch: Launch) -> int:
    return sum(p.numel() * p.element_size() for p in launch.parts.values())


def activation(n_tokens: int, columns: int) -> Activation:
    return prepare(torch.randn(n_tokens, columns, device="cuda"))


def time_launches(launches: list[Launch], a: Activation, config: Config, pdl: bool | None = None) -> float:
    return graph_time_us([lambda launch=launch: narrow.run(launch, a, config=config, pdl=pdl) for launch in launches])


def candidates(type_name: str) -> list[Config]:
    """Configs worth trying: 8 to 24 warps on a multiprocessor, and stages that fill its shared memory."""
    _, shared, most = narrow.card(torch.cuda.current_device())
    layout = layouts.BY_NAME[type_name]
    block_bytes = layout.n_bytes * repack.BLOCK // layout.n_elements
    out = []
    for WM, MT, ST, per_sm in itertools.product((2, 4, 8), (1, 2), (2, 3, 4, 5), (2, 3, 4, 5, 6)):
        config = Config(WM=WM, MT=MT, ST=ST, per_sm=per_sm)
        if not (64 <= config.n_rows <= cuda.ROW_MULTIPLE and 8 <= WM * per_sm <= (16 if MT == 2 else 24)):
            continue
        fits = narrow.tile_and_stages(config, block_bytes, 8, shared, most)[1]
        if fits == ST and ST * (config.n_rows * block_bytes + 8 * 512) * per_sm >= shared // 3:
            out.append(config)
    return out


def _compile(job: tuple[str, Config, int]) -> str | None:
    """Compile one config on a tiny weight (in a worker process: the result goes through Triton's disk cache)."""
    type_name, config, n_parts = job
    try:
        launch = cuda.fuse((random_weight(type_name, cuda.ROW_MULTIPLE, repack.BLOCK),)).launches[0]
        narrow.run(launch, activation(1, repack.BLOCK), config=config, n_parts=n_parts)
        torch.cuda.synchronize()
    except Exception as error:  # a config the card has no room for is left out of the search
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(jobs: list, n_workers: int) -> dict:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_workers, mp_context=context) as pool:
        return dict(zip(jobs, tqdm(pool.map(_compile, jobs), total=len(jobs), desc="compile", mininterval=5)))


def search(types: tuple[str, ...], n_workers: int, widths: tuple[int, ...] = (1, 8)) -> list[dict]:
    """Time every candidate at every shape; a failing candidate is skipped and named."""

    def job(type_name: str, n_rows: int, columns: int, config: Config) -> tuple[str, Config, int]:
        padded = -(-n_rows // cuda.ROW_MULTIPLE) * cuda.ROW_MULTIPLE
        n_programs = config.per_sm * narrow.card(torch.cuda.current_device())[0]
        return type_name, config, narrow.cut(padded, repack.n_super_blocks(columns), config, n_programs).n_parts

    jobs = sorted({job(t, *shape, c) for t in types for shape in SHAPES[t].values() for c in candidates(t)}, key=str)
    failed = {key: why for key, why in compile_all(jobs, n_workers).items() if why}
    for (type_name, config, _), why in failed.items():
        click.echo(f"skipped {type_name} {config}: {why}", err=True)
    rows = []
    for type_name in types:
        for name, (n_rows, columns) in SHAPES[type_name].items():
            launches = rotation(type_name, n_rows, columns)
            inputs = {w: torch.randn(w, columns, device="cuda") for w in widths}
            for config in tqdm(candidates(type_name), desc=f"{type_name} {name}", mininterval=5):
                if job(type_name, n_rows, columns, config) in failed:
                    continue
                us = {w: time_chain(launches, x, config) for w, x in inputs.items()}
                rows.append({"type": type_name, "shape": name, "rows": n_rows, "columns": columns,
                             "bytes": launch_bytes(launches[0]), "config": asdict(config), "us": us})  # fmt: skip
            del launches
    return rows


def time_chain(launches: list[Launch], x: torch.Tensor, config: Config) -> float:
    """Microseconds of an input's preparation and the product, as a model runs them: one after the other."""
    return graph_time_us([lambda launch=launch: narrow.run(launch, prepare(x), config=config) for launch in launches])


def measure(types: tuple[str, ...], widths: tuple[int, ...], copy_gb_s: float) -> list[dict]:
    """Microseconds and rates of the configs the program would use."""
    rows = []
    for type_name in types:
        for name, (n_rows, columns) in SHAPES[type_name].items():
            launches = rotation(type_name, n_rows, columns)
            n_bytes = launch_bytes(launches[0])
            us = {w: time_launches(launches, activation(w, columns), launches[0].config) for w in widths}
            rows.append({
                "type": type_name, "shape": name, "rows": n_rows, "columns": columns, "bytes": n_bytes, "us": us,
                "gb_s": {w: n_bytes / t / 1e3 for w, t in us.items()},
                "of_copy": {w: n_bytes / t / 1e3 / copy_gb_s for w, t in us.items()},
            })  # fmt: skip
            del launches
    return rows


def as_table(rows: list[dict], widths: tuple[int, ...]) -> str:
    lines = [f"{'type':5} {'launch':12} {'shape':>14}" + "".join(f"   w={w:<2} us  of copy" for w in widths)]
    for r in rows:
        cells = "".join(f"  {r['us'][w]:8.1f}  {r['of_copy'][w]:7.2f}" for w in widths)
        lines.append(f"{r['type']:5} {r['shape']:12} {r['rows']:>7}x{r['columns']:<6}" + cells)
    return "\n".join(lines)


@click.command("kernels")
@click.option("--type", "types", multiple=True, type=click.Choice(tuple(SHAPES)), help="Tensor types (default: all).")
@click.option("--tune", is_flag=True, help="Search the configs instead of measuring the ones in use.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write all figures there.")
@click.option("--table", type=click.Path(dir_okay=False), help="Write what --tune finds as a table of configs there.")
@click.option("--workers", default=8, show_default=True, help="Processes that compile candidates.")
def command(types: tuple[str, ...], tune: bool, path: str | None, table: str | None, workers: int) -> None:
    """Measure the quantized matmuls at the shapes of a 27B model."""
    if not torch.cuda.is_available():
        raise UnsupportedError("bench kernels measures CUDA kernels, and this machine has no CUDA device")
    if cuda.capability(torch.cuda.current_device()) < (8, 0):
        raise UnsupportedError("bench kernels measures the fast kernels, which need compute capability 8.0 or later")
    if table and not tune:
        raise ConfigError("--table writes what --tune finds; add --tune")
    types = types or tuple(SHAPES)
    rate = copy_rate()
    click.echo(f"{torch.cuda.get_device_name()}: copy {rate:.0f} GB/s (read plus write)")
    rows = search(types, workers) if tune else measure(types, WIDTHS, rate)
    if path:
        Path(path).write_text(json.dumps({"copy_gb_s": rate, "rows": rows}, indent=1))
    if not tune:
        click.echo(as_table(rows, WIDTHS))
        return
    for r in best(rows, 3):
        rates = " ".join(f"w={w}: {t:.1f} us {r['bytes'] / t / 1e3 / rate:.2f}" for w, t in r["us"].items())
        click.echo(f"{r['type']} {r['shape']:12} {r['config']}  {rates}")
    if table:
        found = [
            tuned.Entry(r["type"], r["rows"], repack.n_super_blocks(r["columns"]), r["config"]) for r in best(rows, 1)
        ]
        text = tuned.table(torch.cuda.get_device_name(), cuda.capability(torch.cuda.current_device()), found)
        Path(table).write_text(text)


def best(rows: list[dict], n: int) -> list[dict]:
    """The n quickest configs of each shape, by the sum of their times over the widths."""
    out = []
    for _, group in itertools.groupby(rows, key=lambda r: (r["type"], r["shape"])):
        out += sorted(group, key=lambda r: sum(r["us"].values()))[:n]
    return out
