"""Where a step spends its time: draft and verification by operation.

On a GPU the times are those of the kernels themselves (torch.profiler), without the gaps between them; a kernel belongs
to the room of `ggufspec.kernels` that defines it. On the CPU they are exclusive times of the Python profiler, by the
file that called into PyTorch, which also slows what it measures. The head is a matmul like any other, so its share is
measured on its own.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ggufspec.drafters.dflash import BlockDrafter
from ggufspec.drafters.mtp import Mtp
from ggufspec.models.base import Head
from ggufspec.sampling import SamplingParams

from .attach import Bench
from .steady import SteadyEngine, run_streams

PHASES = {"_draft": "draft", "_verify": "verify", "_settle": "sample", "_observe": "draft"}  # of the decoder
N_STEPS = 8
ROOMS = "ggufspec.kernels."


def split_step(bench: Bench, engine: SteadyEngine, prompt: Sequence[int]) -> dict[str, Any]:
    """{"measured_by", "draft": {part: ms a step}, "verify": ..., "sample": ...} of one stream."""
    n = engine.n_max
    recorder: Recorder = CudaRecorder() if engine.device.type == "cuda" else CpuRecorder()
    decoder = engine.decoder
    stages: list[tuple[Any, str, str]] = [(decoder, method, phase) for method, phase in PHASES.items()]
    stages.append((decoder.chooser, "simple", "sample"))
    graphs, decoder.graphs = decoder.graphs, None  # stage by stage: the same kernels, launched one by one
    for owner, method, phase in stages:
        setattr(owner, method, recorder.wrapped(getattr(owner, method), phase))
    sampling = [SamplingParams(temperature=0.0, seed=1)]
    try:
        recorder.start()
        run = run_streams(engine, [prompt], N_STEPS * (n + 1) // 2, sampling)
        parts = recorder.stop()
    finally:
        decoder.graphs = graphs
        for owner, method, _ in stages:
            delattr(owner, method)
    n_steps = max(run.stats.n_decode, 1)
    out = {phase: {part: ms / n_steps for part, ms in found.items()} for phase, found in parts.items()}
    out = {phase: out.get(phase, {}) for phase in ("draft", "verify", "sample")}
    take_head(out["verify"], head_ms(bench.model.head, n + 1, bench))
    head, n_calls, n_rows = draft_head(engine, n)
    if head is not None:
        take_head(out["draft"], n_calls * head_ms(head, n_rows, bench))
    return {"measured_by": recorder.name, "n_steps": run.stats.n_decode, **out}


def draft_head(engine: SteadyEngine, n: int) -> tuple[Head | None, int, int]:
    """(the drafter's head, its own or the target's; calls in one draft; rows of a call)"""
    drafter = engine.drafter
    if isinstance(drafter, Mtp):
        return drafter.block.head, n, 1
    if isinstance(drafter, BlockDrafter):
        return drafter.backbone.head, 1, n
    return None, 0, 0


def take_head(parts: dict[str, float], ms: float) -> None:
    """Show the head beside the other matmuls instead of among them."""
    if "matmul" in parts:
        ms = min(ms, parts["matmul"])
        parts["matmul"] -= ms
        parts["head"] = ms


def head_ms(head: Head, n_rows: int, bench: Bench, n_runs: int = 7) -> float:
    """Median time of the head alone on n_rows rows."""
    device = head.device
    hidden = torch.randn(1, n_rows, bench.config.embedding_length, device=device)
    times = []
    with torch.inference_mode():
        for _ in range(n_runs + 2):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize(device)
                start.record()
                head(hidden)
                end.record()
                torch.cuda.synchronize(device)
                times.append(start.elapsed_time(end))
            else:
                begun = time.perf_counter()
                head(hidden)
                times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


class Recorder:
    """Times by (phase, part), in milliseconds over all calls between `start` and `stop`."""

    name = ""

    def start(self) -> None: ...

    def wrapped(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        raise NotImplementedError

    def stop(self) -> dict[str, dict[str, float]]:
        raise NotImplementedError


class CpuRecorder(Recorder):
    name = "cProfile on the CPU"

    def __init__(self) -> None:
        self.profiles: dict[str, cProfile.Profile] = defaultdict(cProfile.Profile)

    def wrapped(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        profile = self.profiles[phase]

        def profiled(*args: Any) -> Any:
            return profile.runcall(call, *args)

        return profiled

    def stop(self) -> dict[str, dict[str, float]]:
        return {phase: by_room(pstats.Stats(profile)) for phase, profile in self.profiles.items()}


def by_room(stats: pstats.Stats) -> dict[str, float]:
    """Exclusive milliseconds by kernel room; work of PyTorch counts where it was called from."""
    parts: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if file != "~" or not callers:
            parts[room_of_file(file)] += 1000 * own
            continue
        for (caller, _, _), (_, _, spent, _) in callers.items():
            parts[room_of_file(caller)] += 1000 * spent
    return dict(parts)


def room_of_file(path: str) -> str:
    folder, sign, rest = path.replace("\\", "/").rpartition("/kernels/")
    return rest.split("/")[0] if sign else "other"


class CudaRecorder(Recorder):
    name = "torch.profiler: kernel times"

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def start(self) -> None:
        self.profile.start()

    def wrapped(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def profiled(*args: Any) -> Any:
            torch.cuda.synchronize()
            with torch.profiler.record_function(f"phase:{phase}"):
                out = call(*args)
                torch.cuda.synchronize()
            return out

        return profiled

    def stop(self) -> dict[str, dict[str, float]]:
        self.profile.stop()
        if not any("CUDA" in str(e.device_type) for e in self.profile.events()):
            self.name = "torch.profiler saw no kernels: it may lack the rights to"
        rooms = kernel_rooms()
        events = list(self.profile.events())
        phases = sorted(
            (e.time_range.start, e.time_range.end, e.name.removeprefix("phase:"))
            for e in events if e.name.startswith("phase:") and "CUDA" not in str(e.device_type)
        )  # fmt: skip
        parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for event in events:
            if "CUDA" not in str(event.device_type) or event.name.startswith("phase:"):
                continue
            at = event.time_range.start
            phase = next((name for start, end, name in phases if start <= at < end), None)
            if phase is not None:
                part = next((room for name, room in rooms.items() if event.name.startswith(name)), "other")
                parts[phase][part] += event.time_range.elapsed_us() / 1000
        return parts


def kernel_rooms() -> dict[str, str]:
    """Name of every Triton kernel loaded so far: the room that defines it; longer names first."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(ROOMS):
            continue
        for value in vars(module).values():
            kernel: Any = getattr(value, "fn", None)
            if hasattr(value, "run") and hasattr(kernel, "__name__"):
                home = getattr(kernel, "__module__", name)
                if home.startswith(ROOMS):
                    found[kernel.__name__] = home.removeprefix(ROOMS).split(".")[0]
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
