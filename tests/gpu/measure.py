"""All figures of one machine in one run: the target is loaded once, parts run in turn, each packed as JSON and text.

    python tests/gpu/measure.py --only spec,sweep,server --limit-s 60 --out results
    python tests/gpu/measure.py --smoke         # the bundled family in tiny sizes, on any device

Files are those of `ggufspec bench synth`; acceptance is synthetic but in `tiny`, the trained family. A part that takes
longer than --limit-s stops after the measurement it is at (after twice that time anywhere) and keeps what it has.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import serving_rate
import torch

from ggufspec import bundled
from ggufspec.adaptive import adaptive_for
from ggufspec.capture import Graphs
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.tools import log
from ggufspec.tools.bench import batched, spec_table, tests_options
from ggufspec.tools.bench import tests as llama_bench
from ggufspec.tools.bench.attach import Bench, free, parse_drafter, set_width
from ggufspec.tools.bench.origin import lines, origin
from ggufspec.tools.bench.outputs import PRINTERS
from ggufspec.tools.bench.report import page
from ggufspec.tools.bench.spec import Plan, Results, measure
from ggufspec.tools.bench.steady import SteadyEngine, accept_at_random, run_streams, take_times
from ggufspec.tools.bench.stepper import Stepper, random_tokens
from ggufspec.tools.bench.workloads import choose, encode, own_prompts
from ggufspec.tools.settings import CommonSettings, ModelSettings, Settings

PUBLISHED = ("mtp,n=1,synth-len=1.792", "mtp,n=3,synth-len=2.6", "dspark,n=7,synth-len=3.762",
             "dflash2,n=7,synth-len=3.955")  # fmt: skip
SWEEP = ("mtp,synth-p=0.79", "dspark,synth-len=3.762", "dflash2,synth-len=3.955")
KINDS = {"code": 0.9, "json": 0.6, "prose": 0.15}  # chance of each drafted token if all before it are right
FIXED = (1, 2, 3, 5, 7)
Data = dict[str, Any]


@dataclass
class Session:
    """Files and sizes of a run; models that are loaded stay."""

    options: argparse.Namespace
    is_bundled: bool  # the trained family instead of the files named

    def __post_init__(self) -> None:
        self.is_smoke: bool = self.options.smoke
        self.out = Path(self.options.out)
        names = ("target", "q8", "dspark", "dflash2")
        self.paths = {name: str(getattr(self.options, name)) for name in names}
        if self.is_bundled:
            own = {"target": bundled.target_path(), "q8": bundled.target_path()}
            self.paths = {name: str(own.get(name) or bundled.path(name)) for name in names}
        self.loaded: dict[str, Bench] = {}

    def size(self, real: int, smoke: int) -> int:
        return smoke if self.is_smoke else real

    def bench(self, n_slots: int, n_ctx: int, path: str | None = None) -> Bench:
        path = path or self.paths["target"]
        if path not in self.loaded:
            settings = Settings(model=ModelSettings(path=path))
            start = time.perf_counter()
            self.loaded[path] = Bench.load(settings, 1, 256, show_progress=False)
            print(f"{path}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        return replace(self.loaded[path], n_slots=n_slots, n_ctx=n_ctx)

    def drafter(self, text: str) -> Any:
        name, sign, rest = text.partition(",")
        file = f"={self.paths[name]}" if name in self.paths else ""
        return parse_drafter(name + file + sign + rest)

    def plan(self, bench: Bench, drafters: Sequence[str], **changes: Any) -> Plan:
        prompts = choose(own_prompts(), changes.pop("workloads", ["code"]), changes.pop("n_prompts", 1))
        ids = {k: [encode(p, bench.tokenizer, bench.file.metadata) for p in v] for k, v in prompts.items()}
        values = dict(
            n_max=[], temperatures=[0.0], streams=[1], prompts=ids, n_tokens=self.size(192, 12),
            n_repetitions=self.size(3, 1), sampling=SamplingParams(temperature=0.0, seed=1), ignore_eos=True,
        )  # fmt: skip
        return Plan([self.drafter(d) for d in drafters], **(values | changes))

    def facts(self) -> Data:
        """Machine and versions; large files are named by their sizes, since hashing takes longer than measuring."""
        files = [Path(path) for path in dict.fromkeys(self.paths.values()) if Path(path).exists()]
        found = [{"name": f.name, "bytes": f.stat().st_size, "sha256": "not taken"} for f in files]
        return {**origin([]), "files": found}


# -- drafters against plain decoding -------------------------------------------------------------------------------


def spec(session: Session, data: Data) -> Iterator[str]:
    """`bench spec` at the published lengths, each drafter in turn with plain decoding, and where a step goes."""
    yield from compared(session, data, PUBLISHED, split=True)


def sweep(session: Session, data: Data) -> Iterator[str]:
    """Draft lengths 1 to 8, longer drafts accepting more; then the length that is decided before every step."""
    n_max = [1, 3, "auto"] if session.is_smoke else [*range(1, 9), "auto"]
    yield from compared(session, data, SWEEP, n_max=n_max, n_repetitions=1, n_tokens=session.size(128, 12))


def tiny(session: Session, data: Data) -> Iterator[str]:
    """The trained family: real acceptance, greedy and sampled streams equal to plain ones."""
    yield from compared(
        Session(session.options, is_bundled=True), data, ("mtp", "mtp,n=1", "mtp,n=auto", "dspark", "dspark,n=auto",
        "dflash2", "dflash2,n=auto"), workloads=["code", "json", "prose"], n_prompts=session.size(2, 1),
        n_tokens=session.size(128, 12), temperatures=[0.0, 1.0], n_repetitions=1,
    )  # fmt: skip


def compared(session: Session, data: Data, drafters: Sequence[str], split: bool = False, **how: Any) -> Iterator[str]:
    results = Results()
    bench = session.bench(1, 768)
    for text in drafters:
        plan = session.plan(bench, [text], **how)
        found = measure(bench, plan, split=split, show_progress=False)
        for all_of, new in ((results.cells, found.cells), (results.parity, found.parity), (results.split, found.split)):
            all_of.extend(new)
        data.update(origin=session.facts(), n_tokens=plan.n_tokens, repetitions=plan.n_repetitions, seed=1)
        data.update(results.as_dict())
        yield spec_table.text(found)
    differing = [c for c in results.cells if spec_table.is_difference(c.parity)]
    differing += [p for p in results.parity if p["result"] != "equal"]
    if differing:
        raise AssertionError(f"{len(differing)} drafted streams differ from plain ones")


def repeat(session: Session, data: Data) -> Iterator[str]:
    """The same short measurement twice: medians must agree within 3 %."""
    bench = session.bench(1, 768)
    plan = session.plan(bench, ("mtp,n=1,synth-len=1.792", "dspark,n=7,synth-len=3.762"), n_repetitions=5)
    twice = [measure(bench, plan, show_progress=False).cells for _ in range(2)]
    data["runs"] = [[c.as_dict() for c in cells] for cells in twice]
    rows = []
    for a, b in zip(*twice):
        for key in ("plain_ms_per_token", "ms_per_token", "draft_ms", "verify_ms", "decode_speedup"):
            x, y = getattr(a, key).median, getattr(b, key).median
            rows.append([a.drafter, key, f"{x:.3f}", f"{y:.3f}", f"{100 * (y / x - 1):+.2f} %"])
    data["differences"] = rows
    yield spec_table.grid(("drafter", "median", "first", "second", "difference"), rows)


def adaptive(session: Session, data: Data) -> Iterator[str]:
    """`auto` against every fixed length: code-like, JSON-like, prose-like acceptance, 1, 12 and 24 streams."""
    crowds = {1: session.size(192, 24), **({3: 12} if session.is_smoke else {12: 64, 24: 48})}
    bench = session.bench(max(crowds), 512)
    plain = bench.engine(None, ignore_eos=True)
    heads = ("drafter", "streams", "acceptance", "plain", *(f"n={n}" for n in FIXED), "auto", "drafted", "at first",
             "of plain", "of best")  # fmt: skip
    rows = data["rows"] = []
    for name in session.options.drafters.split(","):
        drafter = bench.load_drafter(session.drafter(name), 7)
        fixed, auto = (bench.engine(drafter, ignore_eos=True) for _ in range(2))
        most = set_width(fixed, 7)
        auto.policy = adaptive_for(drafter)
        for n_streams, n_tokens in crowds.items():
            prompts, sampling = streams(bench, n_streams)
            set_width(fixed, most)
            accept_at_random(auto, [0.5 ** (i + 1) for i in range(most)])
            take_times(auto, prompts, sampling)
            for kind, chance in KINDS.items():
                rates = [chance ** (i + 1) for i in range(most)]
                set_width(fixed, most)
                accept_at_random(auto, rates)
                run = [rate(auto, prompts, n_tokens, sampling, nth) for nth in range(2)]
                found = [rate(plain, prompts, n_tokens, sampling)]
                accept_at_random(fixed, rates)
                for n in FIXED:
                    set_width(fixed, n)
                    run_streams(fixed, prompts, 2 * n + 4, sampling)  # captured before it is timed
                    found.append(rate(fixed, prompts, n_tokens, sampling, 1))
                best, last = max(r[0] for r in found), run[1]
                rows.append([
                    name, str(n_streams), kind, *(f"{r[0]:.1f}" for r in found), f"{last[0]:.1f}", f"{last[1]:.1f}",
                    f"{run[0][0]:.1f}", f"{last[0] / found[0][0]:.3f}", f"{last[0] / best:.3f}",
                ])  # fmt: skip
                yield spec_table.grid(heads, rows[-1:])
        del fixed, auto, drafter
        free()
    yield "tokens a second of all streams together\n" + spec_table.grid(heads, rows)


def streams(bench: Bench, n: int) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(n)
    prompts = [random_tokens(32, bench.model.n_vocab, generator).tolist() for _ in range(n)]
    return prompts, [SamplingParams(temperature=0.0, seed=i) for i in range(n)]


def rate(engine: SteadyEngine, prompts: Any, n_tokens: int, sampling: Any, nth: int = 0) -> tuple[float, float]:
    """(tokens a second of all streams, drafted tokens of a stream's step)"""
    run = run_streams(engine, prompts, n_tokens, sampling, nth)
    return 1000 / run.ms_per_token, run.stats.draft_n / max(run.stats.n_slots_decoded, 1)


# -- the target alone ----------------------------------------------------------------------------------------------


def width(session: Session, data: Data) -> Iterator[str]:
    """Milliseconds of a captured forward, logits of all rows included, by rows of a stream, at 512 tokens."""
    bench = session.bench(1, 768)
    depth = session.size(512, 32)
    stepper = Stepper(bench.model, 1, 768, "f16", "f16", 512, 512)
    stepper.prompt(torch.arange(depth) % 1000)
    for W in (1, 2, 4, 8, 16):
        data[str(W)] = ms = forward_ms(stepper, W, session.size(20, 2))
        yield f"{W:2d} rows  {ms:7.3f} ms  {ms / data['1']:.2f} times one row"


@torch.inference_mode()
def forward_ms(stepper: Stepper, W: int, n: int) -> float:
    model, cache, device = stepper.model, stepper.cache, stepper.device
    one = torch.ones(1, dtype=torch.int64, device=device)
    tokens = torch.arange(W, device=device)[None] + 100

    def stage(tokens: torch.Tensor) -> torch.Tensor | None:
        rows = Rows(tokens, one - 1, one * stepper.n_past[0], one * W, True)
        logits = model.forward(rows, cache, logits="all").logits
        cache.accept(rows.slots, one)
        return logits

    graphs = Graphs(device, cache.mutable) if stepper.graphs is not None else None
    times = []
    for _ in range(n + 3):
        stepper.wait()
        start = time.perf_counter()
        stage(tokens) if graphs is None else graphs.run("width", stage, (tokens,))
        stepper.wait()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def decode_together(session: Session, data: Data) -> Iterator[str]:
    """Streams that decode together, as `bench batched` times them."""
    counts = [1, 2, 3] if session.is_smoke else [1, 4, 8, 12, 16, 24]
    bench = session.bench(max(counts), 256)
    stepper = Stepper(bench.model, max(counts), 256, "f16", "f16", 512, 2048)
    generator, n_vocab = torch.Generator().manual_seed(0), bench.model.n_vocab
    rows = data["rows"] = []
    for n in counts:
        stepper.step(random_tokens(n, n_vocab, generator), range(n))
        pp, tg = session.size(64, 8), session.size(48, 4)
        row = batched.figures(pp, tg, n, False, *batched.measure(stepper, n_vocab, generator, pp, tg, n, False, False))
        rows.append(row)
        yield f"{n:2d} streams: prompts {row['speed_pp']:8.1f} tok/s, decoding together {row['speed_tg']:8.1f} tok/s"


def prefill(session: Session, data: Data) -> Iterator[str]:
    """Prompts of 512 and 4096 tokens."""
    sizes = ["-p", "16,48", "-r", "1"] if session.is_smoke else ["-p", "512,4096", "-r", "3"]
    yield from as_llama_bench(session, data, [*sizes, "-n", "0", "-ub", "2048", "-b", "2048"], session.paths["target"])


def depth(session: Session, data: Data) -> Iterator[str]:
    """Decoding after long prompts, with both cache types."""
    depths, n = ("0,32", "4") if session.is_smoke else ("0,8192,32768", "64")
    for kind in ("f16", "q8_0"):
        options = ["-p", "0", "-n", n, "-d", depths, "-ctk", kind, "-ctv", kind, "-ub", "2048", "-r", "2"]
        yield from as_llama_bench(session, data, options, session.paths["target"])


def q8(session: Session, data: Data) -> Iterator[str]:
    """Decoding a Q8_0 file."""
    sizes = ["-p", "16", "-n", "4", "-r", "1"] if session.is_smoke else ["-p", "512", "-n", "64", "-r", "3"]
    yield from as_llama_bench(session, data, [*sizes, "-ub", "2048"], session.paths["q8"])
    session.loaded.pop(session.paths["q8"])


def as_llama_bench(session: Session, data: Data, arguments: list[str], path: str) -> Iterator[str]:
    """`ggufspec bench` with these options, on the model that is loaded."""
    options = tests_options.parse(["-m", path, *arguments], print)
    bench = session.bench(1, 256, path)
    rows = data.setdefault("rows", [])
    text = io.StringIO()
    printer = PRINTERS["md"](text, options, bench.model.device.type == "cpu")
    printer.header()
    for test in options.tests():
        rows.append(llama_bench.row_of(test, bench, llama_bench.measure(test, bench, options)))
        printer.row(rows[-1])
        yield text.getvalue().rstrip()
        text.seek(text.truncate(0))


def server(session: Session, data: Data) -> Iterator[str]:
    """`ggufspec server` under 1, 12 and 24 streams, plain and with drafters at synthetic acceptance."""
    session.loaded.clear()
    free()
    counts, n_tokens = ([1, 2], 8) if session.is_smoke else ([1, 12, 24], 128)
    seven = ",".join(f"{0.755 ** (i + 1):.4f}" for i in range(7))
    modes = {
        "plain": [],
        "dspark n=7": ["-md", session.paths["dspark"], "--spec-draft-n-max", "7", "--spec-synth-len", "3.762"],
        "mtp n=1": ["--spec-type", "draft-mtp", "--spec-draft-n-max", "1", "--spec-synth-len", "1.792"],
        "dspark auto": ["-md", session.paths["dspark"], "--spec-draft-n-max", "auto", "--spec-synth-rates", seven],
    }
    for name, options in modes.items():
        argv = ["-m", session.paths["target"], "-np", str(max(counts)), "-c", str(512 * max(counts)), *options]
        argv.append("--no-warmup")  # would capture every number of streams
        with serving_rate.Server(argv, session.out / f"server-{name.replace(' ', '-')}.log") as started:
            yield f"{name}: ready after {started.ready_s:.1f} s"
            for n in counts:
                for _ in range(2):  # what a crowd of this size captures is captured before it is timed
                    serving_rate.load(started.address, n, n_tokens)
                data[f"{name}, {n} streams"] = found = serving_rate.load(started.address, n, n_tokens)
                yield (
                    f"{name:12s} {n:2d} streams: {found['stream_median']:7.1f} tok/s a stream (median), "
                    f"{found['total']:8.1f} in all, first token after {found['first_ms_median']:.0f} ms"
                )


PARTS: dict[str, Callable[[Session, Data], Iterator[str]]] = {
    "width": width, "spec": spec, "sweep": sweep, "repeat": repeat, "tiny": tiny, "batched": decode_together,
    "prefill": prefill, "depth": depth, "adaptive": adaptive, "q8": q8, "server": server,
}  # fmt: skip


class OutOfTime(Exception):
    pass


def run_part(name: str, session: Session, limit_s: float) -> bool:
    """One part, its files written whatever happens. True when it came to its end."""
    data: Data = {}
    said: list[str] = []

    def ring(*_: object) -> None:
        raise OutOfTime(f"stopped after twice the limit of {limit_s:g} s")

    def say(text: str) -> None:
        print(text, flush=True)
        said.append(text)

    say(f"== {name}: {(PARTS[name].__doc__ or '').strip()}")
    start, is_whole = time.monotonic(), False
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s)
    try:
        for text in PARTS[name](session, data):
            say(text)
            if time.monotonic() - start > limit_s:
                say(f"stopped: the limit of {limit_s:g} s is over")
                break
        else:
            is_whole = True
    except Exception:
        say(traceback.format_exc())
    signal.setitimer(signal.ITIMER_REAL, 0)
    data["seconds"] = time.monotonic() - start
    say(f"-- {name}: {data['seconds']:.1f} s")
    free()
    data["is_whole"] = is_whole
    (session.out / f"{name}.json").write_text(json.dumps(data, indent=1))
    (session.out / f"{name}.txt").write_text("\n".join(said) + "\n")
    if data.get("cells"):
        (session.out / f"{name}.html").write_text(page(data), encoding="utf-8")
    return is_whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order (default: all)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds of each part")
    parser.add_argument("--out", default="measured", help="folder for NAME.json, NAME.txt, NAME.html")
    parser.add_argument("--target", default="/dev/shm/t.gguf")
    parser.add_argument("--q8", default="/dev/shm/t8.gguf")
    parser.add_argument("--dspark", default="/dev/shm/dspark.gguf")
    parser.add_argument("--dflash2", default="/dev/shm/dflash2.gguf")
    parser.add_argument("--drafters", default="dspark,mtp", help="of the part adaptive")
    parser.add_argument("--smoke", action="store_true", help="the bundled family, tiny sizes")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    log.setup(CommonSettings(verbosity=2))
    session = Session(options, is_bundled=options.smoke)
    session.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(lines(session.facts())), flush=True)
    whole = [run_part(name, session, options.limit_s) for name in names]
    return 0 if all(whole) else 1


if __name__ == "__main__":
    raise SystemExit(main())
