"""How fast does a Q8_0 file become Q4_K_M, and are the bytes right?

    python tests/bench/bench_quantize.py [--megabytes 300] [--workers 2] [--device cpu] [--sample 200]
    python tests/bench/bench_quantize.py --megabytes 30000 --device cuda      # the whole 27B target, 28 GB

The file has the tensors of a 27B target (first blocks only, up to `--megabytes`) with random weights. Prints MB/s of
input of the whole run, file to file, and of libgguf's reference on one thread over the same tensors (as much as
`--reference-seconds` allows); then compares the first rows of `--sample` tensors with the CPU's bytes. The goal on two
cores is not to be slower than libgguf on one; on an H200, under 60 s for the whole target.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.gguf_write import Entry, Key, write_gguf
from ggufspec.quant import layouts
from ggufspec.quant.dequantize import dequantize
from ggufspec.quant.policy import Choices, file_type
from ggufspec.quant.quantize import quantize
from ggufspec.quant.requantize import Options, Plan, make_plan, run_plan

SHAPES = Path(__file__).parents[1] / "quant" / "golden_plans.json"
TILE = 1 << 24  # elements of random weights that the file repeats


def make_source(path: Path, limit: int) -> None:
    """A Q8_0 file of at most `limit` bytes with the target's tensors, block by block."""
    tensors = json.loads(SHAPES.read_text())["models"]["target"]["tensors"]
    entries, n_bytes = [], 0
    for name, ne, kind in sorted(tensors, key=lambda t: not t[0].startswith("blk.")):
        entry = Entry(name, tuple(reversed(ne)), layouts.F32 if kind == "f32" else layouts.Q8_0)
        if n_bytes + entry.n_bytes <= limit:
            entries.append(entry)
            n_bytes += entry.n_bytes
    x = np.random.default_rng(1).standard_normal(TILE).astype(np.float32) * np.float32(0.02)
    tiles = {layouts.F32: x.view(np.uint8), layouts.Q8_0: quantize(x, "Q8_0")}

    def chunks():
        for entry in entries:
            tile, left = tiles[entry.layout], entry.n_bytes
            while left:
                yield tile[: min(left, len(tile))]
                left -= min(left, len(tile))

    keys = [
        Key("general.architecture", "str", "qwen35"), Key("qwen35.block_count", "u32", 65),
        Key("qwen35.attention.head_count", "u32", 24), Key("qwen35.attention.head_count_kv", "u32", 4),
    ]  # fmt: skip
    write_gguf(path, keys, entries, chunks())


def reference_rate(plan: Plan, seconds: float) -> float:
    """Input MB/s of libgguf on one thread: decode and encode, a slice of each tensor in turn."""
    import libgguf

    n_bytes, spent = 0, 0.0
    converted = [t for t in plan.tensors if t.is_converted]
    for t in converted:
        info = t.info
        raw = np.array(plan.file.read(info.name)[: max(1, (1 << 21) // info.columns)])
        start = time.perf_counter()
        x = np.asarray(libgguf.dequantize_rows(raw, info.type_id, n_per_row=info.columns), np.float32)
        libgguf.quantize_rows(x, layouts.BY_NAME[t.target].id)
        spent += time.perf_counter() - start
        n_bytes += raw.nbytes
        if spent > seconds:
            break
    return n_bytes / 1e6 / spent


def check_rows(job: tuple[str, str, str, int]) -> int:
    """Blocks of the first rows of one tensor that differ from what the CPU makes of the input."""
    source, out, name, n_rows = job
    before, after = open_gguf(source), open_gguf(out)
    x = dequantize(np.array(before.read(name)[:n_rows]), before.tensors[name].type_name)
    layout = after.tensors[name].layout
    ours = np.array(after.read(name)[:n_rows])
    return int((quantize(x, layout.name) != ours).reshape(-1, layout.n_bytes).any(1).sum())


def check(plan: Plan, out: Path, n_tensors: int, n_workers: int) -> str:
    names = [t.info.name for t in plan.tensors if t.is_converted]
    step = max(1, len(names) // n_tensors)
    jobs = [(str(plan.file.path), str(out), name, 32) for name in names[::step][:n_tensors]]
    with ProcessPoolExecutor(n_workers, get_context("spawn")) as pool:
        n_bad = sum(pool.map(check_rows, jobs))
    return f"{len(jobs)} tensors checked, {n_bad} blocks differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--reference-seconds", type=float, default=10)
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, out = Path(folder, "q8_0.gguf"), Path(folder, "q4_k_m.gguf")
        make_source(source, options.megabytes * 1_000_000)
        file: GGUFFile = open_gguf(source)
        plan = make_plan(file, Options(Choices(file_type("Q4_K_M")), allow_requantize=True))
        summary = run_plan(plan, out, n_workers=options.workers, device=options.device)
        rate = plan.n_bytes_in / 1e6 / summary.seconds
        where = f"{options.workers} workers" if options.device == "cpu" else options.device
        print(f"{plan.n_bytes_in / 1e9:.2f} GB -> {summary.n_bytes / 1e9:.2f} GB on {where}: "
              f"{summary.seconds:.1f} s, {rate:.1f} MB/s of input")
        if options.reference_seconds > 0:
            print(f"libgguf, one thread: {reference_rate(plan, options.reference_seconds):.1f} MB/s of input")
        print(check(plan, out, options.sample, options.workers))


if __name__ == "__main__":
    main()
