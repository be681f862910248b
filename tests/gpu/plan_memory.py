"""The planner beside the allocator: loads a model as the server would, fills its slots, and prints both per device.

    python tests/gpu/plan_memory.py -m target.gguf --spec-type draft-mtp -c 32768 -np 4 [any option of ggufspec plan]

Runs one process (split none or layer). What the driver counts (nvidia-smi's reading) has the CUDA context in it, for
which the planner sets memory aside on every card. The largest difference from the allocator is printed last; the aim is
within 3 %.
"""

from __future__ import annotations

import sys

import torch

from ggufspec.job import Request
from ggufspec.models import read_config
from ggufspec.planner import CONTEXT_BYTES, PARTS, Planner, check
from ggufspec.sampling import SamplingParams
from ggufspec.tools import plan as command
from ggufspec.tools import runtime
from ggufspec.tools.fit import GIB, question_of
from ggufspec.tools.options import parse
from ggufspec.tools.settings import Settings


def planned(settings: Settings, n_slots: int, n_ctx: int) -> dict[torch.device, dict[str, int]]:
    assert settings.model.path is not None
    file = runtime.open_model_file(settings.model.path, settings.model.overrides)
    spec = settings.speculative
    draft_file = None if spec.model is None else runtime.open_model_file(spec.model, ())
    devices, memory = command.planned_devices(settings)
    question = question_of(
        settings, file, read_config(file), draft_file, n_slots, devices, memory, runtime.draft_device(spec)
    )
    check(question)
    return {device: dict(parts) for device, parts in Planner(question).plan(n_ctx).parts.items()}


def main() -> None:
    settings = parse("plan", sys.argv[1:])
    assert settings.model.path is not None
    config = read_config(runtime.open_model_file(settings.model.path, ()))
    n_slots, n_ctx = runtime.size_context(settings.context, config)
    plan = planned(settings, n_slots, n_ctx)
    if any(device.type != "cuda" for device in plan):
        raise SystemExit(f"error: memory is measured on CUDA devices, not on {', '.join(map(str, plan))}")
    free = {device: torch.cuda.mem_get_info(device)[0] for device in plan}
    opened = runtime.open_runtime(settings)
    engine = opened.engine
    loaded = {device: torch.cuda.memory_allocated(device) for device in plan}
    peaks = {device: torch.cuda.max_memory_allocated(device) for device in plan}
    for device in plan:
        torch.cuda.reset_peak_memory_stats(device)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(seed=1, ignore_eos=True)
    for at in range(2 * n_slots):  # prompts of several chunks, all slots at once, then again on what was kept
        prompt = [100 + (7 * i + at) % 200 for i in range(min(2000, n_ctx // 2))]
        engine.submit(Request(prompt, greedy if at % 2 else sampled, n_predict=48 + 4 * at))
    while not engine.idle:
        engine.step()
    worst = 0.0
    for device, parts in plan.items():
        total = sum(parts.values())
        fixed = total - parts.get("workspace", 0) - parts.get("graphs", 0) - parts.get("checkpoints", 0)
        running = torch.cuda.max_memory_allocated(device)
        free_now, on_card = torch.cuda.mem_get_info(device)
        used, in_use = free[device] - free_now, on_card - free_now
        print(f"{device}: " + ", ".join(f"{name} {parts[name] / GIB:.3f}" for name in PARTS if parts.get(name)))
        print(
            f"  planned {total / GIB:.3f} GiB, of it weights and caches {fixed / GIB:.3f}; allocated after loading "
            f"{loaded[device] / GIB:.3f}, peak while loading {peaks[device] / GIB:.3f}, while running "
            f"{running / GIB:.3f}, reserved {torch.cuda.memory_reserved(device) / GIB:.3f}, driver {used / GIB:.3f}"
        )
        with_context = total + CONTEXT_BYTES
        print(
            f"  with the context {with_context / GIB:.3f} GiB; nvidia-smi's reading {in_use / GIB:.3f}: "
            f"{100 * abs(with_context / in_use - 1):.1f} %"
        )
        graphs = engine.decoder.graphs
        if graphs is not None:
            print(f"  {len(graphs.captured)} graphs, {graphs.n_bytes / GIB:.3f} GiB in their pool")
        worst = max(worst, abs(total / max(running, peaks[device]) - 1))
    print(f"largest difference of plan and allocator: {100 * worst:.1f} %")


if __name__ == "__main__":
    main()
