"""What multi_gpu.py runs in processes of its own: one task, described by a JSON file, results to another.

    python multi_gpu_work.py TASK.json RANK OUT.json

All ranks of a tensor split run the same task; the first one's results count. They are written again after every step of
the task. A task that is about to take too long says on stderr where it stands.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ggufspec import bundled
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.owned import Ownership
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length
from ggufspec.engine import Engine, EngineStats
from ggufspec.gguf_file import open_gguf
from ggufspec.job import Job, JobState, Request
from ggufspec.models import load_model, read_config
from ggufspec.parallel import WHOLE
from ggufspec.placement import Placement, place_layers, resolve
from ggufspec.ranks import Ranks, join
from ggufspec.rehearsal import rehearse
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

Data = dict[str, Any]
Save = Callable[[], None]
TEXT = "import os\nimport sys\n\n\ndef read_config(path):\n    with open(path) as f:\n        return json.load(f)\n\n\n"
GREEDY, SAMPLED = SamplingParams(temperature=0, seed=1, ignore_eos=True), SamplingParams(seed=7, ignore_eos=True)
LAST_WORDS_S = 6.0  # before the limit
FAMILY = {"none": None, "draft-mtp": None, "draft-dspark": "dspark", "draft-dflash": "dflash2"}


@dataclass
class Setup:
    """A target on its devices, in this process or as one rank of several."""

    path: str
    devices: list[str]
    shares: list[float]
    split: str
    ranks: Ranks | None = None
    rehearses: bool = True
    rehearsed: set[str] = field(default_factory=set)  # drafters whose kernels were compiled

    def __post_init__(self) -> None:
        start = time.perf_counter()
        self.file = open_gguf(self.path)
        self.config = read_config(self.file)
        self.weights = Weights(self.file)
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata)
        if self.ranks is not None:
            placement = Placement.single(self.ranks.device, self.config.n_layers)
        else:
            placement = place_layers(
                [resolve(d) for d in self.devices], self.config.block_count, self.config.n_layers,
                split=self.split, tensor_split=tuple(self.shares) if self.split == "layer" else (),
            )
            used = {*placement.layers, placement.output}
            assert self.split != "layer" or len(used) == sum(share > 0 for share in self.shares), "layers are not cut"
        shard = WHOLE if self.ranks is None else self.ranks.shard
        self.model = load_model(self.file, placement, config=self.config, weights=self.weights, shard=shard)
        self.load_s = time.perf_counter() - start

    @property
    def leads(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def drafter(self, name: str, path: str | None, n_max: int, n_ctx: int, device: str | None = None,
                owner: int | None = None) -> Any:
        if name == "none":
            return None
        at = None
        if owner is not None and self.ranks is not None:
            at = Ownership(owner, self.ranks.rank, self.ranks.devices, self.ranks.host)
        return load_drafter(
            SpecOptions(types=(name,), draft=DraftOptions(n_max=n_max)), self.file, self.model,
            open_gguf(path) if path else None, n_slots=1, n_ctx=n_ctx,
            device=resolve(device) if device is not None and at is None else None,
            target_weights=self.weights, ownership=at,
        )

    def engine(self, drafter: Any, n_ctx: int, **options: Any) -> Engine:
        """Kernels that no run before has left on disk are compiled at once; ranks do it together."""
        engine = Engine(self.model, self.tokenizer, drafter=drafter, n_ctx=n_ctx, link=self.ranks, **options)
        name = "none" if drafter is None else drafter.name
        if self.rehearses and engine.device.type == "cuda" and name not in self.rehearsed:
            from ggufspec.kernels.ahead import compiled_ahead

            began = time.perf_counter()
            with compiled_ahead(show_progress=False) as kernels:
                rehearse(engine, [SAMPLED])
            print(f"{name}: {kernels.n_kernels} kernels in {time.perf_counter() - began:.1f} s", flush=True)
            self.rehearsed.add(name)
        return engine

    def answer(self, engine: Engine, prompt: list[int], n: int, sampling: SamplingParams = GREEDY) -> Job:
        """A request to its end; followers take it from the leader."""
        job = engine.submit(Request(prompt, sampling, n_predict=n, cache_prompt=False)) if self.leads else None
        engine.step()
        job = job or next(slot.job for slot in engine.slots if slot.job is not None)
        while job.state is not JobState.DONE:
            engine.step()
        return job


def random_prompt(setup: Setup, n: int) -> list[int]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(300, setup.model.n_vocab - 300, (n,), generator=generator).tolist()


def tokens(setup: Setup, task: Data, found: Data, save: Save) -> None:
    """{"drafter | place | sampling": tokens} of the small trained family, for every place a drafter can have."""
    prompt = setup.tokenizer.encode(TEXT)
    for name, part in FAMILY.items():
        for place in task["places"] if name != "none" else [None]:
            owner = place if setup.ranks is not None else None
            device = setup.devices[place] if place is not None else None
            path = str(bundled.path(part)) if part else None
            drafter = setup.drafter(name, path, 4, 256, device, owner)
            engine = setup.engine(drafter, 256, n_ubatch=16)
            for sampling in (GREEDY, SAMPLED):
                if drafter is not None:
                    drafter.reset(0)
                job = setup.answer(engine, prompt, task["n_tokens"], sampling)
                found[f"{name} | {'default' if place is None else place} | {sampling.temperature}"] = job.generated
            save()


def speed(setup: Setup, task: Data, found: Data, save: Save) -> None:
    """Milliseconds a step, plain and drafted, and what they come to at the given acceptance lengths."""
    n_ctx, n = 1024, task["n_tokens"]
    prompt = random_prompt(setup, 64)
    found |= {"load_s": setup.load_s, "link": setup.ranks is not None and setup.ranks.link is not None}
    for wanted in [{"name": "none", "label": "plain"}, *task["drafters"]]:
        drafter = setup.drafter(wanted["name"], wanted.get("path"), wanted.get("n_max", 0), n_ctx)
        synthetic = None
        if drafter is not None:
            length = min(wanted["length"], drafter.n_max + 1)
            synthetic = SyntheticAcceptance(rates_of_length(length, drafter.n_max), 1, setup.model.device)
        engine = setup.engine(drafter, n_ctx, synthetic=synthetic)
        setup.answer(engine, prompt, 12)  # compiles and captures
        engine.stats = EngineStats()
        setup.answer(engine, prompt, n)
        stats = engine.stats
        steps = max(stats.n_decode, 1)
        entry = {
            "step_ms": stats.decode_ms / steps, "draft_ms": stats.draft_ms / steps,
            "verify_ms": stats.verify_ms / steps, "tokens_per_step": 1 + stats.draft_n_accepted / steps,
        }
        entry["ms_per_token"] = entry["step_ms"] / entry["tokens_per_step"]
        if drafter is not None:
            entry["speedup"] = found["plain"]["ms_per_token"] / entry["ms_per_token"]
        found[wanted["label"]] = entry
        print(wanted["label"], entry, flush=True)
        save()
        del engine, drafter
        release()


def prefill(setup: Setup, task: Data, found: Data, save: Save) -> None:
    """Prompt tokens a second with a drafter attached, and milliseconds a plain and a drafted decode step."""
    n, drafted = task["n_prompt"], task["drafter"]
    n_ctx = n + 512
    found |= {"load_s": setup.load_s, "stages": len(setup.model.stages)}
    for name in ("none", drafted["name"]):
        drafter = setup.drafter(name, drafted.get("path"), drafted.get("n_max", 3), n_ctx)
        engine = setup.engine(drafter, n_ctx, n_ubatch=task["n_ubatch"])
        setup.answer(engine, random_prompt(setup, task["n_ubatch"] + 40), 12)
        times = []
        for _ in range(task["repetitions"]):
            job = setup.answer(engine, random_prompt(setup, n), 1)
            times.append(job.stats.prompt_ms)
        ms = statistics.median(times)
        entry = found["plain" if name == "none" else "drafted"] = {
            "prompt_ms": ms, "all_ms": times, "tokens_per_s": 1000 * n / ms
        }
        print(name, entry, flush=True)
        save()
        engine.stats = EngineStats()
        setup.answer(engine, random_prompt(setup, 64), task["n_tokens"])
        entry["step_ms"] = engine.stats.decode_ms / max(engine.stats.n_decode, 1)
        save()
        del engine, drafter
        release()


def sums(task: Data, ranks: Ranks, found: Data, save: Save) -> None:
    """Sums between ranks: the same bits through peer memory, fused or not, as gathered and added; and their times."""
    from ggufspec.kernels import prepared
    from ggufspec.parallel import Shard, Unsummed, add_rms_norm

    device, D = ranks.device, task["columns"]
    found |= {"link": ranks.link is not None, "equal": {}, "us": {}}
    through_group = Shard(ranks.rank, ranks.shares, ranks.devices)
    weight = torch.randn(D, generator=torch.Generator().manual_seed(1)).to(device)
    for T in task["rows"]:
        made = torch.Generator().manual_seed(1000 * T + ranks.rank)
        part = torch.randn(T, D, generator=made).to(device)
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(T)).to(device)
        expected = through_group.sum(part)
        total, a = prepared.add_rms_norm(x, expected, weight, 1e-6)
        got = ranks.shard.sum(part)
        y = Unsummed(part, ranks.link) if ranks.link is not None else got
        fused, b = add_rms_norm(x, y, weight, 1e-6)
        same_scale = a.scale is None or torch.equal(a.scale, b.scale)
        found["equal"][T] = [torch.equal(got, expected), torch.equal(fused, total),
                             torch.equal(a.rows, b.rows) and same_scale]  # fmt: skip
        if device.type == "cuda":
            gathered = partial(gather_add_norm, through_group, x, part, weight)
            fused_again = partial(add_rms_norm, x, y, weight, 1e-6)
            has_link = ranks.link is not None
            found["us"][T] = {
                "alone": timed(partial(prepared.add_rms_norm, x, part, weight, 1e-6), ranks),
                "gathered": timed(gathered, ranks), "peer": timed(fused_again, ranks) if has_link else None,
            }
        print(T, found["equal"][T], found["us"].get(T), flush=True)
        save()
    candidates(task, ranks, found, save)


def candidates(task: Data, ranks: Ranks, found: Data, save: Save) -> None:
    """What ranks choose from their parts of logits, through peer memory and through the library, against the choice
    from the whole; and their times."""
    from ggufspec.kernels import select
    from ggufspec.parallel import Shard
    from ggufspec.unjoined import Unjoined, argmax, top_k

    device, V, k = ranks.device, task["vocabulary"], task["candidates"]
    through_group = Shard(ranks.rank, ranks.shares, ranks.devices)
    bounds = ranks.shard.bounds(V, 64)
    assert bounds is not None
    start, stop = bounds[ranks.rank]
    found |= {"chosen": {}, "chosen_us": {}}
    for T in task["choices"]:
        x = torch.randn(T, V, generator=torch.Generator().manual_seed(T))
        x[T // 2] = x[T // 2].round()  # ties
        x = x.to(device)
        values, ids = select.top_k(x, k)
        parts = [Unjoined(x[:, start:stop].contiguous(), shard, bounds) for shard in (ranks.shard, through_group)]
        found["chosen"][T] = [
            torch.equal(argmax(part), ids[:, 0]) and all(map(torch.equal, top_k(part, k), (values, ids)))
            for part in parts
        ]
        if device.type == "cuda":
            timings = found["chosen_us"][T] = {}
            for n, best in ((1, argmax), (k, partial(top_k, k=k))):
                timings[f"joined {n}"] = timed(partial(of_whole, best, parts[1]), ranks, n=16)
                timings[f"gathered {n}"] = timed(partial(best, parts[1]), ranks, n=16)
                timings[f"peer {n}"] = timed(partial(best, parts[0]), ranks, n=16) if ranks.link is not None else None
        print(T, found["chosen"][T], found["chosen_us"].get(T), flush=True)
        save()


def of_whole(best: Any, part: Any) -> Any:
    from ggufspec.unjoined import whole

    return best(whole(part))


def gather_add_norm(shard: Any, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> Any:
    from ggufspec.kernels import prepared

    return prepared.add_rms_norm(x, shard.sum(part), weight, 1e-6)


def timed(work: Any, ranks: Ranks, n: int = 128, replays: int = 20) -> float:
    """Microseconds of `work`, n times in one graph, on all ranks at once."""
    import torch.distributed as dist

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(n):
            work()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier(group=ranks.host)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / (n * replays)


def release() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Lines(logging.Handler):
    """What the program logs, for the results."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    task, rank, out = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(max(task["limit_s"] - LAST_WORDS_S, 1.0))
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    log = Lines()
    logging.getLogger("ggufspec").addHandler(log)
    logging.getLogger("ggufspec").setLevel(logging.INFO)
    start = time.perf_counter()
    found: Data = {}

    def save() -> None:
        lines = [line for line in log.lines if "sums" in line]
        done = {"found": found, "seconds": time.perf_counter() - start, "log": lines}
        half = out.with_suffix(".half")
        half.write_text(json.dumps(done))
        half.replace(out)

    devices, shares = task["devices"], task["shares"]
    ranks = None
    if task["split"] == "tensor" and len(shares) > 1:
        ranks = join(rank, tuple(map(float, shares)), resolve(devices[rank]))
        print(f"joined after {time.perf_counter() - start:.1f} s:", *log.lines, flush=True)
    if task["kind"] == "sums":
        assert ranks is not None
        sums(task, ranks, found, save)
    else:
        setup = Setup(task["path"], devices, shares, task["split"], ranks, task["rehearses"])
        print(f"loaded in {setup.load_s:.1f} s", flush=True)
        with torch.inference_mode():
            {"tokens": tokens, "speed": speed, "prefill": prefill}[task["kind"]](setup, task, found, save)
    save()
    if ranks is not None:
        import torch.distributed as dist

        dist.barrier(group=ranks.host)  # nobody's memory goes while another rank may still write to it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # graphs that hold the library's launches cannot be taken down in order


if __name__ == "__main__":
    main()
