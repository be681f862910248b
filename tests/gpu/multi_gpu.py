"""Everything about several devices in one run: the same tokens everywhere, speeds, prefill, and the planner.

    python tests/gpu/multi_gpu.py --json out.json                        # every GPU of the machine
    python tests/gpu/multi_gpu.py --cpu 4 --json out.json                # logical CPU devices, the bundled models
    python tests/gpu/multi_gpu.py -m target.gguf --dspark d.gguf --dflash2 e.gguf --only speed,prefill --json out.json

Parts: sums (and choices between ranks, GPUs only), tokens (the bundled family: every split, drafter, place), speed
(tensor split over 1, 2, 4... devices), prefill (layer split against one device), plan (planner against allocator, GPUs
only). Each task is a set of processes with a limit of its own; one that takes longer is ended and said to have failed,
with what it had found by then and where its ranks stood. Tasks that share no device's time, or need none, run at once.
The JSON and, beside it, a Markdown table are written after every task. The exit status is 1 when anything failed or a
token differed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ggufspec import bundled

Data = dict[Any, Any]
FOLDER = Path(__file__).parent
ROWS, COLUMNS = (1, 3, 8, 16, 32, 64), 5120  # of sums
CHOICES = (1, 3, 8, 64, 192)  # rows of logits
VOCABULARY, CANDIDATES = 248320, 20
LOG_LINES = 40  # of a rank that failed, for the results
# Seconds a task may take. Most of it is for kernels that no run before has compiled.
LIMITS = {"sums": 120.0, "tokens": 240.0, "speed": 240.0, "prefill": 240.0, "plan": 240.0}


@dataclass
class Task:
    """What one set of processes does, and where its result goes: into[key]."""

    kind: str
    split: str
    devices: list[str]
    shares: list[float]
    into: Data
    key: Any
    more: Data

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.split} {','.join(f'{s:g}' for s in self.shares)}"

    @property
    def n_ranks(self) -> int:
        return len(self.shares) if self.split == "tensor" else 1


class Running:
    """A task's processes."""

    def __init__(self, task: Task, is_cpu: bool, rehearses: bool, limit_s: float):
        self.task, self.limit_s = task, limit_s
        self.folder = tempfile.TemporaryDirectory()
        at = Path(self.folder.name)
        described = at / "task.json"
        described.write_text(json.dumps(dict(
            kind=task.kind, split=task.split, devices=task.devices, shares=task.shares, limit_s=limit_s,
            rehearses=rehearses, **task.more,
        )))  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONSAFEPATH": "1"}
        if is_cpu:
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.outs = [at / f"out{r}" for r in range(task.n_ranks)]
        self.logs = [(at / f"log{r}").open("w+b") for r in range(task.n_ranks)]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, FOLDER / "multi_gpu_work.py", described, str(r), self.outs[r]],
                env=environment, stdin=subprocess.DEVNULL, stdout=self.logs[r], stderr=subprocess.STDOUT,
            )
            for r in range(task.n_ranks)
        ]
        self.began = time.monotonic()

    def poll(self) -> Data | None:
        """The result once there is one: {"found": ..., "seconds": ...}, or {"failed": why, ...}."""
        states = [rank.poll() for rank in self.ranks]
        broken = next((r for r, state in enumerate(states) if state not in (None, 0)), None)
        if broken is not None:
            return self.failed(f"rank {broken} ended with {states[broken]}{last_line(self.logs[broken])}")
        if None in states:
            if time.monotonic() - self.began < self.limit_s:
                return None
            return self.failed(f"took longer than {self.limit_s:.0f} s")
        results = [json.loads(out.read_text()) for out in self.outs]
        if self.task.kind == "tokens" and any(r["found"] != results[0]["found"] for r in results):
            return self.failed("the ranks' tokens differ")
        done = results[0] | {"said": lines_of(self.logs[0])[-LOG_LINES:]}
        return done | ({"all": [r["found"] for r in results]} if len(results) > 1 else {})

    def failed(self, why: str) -> Data:
        """With what the first rank had found, and what each of them said last."""
        done: Data = {"failed": why, "logs": [lines_of(log)[-LOG_LINES:] for log in self.logs]}
        if self.outs[0].exists():
            done["partly"] = json.loads(self.outs[0].read_text())["found"]
        return done

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for log in self.logs:
            log.close()
        self.folder.cleanup()


@dataclass
class Session:
    options: argparse.Namespace
    devices: list[str]
    wanted: list[str]
    results: Data = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def is_cpu(self) -> bool:
        return bool(self.options.cpu > 0)

    @property
    def counts(self) -> list[int]:
        """Sizes of a tensor split: 1, 2, 4... up to all devices."""
        n = len(self.devices)
        return sorted({size for size in (1, 2, 4, 8) if size <= n} | {n})

    @property
    def target(self) -> str:
        return str(self.options.model or bundled.target_path())

    def run(self, *tasks: Task) -> None:
        """All of the tasks at once; on logical devices, which share the cores, one after the other."""
        if self.is_cpu and len(tasks) > 1:
            for task in tasks:
                self.run(task)
            return
        rehearses = not self.options.no_rehearsal
        running = [Running(task, self.is_cpu, rehearses, LIMITS[task.kind]) for task in tasks]
        try:
            while running:
                for one in list(running):
                    done = one.poll()
                    if done is not None:
                        one.end()
                        running.remove(one)
                        self._keep(one.task, done)
                time.sleep(0.05)
        finally:
            for one in running:
                self._keep(one.task, one.failed("was interrupted"))
                one.end()

    def _keep(self, task: Task, done: Data) -> None:
        task.into[task.key] = done
        if "failed" in done:
            self.errors.append(f"{task.label}: {done['failed']}")
            for rank, lines in enumerate(done.get("logs", [])):
                print(*(f"    rank {rank}: {line}" for line in lines), sep="\n")
        what = done["failed"] if "failed" in done else f"{done['seconds']:.1f} s"
        print(f"[{self.seconds:.0f} s] {task.label}: {what}", flush=True)
        self.save()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def save(self) -> None:
        """What is there is there."""
        out = Path(self.options.json)
        found = {"devices": self.devices, **self.results, "errors": self.errors, "seconds": self.seconds}
        out.write_text(json.dumps(found, indent=1))
        out.with_suffix(".md").write_text("\n".join(tables(self.results)) + "\n")


def lines_of(log: Any) -> list[str]:
    log.flush()
    log.seek(0)
    return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]


def last_line(log: Any) -> str:
    """What a process said last, for the report."""
    lines = lines_of(log)
    return f": {lines[-1][:300]}" if lines else ""


# -- parts ---------------------------------------------------------------------------------------------------------


def sums(session: Session, out: Data) -> None:
    """Sums between the ranks, through peer memory and through the library."""
    for n in session.counts[1:]:
        more = dict(rows=ROWS, columns=COLUMNS, choices=CHOICES[: 3 if session.is_cpu else None],
                    vocabulary=VOCABULARY, candidates=CANDIDATES)
        session.run(Task("sums", "tensor", session.devices[:n], [1] * n, out, n, more))
        for rank, found in enumerate(out[n].get("all", [])):
            wrong = [T for T, equal in found["equal"].items() if not all(equal)]
            if wrong:
                session.errors.append(f"sums of {n}: other bits on rank {rank} for {', '.join(wrong)} rows")
            wrong = [T for T, equal in found["chosen"].items() if not all(equal)]
            if wrong:
                session.errors.append(f"sums of {n}: other candidates on rank {rank} for {', '.join(wrong)} rows")
            if not session.is_cpu and not found["link"]:
                session.errors.append(f"sums of {n}: rank {rank} has no peer memory")


def tokens(session: Session, out: Data) -> None:
    """Plain and each drafter, on every place it can have, in every split: the tokens of one device."""
    n = len(session.devices)
    common = dict(path=str(bundled.target_path()), n_tokens=12 if session.is_cpu else 32)
    skewed: list[list[float]] = [[4, 6, 6], [6, 6, 4]] if n >= 3 else [[4, 6], [6, 4]]
    layer: list[list[float]] = [[1.0] * n, *skewed]
    tensor = [[1.0] * size for size in session.counts[1:]] + (skewed if n >= 3 else [])
    out["raw"], out["runs"] = {}, {}
    done, runs = out["raw"], out["runs"]

    def task(split: str, shares: list[float], places: list[int | None]) -> Task:
        key = f"{split} {','.join(f'{s:g}' for s in shares)}"
        return Task("tokens", split, session.devices[: len(shares)], shares, done, key, dict(places=places, **common))

    layered, tensored = [], []
    for shares in layer:
        everywhere = [None, *sorted({0, len(shares) // 2, len(shares) - 1})]
        # every place is tried with even shares
        layered.append(task("layer", shares, everywhere if len(set(shares)) == 1 else [None, 0]))
    for shares in tensor:
        places = [None, len(shares) - 1] if session.is_cpu else [None, *sorted({0, len(shares) // 2, len(shares) - 1})]
        tensored.append(task("tensor", shares, places))
    session.run(task("none", [1], [None]), *layered)
    reference = out["reference"] = done.pop("none 1")
    for one in layered:
        runs[one.key] = compared(session, reference, done.pop(one.key))
    for one in tensored:  # alone: ranks that wait for one another need their devices at the same time
        session.run(one)
        runs[one.key] = compared(session, reference, done.pop(one.key))


def compared(session: Session, reference: Data, done: Data) -> Data:
    """How many of a run's streams have the tokens of one device; of one that failed, of those it had."""

    def stream(key: str) -> str:
        name, _, temperature = key.split(" | ")
        return f"{name} | {temperature}"

    expected = {stream(key): tokens for key, tokens in found_of(reference).items()}
    found = {key: tokens for key, tokens in found_of(done).items() if stream(key) in expected}
    differ = {}  # where
    for key, tokens in found.items():
        wanted = expected[stream(key)]
        if tokens != wanted:
            differ[key] = next((i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b), len(wanted))
    session.errors.extend(f"other tokens: {key}, from token {i} on" for key, i in differ.items())
    kept: Data = {key: done[key] for key in ("failed", "logs", "said", "seconds") if key in done}
    return {"streams": len(found), "differ": differ, **kept}


def drafters(session: Session) -> list[Data]:
    """The drafters whose files there are, at the acceptance lengths published for them."""
    options = session.options
    found = [{"name": "draft-mtp", "label": "MTP", "n_max": 3, "length": 2.6}]
    for label, name, path, length in (("DSpark", "draft-dspark", options.dspark, 3.762),
                                      ("DFlash2", "draft-dflash", options.dflash2, 3.955)):  # fmt: skip
        if path is None and options.model is None:
            path = bundled.path(label.lower())
        if path is not None:
            found.append({"name": name, "label": label, "path": str(path), "n_max": 7, "length": length})
    return [one for one in found if options.drafters is None or one["label"] in options.drafters.split(",")]


def speed(session: Session, out: Data) -> None:
    """Tensor split over 1, 2, 4... devices: a step plain and drafted."""
    more = dict(path=session.target, drafters=drafters(session), n_tokens=16 if session.is_cpu else 160)
    for n in session.counts:
        split = "tensor" if n > 1 else "none"
        tasks = [Task("speed", split, session.devices[:n], [1] * n, out, n, more)]
        if n == 1 and "prefill" in session.wanted and len(session.devices) > 1:
            # the other part's single device is another one
            fills = session.results.setdefault("prefill", {})
            tasks.append(prefill_task(session, fills, session.devices[-1:]))
        session.run(*tasks)


def prefill_task(session: Session, out: Data, devices: list[str]) -> Task:
    drafter = min(drafters(session), key=lambda d: d["label"] != "DSpark")
    sizes = dict(n_prompt=96, n_ubatch=32, repetitions=1) if session.is_cpu else dict(
        n_prompt=session.options.prompt, n_ubatch=session.options.ubatch, repetitions=3
    )
    n = len(devices)
    more = dict(path=session.target, drafter=drafter, n_tokens=16, **sizes)
    return Task("prefill", "layer" if n > 1 else "none", devices, [1] * n, out, n, more)


def prefill(session: Session, out: Data) -> None:
    """A prompt on one device and over all as a layer split, with a drafter attached."""
    for size in sorted({1, len(session.devices)}):
        if size not in out:
            session.run(prefill_task(session, out, session.devices[:size]))


def plan(session: Session, out: Data) -> None:
    """The planner beside the driver for skewed layer splits, with the longest contexts of smaller cards."""
    n, limit_s = len(session.devices), LIMITS["plan"]
    gib = "16" if n >= 3 else "24"
    for shares in (["4,6,6", "6,6,4"] if n >= 3 else ["4,6", "6,4"]):
        used = session.devices[: shares.count(",") + 1]
        arguments = ["-m", session.target, "-sm", "layer", "-ts", shares, "--device", ",".join(used), "-np", "2",
                     "--spec-type", "draft-mtp", "--largest-for", gib]  # fmt: skip
        try:
            done = subprocess.run([sys.executable, FOLDER / "plan_memory.py", *arguments], capture_output=True,
                                  text=True, timeout=limit_s, env=os.environ | {"PYTHONSAFEPATH": "1"})  # fmt: skip
            lines = done.stdout.splitlines()
            out[shares] = {"lines": lines}
            if done.returncode != 0:
                said = done.stderr.strip().splitlines() or ["nothing was said"]
                out[shares] |= {"failed": said[-1][:300], "log": said[-LOG_LINES:]}
                session.errors.append(f"plan {shares}: {said[-1][:300]}")
            elif float(lines[-1].split()[-2]) > 3.0:
                session.errors.append(f"plan {shares}: {lines[-1]}")
        except subprocess.TimeoutExpired:
            out[shares] = {"failed": f"took longer than {limit_s:.0f} s"}
            session.errors.append(f"plan {shares}: took longer than {limit_s:.0f} s")
        said = out[shares].get("failed") or out[shares]["lines"][-1:]
        print(f"[{session.seconds:.0f} s] plan, layer {shares}: {said}", flush=True)
        session.save()


PARTS: dict[str, Callable[[Session, Data], None]] = {
    "sums": sums, "tokens": tokens, "speed": speed, "prefill": prefill, "plan": plan,
}  # fmt: skip
GPU_ONLY = ("plan",)


# -- tables --------------------------------------------------------------------------------------------------------


def tables(results: Data) -> Iterator[str]:
    """Markdown, a table a part."""
    for n, done in results.get("sums", {}).items():
        found = found_of(done)
        if found:
            if not found["us"]:  # logical devices
                same, chosen = (all(map(all, found[key].values())) for key in ("equal", "chosen"))
                yield f"\nSums of {n} ranks: same bits {same}. Choices from parts of the logits: same tokens {chosen}."
                continue
            yield f"\nSums of {n} ranks, {COLUMNS} columns, with addition and norm, microseconds each:\n"
            yield "| rows | no sum | gathered | peer memory | same bits |\n|---|---|---|---|---|"
            for T, equal in found["equal"].items():
                us = found["us"].get(T, {})
                same = all(equal) if found["link"] else "no peer memory"
                times = (number(us.get(key), 1) for key in ("alone", "gathered", "peer"))
                yield f"| {T} | {' | '.join(times)} | {same} |"
            yield f"\nThe best 1 and the best {CANDIDATES} of {VOCABULARY} logits over {n} ranks, microseconds:\n"
            yield "| rows | joined | gathered | peer memory | joined | gathered | peer memory | same tokens |"
            yield "|---|---|---|---|---|---|---|---|"
            for T, equal in found["chosen"].items():
                us = found["chosen_us"].get(T, {})
                keys = [f"{way} {k}" for k in (1, CANDIDATES) for way in ("joined", "gathered", "peer")]
                yield f"| {T} | {' | '.join(number(us.get(key), 1) for key in keys)} | {all(equal)} |"
    runs = results.get("tokens", {}).get("runs", {})
    if runs:
        yield "\n| split | streams | with the tokens of one device |\n|---|---|---|"
        for name, done in runs.items():
            n = done["streams"]
            failed = f" ({done['failed']})" if "failed" in done else ""
            yield f"| {name} | {n} | {n - len(done['differ'])}{failed} |"
    speeds: dict[int, Data] = {n: found_of(done) for n, done in results.get("speed", {}).items()}
    if speeds:
        yield ("\n| drafter | devices | step ms | draft ms | verify ms | tokens a step | ms a token | speedup | "
               "one device's step | one device's verify |")  # fmt: skip
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for n, found in speeds.items():
            for label, entry in found.items():
                if isinstance(entry, dict):
                    parts = [number(entry[key], 2) for key in ("step_ms", "draft_ms", "verify_ms", "tokens_per_step",
                                                               "ms_per_token")]  # fmt: skip
                    one = speeds.get(1, {}).get(label, {})
                    ratios = [number(one[key] / entry[key], 2) if one and entry[key] else ""
                              for key in ("step_ms", "verify_ms")]  # fmt: skip
                    gain = number(entry.get("speedup"), 2)
                    yield f"| {label} | {n} | {' | '.join(parts)} | {gain} | {' | '.join(ratios)} |"
    fills: dict[int, Data] = {n: found_of(done) for n, done in results.get("prefill", {}).items()}
    if fills:
        yield "\n| layer split over | with | prefill tok/s | of one device | step ms |"
        yield "|---|---|---|---|---|"
        for n, found in fills.items():
            for name in ("plain", "drafted"):
                if name in found:
                    rate, one = found[name]["tokens_per_s"], fills.get(1, {}).get(name, {}).get("tokens_per_s")
                    ratio = number(None if one is None else rate / one, 2)
                    yield f"| {n} | {name} | {rate:.0f} | {ratio} | {number(found[name].get('step_ms'), 2)} |"
    for shares, done in results.get("plan", {}).items():
        yield f"\nPlan, layer split {shares}:\n"
        yield from (f"    {line}" for line in done.get("lines", [done.get("failed", "")]))


def found_of(done: Data) -> Data:
    """What a task found, or had found when it failed."""
    return dict(done.get("found") or done.get("partly") or {})


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="GPUs to use (all)")
    parser.add_argument("--cpu", type=int, default=0, help="logical CPU devices instead")
    parser.add_argument("-m", "--model", help="target of speed, prefill and plan (the bundled one)")
    parser.add_argument("--dspark")
    parser.add_argument("--dflash2")
    parser.add_argument("--drafters", help="of MTP,DSpark,DFlash2 those to measure (all whose files there are)")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt in prefill")
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--no-rehearsal", action="store_true", help="compile kernels where they are first launched")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", default="multi_gpu.json")
    options = parser.parse_args()
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {','.join(PARTS)}")
    strange = set((options.drafters or "MTP").split(",")) - {"MTP", "DSpark", "DFlash2"}
    if strange:
        parser.error(f"--drafters {','.join(sorted(strange))}: expected some of MTP,DSpark,DFlash2")
    n = options.cpu or options.devices or torch.cuda.device_count()
    if n < 1 or (not options.cpu and n > torch.cuda.device_count()):
        parser.error(f"{n} GPUs were asked for, there are {torch.cuda.device_count()}; --cpu N runs without")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tasks' processes too, and keeps what they found
    session = Session(options, [f"{'CPU' if options.cpu else 'CUDA'}{i}" for i in range(n)], wanted)
    for name in wanted:
        if session.is_cpu and name in GPU_ONLY:
            session.results[name] = {}
            print(f"{name}: needs GPUs", flush=True)
            continue
        PARTS[name](session, session.results.setdefault(name, {}))
        session.save()
    print("\n".join(tables(session.results)))
    print(f"\n{session.seconds:.0f} s; " + ("all well" if not session.errors else "FAILED:"), flush=True)
    for error in session.errors:
        print(f"  {error}")
    sys.exit(1 if session.errors else 0)


if __name__ == "__main__":
    main()
