"""All figures of one machine in one run: the target is loaded once, parts run in turn, each kept as JSON and tables.

    python tests/gpu/measure.py --only spec,sweep,server --limit-s 60 --out results
    python tests/gpu/measure.py --smoke         # the bundled family in tiny sizes, on any device

Files are those of `ggufspec bench synth`; acceptance is synthetic but in `tiny`, the trained family. A part that takes
longer than --limit-s stops after the measurement it is at (after 1.5 times that anywhere) and keeps what it has. Files
are written after every measurement, so a run that is killed loses nothing: NAME.json, NAME.md, NAME.txt and, of all
parts in the folder, tables.md. Two runs on two GPUs may share a folder.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import drafted
import serving_rate
import torch
from session import Data, Said, Session, Table

from ggufspec.capture import Graphs
from ggufspec.drafters import Drafter
from ggufspec.engine import Engine
from ggufspec.job import Request
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.tools import log, runtime
from ggufspec.tools import options as command_line
from ggufspec.tools.bench import batched, tests_options
from ggufspec.tools.bench import tests as llama_bench
from ggufspec.tools.bench.attach import Bench, free
from ggufspec.tools.bench.origin import lines
from ggufspec.tools.bench.outputs import PRINTERS
from ggufspec.tools.bench.report import page
from ggufspec.tools.bench.stepper import Stepper, random_tokens
from ggufspec.tools.settings import CommonSettings, Settings
from ggufspec.tools.warm_up import capture_prompts, capture_steps, compile_kernels, run_all

HARD = 1.5  # times the limit of a part


# -- the target alone ----------------------------------------------------------------------------------------------


def width(session: Session, data: Data) -> Iterator[Said]:
    """Milliseconds of a captured forward, logits of all rows included, by rows of a stream, at 512 tokens."""
    yield from widths(session, data, session.paths["target"], (1, 2, 4, 8, 16))


def widths(session: Session, data: Data, path: str, all_rows: tuple[int, ...]) -> Iterator[Said]:
    bench = session.bench(1, 768, path)
    depth = session.size(512, 32)
    stepper = Stepper(bench.model, 1, 768, "f16", "f16", 512, 512)
    stepper.prompt(torch.arange(depth) % 1000)
    found: dict[int, float] = {}
    data["width_ms"] = found
    for W in all_rows:
        found[W] = forward_ms(stepper, W, session.size(40, 2))
        rows = [[str(w), f"{ms:.3f}", f"{ms / found[1]:.2f}"] for w, ms in found.items()]
        yield Table(f"Forward of w rows, {Path(path).name}", ("w", "ms", "over w = 1"), rows)


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


def decode_together(session: Session, data: Data) -> Iterator[Said]:
    """Streams that decode together from one prompt that they share, timed as `bench batched -pps` does."""
    counts = [1, 2, 3] if session.is_smoke else [24, 8, 16, 1, 12, 4]
    pp, tg = session.size(128, 8), session.size(64, 4)
    bench = session.bench(max(counts), 256)
    stepper = Stepper(bench.model, max(counts), 256, "f16", "f16", 512, 2048)
    generator, n_vocab = torch.Generator().manual_seed(0), bench.model.n_vocab
    rows = data["rows"] = []
    shown = []
    for n in counts:
        stepper.step(random_tokens(n, n_vocab, generator), range(n))
        row = batched.figures(pp, tg, n, True, *batched.measure(stepper, n_vocab, generator, pp, tg, n, True, False))
        rows.append(row)
        shown.append([str(n), f"{1000 * row['t_tg'] / tg:.2f}", f"{row['speed_tg']:.1f}"])
        yield Table("Streams together, without drafts", ("streams", "step ms", "tok/s"), shown)


def prefill(session: Session, data: Data) -> Iterator[Said]:
    """Prompts of 4096 and 512 tokens."""
    sizes = ["-p", "16,48", "-r", "1"] if session.is_smoke else ["-p", "4096,512", "-r", "4"]
    options = [*sizes, "-n", "0", "-ub", "2048", "-b", "2048"]
    for said in as_llama_bench(session, data, options, session.paths["target"]):
        yield said
        rows = [[str(row["n_prompt"]), f"{statistics.median(row['samples_ts']):.0f}"] for row in data["rows"]]
        yield Table("Prompts", ("tokens", "tok/s"), rows)


def first(session: Session, data: Data) -> Iterator[Said]:
    """Milliseconds from a request to its first token, in the server's engine, by drafter and tokens of the prompt.

    Beside them those of a chunk alone: until the host has given it away, and until the GPU has run it. `once`: the
    first request of its length, which captures what the start has not.
    """
    n_ctx = 512 if session.is_smoke else 4096
    bench = session.bench(1, n_ctx)
    rows: list[list[str]] = []
    found = data["first_ms"] = []
    for name in ("plain", "mtp,n=1", "dspark,n=7"):
        argv = ["-m", session.paths["target"], "-np", "1", "-c", str(n_ctx), *MODES[name]]
        drafter = None if name == "plain" else bench.load_drafter(session.drafter(name), None)
        settings = command_line.parse("server", argv, environ={})
        engine = runtime.make_engine(settings, bench.model, bench.tokenizer, drafter, 1, n_ctx)
        compile_kernels(engine, [])
        start = time.perf_counter()
        capture_prompts(engine, 0)
        seconds = time.perf_counter() - start
        for n in (20, 60) if session.is_smoke else (20, 128, 512, 2000):
            times = [first_ms(engine, n) for _ in range(session.size(10, 3))]
            ms, n_chunks = sorted(times[1:])[len(times) // 2 - 1]
            host, both = chunk_ms(engine, min(n, engine.n_ubatch))
            found.append({"drafter": name, "tokens": n, "first_ms": ms, "chunks": n_chunks, "host_ms": host,
                          "chunk_ms": both, "once_ms": times[0][0], "capture_s": seconds})  # fmt: skip
            rows.append([name, str(n), f"{ms:.1f}", str(n_chunks), f"{host:.2f}", f"{both:.1f}", f"{times[0][0]:.0f}"])
            yield Table(f"First token (chunks of up to {engine.n_ubatch})", FIRST_HEADS, rows)
        yield f"{name}: prompts captured in {seconds:.1f} s"
        del engine, drafter
        free()


FIRST_HEADS = ("drafter", "tokens", "first token, ms", "chunks", "a chunk: host ms", "all ms", "once")


def first_ms(engine: Engine, n: int) -> tuple[float, int]:
    """From a request of n tokens to its first token, and the chunks that takes."""
    sampling, n_chunks = SamplingParams(temperature=0, ignore_eos=True), 0
    prompt = [100 + 7 * i % 400 for i in range(n)]
    start = time.perf_counter()
    job = engine.submit(Request(prompt, sampling, n_predict=2, cache_prompt=False))
    while not job.generated:
        engine.step()
        n_chunks += 1
    ms = 1000 * (time.perf_counter() - start)
    while not engine.idle:
        engine.step()
    return ms, n_chunks


@torch.inference_mode()
def chunk_ms(engine: Engine, n: int) -> tuple[float, float]:
    """(until the host has given a chunk of n tokens to the device, until that has run it), medians."""
    engine.erase_slot(0)
    times = []
    for _ in range(5):
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        start = time.perf_counter()
        engine.prefill.run([100] * n, 0, 0, is_last=True)
        given = time.perf_counter()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        times.append((1000 * (given - start), 1000 * (time.perf_counter() - start)))
    engine.prefill.join()
    engine.erase_slot(0)
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def depth(session: Session, data: Data) -> Iterator[Said]:
    """Decoding after long prompts, with both cache types: all depths in turn, as a card's clock drifts by more than
    depths differ."""
    depths, n, n_rounds = ((0, 8, 32), 4, 2) if session.is_smoke else ((0, 8192, 32768), 64, 6)
    bench = session.bench(1, 256)
    generator, n_vocab = torch.Generator().manual_seed(0), bench.model.n_vocab
    rows = data["rows"] = []
    for kind in ("q8_0", "f16"):
        stepper = Stepper(bench.model, len(depths), depths[-1] + n, kind, kind, 2048, 2048)
        for slot, at in enumerate(depths):
            stepper.clear(slot)
            stepper.prompt(random_tokens(at, n_vocab, generator), slot)
        saved = [stepper.save(slot) for slot in range(len(depths))]
        stepper.step(random_tokens(1, n_vocab, generator), [0])
        found: list[Data] = [{"type_k": kind, "n_depth": at, "samples_ts": []} for at in depths]
        rows += found
        for _ in range(n_rounds):
            for slot, row in enumerate(found):
                stepper.restore(slot, saved[slot])
                tokens = random_tokens(n, n_vocab, generator)
                stepper.wait()
                start = time.perf_counter()
                for i in range(n):
                    stepper.step(tokens[i : i + 1], [slot])
                row["samples_ts"].append(n / (time.perf_counter() - start))
            yield Table("Decoding after long prompts, in turn", DEPTH_HEADS, depth_rows(rows))
        del stepper, saved
        free()


DEPTH_HEADS = ("KV", "depth", "tok/s", "over depth 0, of the same round")


def depth_rows(rows: list[Data]) -> list[list[str]]:
    """Medians by cache type and depth, of rates and of their ratios to depth 0 in the same round."""
    rates = {(row["type_k"], row["n_depth"]): row["samples_ts"] for row in rows}
    return [
        [kind, str(at), f"{statistics.median(found):.1f}",
         f"{statistics.median(rate / shallow for rate, shallow in zip(found, rates[kind, 0])):.3f}"]
        for (kind, at), found in sorted(rates.items())
    ]  # fmt: skip


def q8(session: Session, data: Data) -> Iterator[Said]:
    """A Q8_0 file: decoding, and forwards of few rows."""
    sizes = ["-p", "0", "-n", "4", "-r", "1"] if session.is_smoke else ["-p", "0", "-n", "64", "-r", "4"]
    yield from as_llama_bench(session, data, [*sizes, "-ub", "2048"], session.paths["q8"])
    rates = data["rows"][-1]["samples_ts"]
    yield Table("Decoding, Q8_0", ("tok/s",), [[f"{statistics.median(rates):.1f}"]])
    yield from widths(session, data, session.paths["q8"], (1, 8, 2, 4))
    session.loaded.pop(session.paths["q8"])


def as_llama_bench(session: Session, data: Data, arguments: list[str], path: str) -> Iterator[Said]:
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


# -- the server ------------------------------------------------------------------------------------------------------


MODES: dict[str, list[str]] = {
    "plain": [],
    "dspark,n=7": ["--spec-type", "draft-dspark", "--spec-draft-n-max", "7", "--spec-synth-len", "3.762"],
    "mtp,n=1": ["--spec-type", "draft-mtp", "--spec-draft-n-max", "1", "--spec-synth-len", "1.792"],
    "dspark,n=auto": [
        "--spec-type", "draft-dspark", "--spec-synth-rates", ",".join(f"{0.755 ** (i + 1):.4f}" for i in range(7))
    ],
}  # fmt: skip


def server(session: Session, data: Data) -> Iterator[Said]:
    """`ggufspec server` under 1, 12 and 24 streams, plain and with drafters at synthetic acceptance."""
    yield from loads(session, data, ("plain", "dspark,n=7", "mtp,n=1"))


def server_auto(session: Session, data: Data) -> Iterator[Said]:
    """The same with lengths decided before every step; beside it what `server` found without drafts."""
    yield from loads(session, data, ("dspark,n=auto",))


def loads(session: Session, data: Data, modes: tuple[str, ...]) -> Iterator[Said]:
    counts, n_tokens = ([1, 2], 24) if session.is_smoke else ([1, 12, 24], 256)
    n_slots = max(counts)
    bench = session.bench(n_slots, 512)
    found: dict[str, list[Data]] = dict(session.kept)
    data["found"] = found
    for name in modes:
        argv = ["-m", session.paths["target"], "-np", str(n_slots), "-c", str(512 * n_slots), *MODES[name]]
        settings = command_line.parse("server", argv, environ={})
        drafter = None if name == "plain" else bench.load_drafter(session.drafter(name), None)
        started = served(bench, settings, drafter)
        with started:
            # All sizes of a crowd that comes and goes are captured before anything is timed: a stream joins a step.
            started.load(n_slots, session.size(tokens_a_step(name) * 40, 8))
            found[name] = []
            for n in counts:
                seeds = (1, 101, 201) if n == 1 and not session.is_smoke else (1,)  # one stream's draws are few
                found[name].append(serving_rate.median_of([started.load(n, n_tokens, seed) for seed in seeds]))
                yield Table(SERVER_TITLE, SERVER_HEADS, server_rows(found))
        del started, drafter
        free()
        if name == "plain":
            session.kept[name] = found[name]


def tokens_a_step(mode: str) -> int:
    return {"plain": 1, "mtp,n=1": 2}.get(mode, 4)


SERVER_TITLE = "The server under load: tokens a second, medians of streams"
SERVER_HEADS = ("drafts", "streams", "a stream, all decoding", "a stream, first to last token", "all",
                "first token, ms", "accepted %", "x plain")  # fmt: skip


def server_rows(found: dict[str, list[Data]]) -> list[list[str]]:
    """One row a mode and number of streams; the last column compares streams while all decode."""

    def rate(load: Data) -> float:
        together: float | None = load["together_median"]
        return load["stream_median"] if together is None else together

    plain = {load["streams"]: rate(load) for load in found.get("plain", [])}
    return [
        [name, str(load["streams"]), f"{rate(load):.1f}" + ("" if load["together_median"] else " *"),
         f"{load['stream_median']:.1f}", f"{load['total']:.0f}", f"{load['first_ms_median']:.0f}",
         f"{100 * load['accepted']:.1f}" if load["accepted"] is not None else "",
         f"{rate(load) / plain[load['streams']]:.2f}" if load["streams"] in plain else ""]
        for name, loads in found.items() for load in loads
    ]  # fmt: skip


def served(bench: Bench, settings: Settings, drafter: Drafter | None) -> serving_rate.Server:
    """The server that these settings start, on the model that is loaded."""
    from ggufspec.tools.server.load import loaded

    def load() -> object:
        engine = runtime.make_engine(settings, bench.model, bench.tokenizer, drafter, bench.n_slots, bench.n_ctx)
        compile_kernels(engine, [])
        run_all(engine, bench.tokenizer.bos or 0)
        capture_steps(engine, [])
        parts = (settings, bench.file, bench.config, bench.model, bench.tokenizer, drafter, engine)
        return loaded(runtime.Runtime(*parts))

    return serving_rate.Server(settings, load)


# -- compiling -----------------------------------------------------------------------------------------------------


def compile_all(session: Session, data: Data) -> Iterator[Said]:
    """Measures nothing: kernels of all parts are compiled, so that other runs find them on disk."""
    own = Session(session.options, is_bundled=True)
    for which, name in ((session, "target"), (own, "target"), (session, "q8")):
        for n_slots in (1,) if which is own or name == "q8" else (24, 1):
            bench = which.bench(n_slots, 1024, which.paths[name])
            for text in ("dflash2", "dspark", "mtp") if name == "target" else ():
                drafter = bench.load_drafter(which.drafter(text), 7)
                bench.engine(drafter, ignore_eos=True)
                del drafter
                free()
            bench.engine(None, ignore_eos=True)
            yield f"{Path(which.paths[name]).name}: {n_slots} streams"
        if name == "q8":
            which.loaded.pop(which.paths[name], None)
        elif which is session:
            yield from compile_steps(bench)
        free()


def compile_steps(bench: Bench) -> Iterator[Said]:
    """What prompts, widths and caches need that no engine does: the target alone."""
    if bench.model.device.type != "cuda":
        return
    from ggufspec.kernels.ahead import compiled_ahead

    with compiled_ahead(show_progress=False) as kernels:
        for kind in ("f16", "q8_0"):
            stepper = Stepper(bench.model, 24, 4352, kind, kind, 2048, 2048, use_graphs=False)
            for n in (4096, 512, 128):
                stepper.clear(0)
                stepper.prompt(torch.zeros(n, dtype=torch.int64))
            for n in (1, 4, 8, 12, 16, 24) if kind == "f16" else (1,):
                stepper.step(torch.zeros(n, dtype=torch.int64), range(n))
            for W in (1, 2, 4, 8, 16) if kind == "f16" else ():
                forward_ms(stepper, W, 1)
            del stepper
    yield f"{kernels.n_kernels} kernels of the target alone"


PARTS: dict[str, Callable[[Session, Data], Iterator[Said]]] = {
    "spec": drafted.spec, "tiny": drafted.tiny, "sweep": drafted.sweep, "depth": depth, "width": width,
    "batched": decode_together, "first": first, "prefill": prefill, "repeat": drafted.repeat, "split": drafted.split,
    "server": server, "adaptive": drafted.adaptive, "q8": q8, "server_auto": server_auto, "compile": compile_all,
}  # fmt: skip


class OutOfTime(Exception):
    pass


@dataclass
class Report:
    """What a part has said and found so far; `write` may be called at any time."""

    name: str
    title: str
    out: Path
    data: Data = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)

    def say(self, said: Said) -> None:
        if isinstance(said, Table):
            before = self.tables.get(said.title)
            self.tables[said.title] = said
            text = said.text() if before is None else said.after(before).text()
        else:
            text = said
        print(text, flush=True)
        self.said.append(text)

    def write(self) -> None:
        notes = "" if self.data.get("is_whole") else "Not finished.\n\n"
        tables = "\n\n".join(table.markdown() for table in self.tables.values())
        replace_file(self.out / f"{self.name}.json", json.dumps(self.data, indent=1))
        replace_file(self.out / f"{self.name}.txt", "\n".join(self.said) + "\n")
        if self.tables:
            replace_file(self.out / f"{self.name}.md", f"## {self.name}: {self.title}\n\n{notes}{tables}\n")
        parts = [self.out / f"{name}.md" for name in PARTS]
        replace_file(self.out / "tables.md", "\n".join(part.read_text() for part in parts if part.exists()))
        if self.data.get("cells"):
            replace_file(self.out / f"{self.name}.html", page(self.data))


def replace_file(path: Path, text: str) -> None:
    """The old file or the new one, whenever somebody looks."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def run_part(name: str, session: Session, limit_s: float) -> bool:
    """One part, its files written after every measurement. True when it came to its end."""
    report = Report(name, (PARTS[name].__doc__ or "").strip().partition("\n")[0], session.out)

    def ring(*_: object) -> None:
        raise OutOfTime(f"stopped after {HARD:g} times the limit of {limit_s:g} s")

    start, is_whole = time.monotonic(), False
    print(f"== {name}: {report.title}", flush=True)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HARD * limit_s)
    try:
        for said in PARTS[name](session, report.data):
            report.data["seconds"] = time.monotonic() - start
            report.say(said)
            report.write()
            if time.monotonic() - start > limit_s:
                report.say(f"stopped: the limit of {limit_s:g} s is over")
                break
        else:
            is_whole = True
    except Exception as error:
        report.say(traceback.format_exc())
        traceback.clear_frames(error.__traceback__)  # which hold models and caches
    signal.setitimer(signal.ITIMER_REAL, 0)
    report.data.update(seconds=time.monotonic() - start, is_whole=is_whole)
    report.say(f"-- {name}: {report.data['seconds']:.1f} s")
    gc.collect()
    free()
    report.write()
    return is_whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in PARTS if name != "compile"]
    parser.add_argument("--only", default=",".join(every), help="parts, in this order (default: all)")
    parser.add_argument("--limit-s", default="60", help="seconds of each part; one number, or one a part (40,20,..)")
    parser.add_argument("--out", default="measured", help="folder for NAME.json, NAME.md, NAME.txt and tables.md")
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
    try:
        limits = [float(text) for text in options.limit_s.split(",")]
    except ValueError:
        parser.error(f"--limit-s {options.limit_s}: expected numbers of seconds")
    if len(limits) not in (1, len(names)):
        parser.error(f"--limit-s has {len(limits)} numbers for {len(names)} parts; expected one, or one a part")
    log.setup(CommonSettings(verbosity=2))
    session = Session(options, is_bundled=options.smoke)
    session.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(lines(session.facts())), flush=True)
    whole = [run_part(name, session, limit) for name, limit in zip(names, limits * len(names))]
    return 0 if all(whole) else 1


if __name__ == "__main__":
    raise SystemExit(main())
