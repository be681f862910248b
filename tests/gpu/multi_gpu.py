"""Everything about several devices in one run: the same tokens everywhere, speeds, prefill, and the planner.

    python tests/gpu/multi_gpu.py --json out.json                        # every GPU of the machine
    python tests/gpu/multi_gpu.py --cpu 4 --json out.json                # logical CPU devices, the bundled models
    python tests/gpu/multi_gpu.py -m target.gguf --dspark d.gguf --dflash2 e.gguf --only speed,prefill --json out.json

Parts: sums (between ranks, GPUs only), tokens (the bundled family: every split, drafter and place), speed (tensor split
over 1, 2, 4... devices), prefill (layer split against one device), plan (planner against allocator, GPUs only). Each
task is a set of processes with a limit of its own; one that takes longer is ended and said to have failed. Beside the
JSON a Markdown table is written. The exit status is 1 when anything failed or any token differed.
"""

from __future__ import annotations

import argparse
import json
import os
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

Data = dict[str, Any]
FOLDER = Path(__file__).parent
ROWS, COLUMNS = (1, 3, 8, 16, 32, 64), 5120


@dataclass
class Session:
    options: argparse.Namespace
    devices: list[str]
    errors: list[str] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        return self.options.cpu > 0

    @property
    def counts(self) -> list[int]:
        """Sizes of a tensor split: 1, 2, 4... up to all devices."""
        n = len(self.devices)
        return sorted({size for size in (1, 2, 4, 8) if size <= n} | {n})

    @property
    def target(self) -> str:
        return str(self.options.model or bundled.target_path())

    def run(self, kind: str, split: str, devices: list[str], shares: list[float], limit_s: float, **task: Any) -> Data:
        """One task in as many processes as it needs: {"found": ..., "seconds": ...} or {"failed": why}."""
        n = len(shares) if split == "tensor" else 1
        label = f"{kind}, {split} {','.join(f'{s:g}' for s in shares)}"
        with tempfile.TemporaryDirectory() as folder:
            described = Path(folder) / "task.json"
            described.write_text(json.dumps(dict(kind=kind, split=split, devices=devices, shares=shares, **task)))
            done = self._processes(described, n, Path(folder), limit_s)
        if kind == "tokens" and any(found != done["found"] for found in done.get("all", [])):
            done = {"failed": "the ranks' tokens differ"}
        if "failed" in done:
            self.errors.append(f"{label}: {done['failed']}")
        print(f"{label}: {done['failed'] if 'failed' in done else str(round(done['seconds'], 1)) + ' s'}", flush=True)
        return done

    def _processes(self, task: Path, n: int, folder: Path, limit_s: float) -> Data:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONSAFEPATH": "1"}
        if self.is_cpu:
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        logs = [(folder / f"log{r}").open("w+b") for r in range(n)]
        ranks = [
            subprocess.Popen(
                [sys.executable, FOLDER / "multi_gpu_work.py", task, str(r), folder / f"out{r}"],
                env=environment, stdin=subprocess.DEVNULL, stdout=logs[r], stderr=subprocess.STDOUT,
            )
            for r in range(n)
        ]
        end = time.monotonic() + limit_s
        try:
            while any(rank.poll() is None for rank in ranks):
                if time.monotonic() > end:
                    return {"failed": f"took longer than {limit_s:.0f} s" + last_line(logs[0])}
                broken = next((r for r, rank in enumerate(ranks) if rank.poll() not in (None, 0)), None)
                if broken is not None:
                    return {"failed": f"rank {broken} ended with {ranks[broken].returncode}" + last_line(logs[broken])}
                time.sleep(0.05)
            broken = next((r for r, rank in enumerate(ranks) if rank.returncode != 0), None)
            if broken is not None:
                return {"failed": f"rank {broken} ended with {ranks[broken].returncode}" + last_line(logs[broken])}
            results: list[Data] = [json.loads((folder / f"out{r}").read_text()) for r in range(n)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return results[0] | ({"all": [r["found"] for r in results]} if n > 1 else {})


def last_line(log: Any) -> str:
    """What a process said last, for the report."""
    log.flush()
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


# -- parts ---------------------------------------------------------------------------------------------------------


def sums(session: Session) -> Data:
    """Sums between the ranks, through peer memory and through the library."""
    out: Data = {}
    for n in session.counts[1:]:
        done = session.run("sums", "tensor", session.devices[:n], [1] * n, 60, rows=ROWS, columns=COLUMNS)
        out[n] = done
        for rank, found in enumerate(done.get("all", [])):
            wrong = [T for T, equal in found["equal"].items() if not all(equal)]
            if wrong:
                session.errors.append(f"sums of {n}: other bits on rank {rank} for {', '.join(wrong)} rows")
    return out


def tokens(session: Session) -> Data:
    """Plain and each drafter, on every place it can have, in every split: the tokens of one device."""
    n = len(session.devices)
    path, wanted = str(bundled.target_path()), 12 if session.is_cpu else 32
    common = dict(path=path, n_tokens=wanted)
    reference = session.run("tokens", "none", session.devices[:1], [1], 120, places=[None], **common)
    layer: list[list[float]] = [[1] * n, *([[4, 6, 6], [6, 6, 4]] if n >= 3 else [[4, 6], [6, 4]])]
    tensor: list[list[float]] = [[1] * size for size in session.counts[1:]] + ([[4, 6, 6]] if n >= 3 else [])
    runs: Data = {}
    for split, all_shares in (("layer", layer), ("tensor", tensor)):
        for shares in all_shares:
            used = session.devices[: len(shares)]
            places = [None, *sorted({0, len(shares) // 2, len(shares) - 1})]
            if session.is_cpu and split == "tensor":
                places = [None, len(shares) - 1]
            elif split == "layer" and len(set(shares)) > 1:
                places = [None, 0]  # every place is tried with even shares
            done = session.run("tokens", split, used, shares, 240 if session.is_cpu else 60, places=places, **common)
            runs[f"{split} {','.join(map(str, shares))}"] = compared(session, reference, done)
    return {"reference": reference, "runs": runs}


def compared(session: Session, reference: Data, done: Data) -> Data:
    """How many of a run's streams have the tokens of one device."""
    if "failed" in done or "failed" in reference:
        return done
    expected = {key.split(" | ")[0] + key.split(" | ")[2]: value for key, value in reference["found"].items()}
    differ = [key for key, value in done["found"].items()
              if value != expected[key.split(" | ")[0] + key.split(" | ")[2]]]  # fmt: skip
    session.errors.extend(f"other tokens: {key}" for key in differ)
    return {"streams": len(done["found"]), "differ": differ, "seconds": done["seconds"]}


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
    return found


def speed(session: Session) -> Data:
    """Tensor split over 1, 2, 4... devices: a step plain and drafted."""
    n_tokens = 16 if session.is_cpu else 96
    return {
        n: session.run(
            "speed", "tensor" if n > 1 else "none", session.devices[:n], [1] * n, 180 if session.is_cpu else 50,
            path=session.target, drafters=drafters(session), n_tokens=n_tokens,
        )
        for n in session.counts
    }


def prefill(session: Session) -> Data:
    """A prompt on one device and over all as a layer split, with a drafter attached."""
    drafter = next((d for d in drafters(session) if d["label"] == "DSpark"), drafters(session)[0])
    sizes = dict(n_prompt=96, n_ubatch=32, repetitions=1) if session.is_cpu else dict(
        n_prompt=session.options.prompt, n_ubatch=session.options.ubatch, repetitions=2
    )
    n = len(session.devices)
    return {
        size: session.run(
            "prefill", "layer" if size > 1 else "none", session.devices[:size], [1] * size,
            180 if session.is_cpu else 60, path=session.target, drafter=drafter, n_tokens=16, **sizes,
        )
        for size in sorted({1, n})
    }


def plan(session: Session) -> Data:
    """The planner beside the allocator for skewed layer splits."""
    n = len(session.devices)
    out: Data = {}
    for shares in (["4,6,6", "6,6,4"] if n >= 3 else ["4,6", "6,4"]):
        used = session.devices[: shares.count(",") + 1]
        arguments = ["-m", session.target, "-sm", "layer", "-ts", shares, "--device", ",".join(used), "-c", "32768",
                     "-np", "2", "--spec-type", "draft-mtp"]  # fmt: skip
        try:
            done = subprocess.run([sys.executable, FOLDER / "plan_memory.py", *arguments], capture_output=True,
                                  text=True, timeout=60, env=os.environ | {"PYTHONSAFEPATH": "1"})  # fmt: skip
            lines = done.stdout.splitlines()
            out[shares] = {"lines": lines}
            if done.returncode != 0:
                session.errors.append(f"plan {shares}: {done.stderr.strip().splitlines()[-1][:300]}")
            elif float(lines[-1].split()[-2]) > 3.0:
                session.errors.append(f"plan {shares}: {lines[-1]}")
        except subprocess.TimeoutExpired:
            out[shares] = {"failed": "took longer than 60 s"}
            session.errors.append(f"plan {shares}: took longer than 60 s")
        print(f"plan, layer {shares}: {out[shares].get('failed') or out[shares]['lines'][-1:]}", flush=True)
    return out


PARTS: dict[str, Callable[[Session], Data]] = {
    "sums": sums, "tokens": tokens, "speed": speed, "prefill": prefill, "plan": plan,
}  # fmt: skip
GPU_ONLY = ("plan",)


# -- tables --------------------------------------------------------------------------------------------------------


def tables(results: Data) -> Iterator[str]:
    """Markdown, a table a part."""
    for n, done in results.get("sums", {}).items():
        found = done.get("found")
        if found:
            yield f"\nSums of {n} ranks, {COLUMNS} columns, with addition and norm, microseconds each:\n"
            yield "| rows | gathered | peer memory | same bits |\n|---|---|---|---|"
            for T, equal in found["equal"].items():
                us = found["us"].get(T, {})
                same = all(equal) if found["link"] else "no peer memory"
                yield f"| {T} | {number(us.get('gathered'), 1)} | {number(us.get('peer'), 1)} | {same} |"
    runs = results.get("tokens", {}).get("runs", {})
    if runs:
        yield "\n| split | streams | with the tokens of one device |\n|---|---|---|"
        for name, done in runs.items():
            n = done.get("streams", 0)
            yield f"| {name} | {n} | {n - len(done.get('differ', [])) if n else done.get('failed')} |"
    speeds = {n: done["found"] for n, done in results.get("speed", {}).items() if "found" in done}
    if speeds:
        yield "\n| drafter | devices | step ms | draft ms | verify ms | tokens a step | ms a token | speedup |"
        yield "|---|---|---|---|---|---|---|---|"
        for n, found in speeds.items():
            for label, entry in found.items():
                if isinstance(entry, dict):
                    parts = [number(entry[key], 2) for key in ("step_ms", "draft_ms", "verify_ms", "tokens_per_step",
                                                               "ms_per_token")]  # fmt: skip
                    yield f"| {label} | {n} | {' | '.join(parts)} | {number(entry.get('speedup'), 2)} |"
    fills = {n: done["found"] for n, done in results.get("prefill", {}).items() if "found" in done}
    if fills:
        yield "\n| layer split over | prefill tok/s, plain | with a drafter | step ms, plain | drafted |"
        yield "|---|---|---|---|---|"
        for n, found in fills.items():
            a, b = found["plain"], found["drafted"]
            yield (f"| {n} | {a['tokens_per_s']:.0f} | {b['tokens_per_s']:.0f} | {a['step_ms']:.2f} | "
                   f"{b['step_ms']:.2f} |")  # fmt: skip
    for shares, done in results.get("plan", {}).items():
        yield f"\nPlan, layer split {shares}:\n"
        yield from (f"    {line}" for line in done.get("lines", [done.get("failed", "")]))


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="GPUs to use (all)")
    parser.add_argument("--cpu", type=int, default=0, help="logical CPU devices instead")
    parser.add_argument("-m", "--model", help="target of speed, prefill and plan (the bundled one)")
    parser.add_argument("--dspark")
    parser.add_argument("--dflash2")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt in prefill")
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", default="multi_gpu.json")
    options = parser.parse_args()
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {','.join(PARTS)}")
    n = options.cpu or options.devices or torch.cuda.device_count()
    if n < 1 or (not options.cpu and n > torch.cuda.device_count()):
        parser.error(f"{n} GPUs were asked for, there are {torch.cuda.device_count()}; --cpu N runs without")
    session = Session(options, [f"{'CPU' if options.cpu else 'CUDA'}{i}" for i in range(n)])
    results: Data = {"devices": session.devices}
    out, start = Path(options.json), time.perf_counter()
    for name in wanted:
        if session.is_cpu and name in GPU_ONLY:
            results[name] = {}
            print(f"{name}: needs GPUs", flush=True)
            continue
        results[name] = PARTS[name](session)
        results |= {"errors": session.errors, "seconds": time.perf_counter() - start}
        out.write_text(json.dumps(results, indent=1))  # after every part: what is there is there
        out.with_suffix(".md").write_text("\n".join(tables(results)) + "\n")
    print("\n".join(tables(results)))
    print(f"\n{time.perf_counter() - start:.0f} s; " + ("all well" if not session.errors else "FAILED:"), flush=True)
    for error in session.errors:
        print(f"  {error}")
    sys.exit(1 if session.errors else 0)


if __name__ == "__main__":
    main()
