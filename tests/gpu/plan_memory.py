"""The planner beside the allocator: loads a model as the server would, fills its slots, and prints both per device.

    python tests/gpu/plan_memory.py -m target.gguf --spec-type draft-mtp -c 32768 -np 4 [any option of ggufspec plan]
    python tests/gpu/plan_memory.py .. --largest-for 24     # instead of -c: the longest context for cards of 24 GiB

Runs one process (split none or layer). What the driver counts (nvidia-smi's reading) has the CUDA context in it, for
which the planner sets memory aside on every card; what loading and running took from the driver has not. The larger
difference of the plan from these two is printed last; the aim is within 3 %. With --largest-for it also says how many
more tokens, or fewer, the cards' fullest device would have had room for, by what it holds in the end.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from ggufspec.job import Request
from ggufspec.models import read_config
from ggufspec.planner import CONTEXT_BYTES, PARTS, Planner
from ggufspec.question import check
from ggufspec.sampling import SamplingParams
from ggufspec.tools import plan as command
from ggufspec.tools import runtime
from ggufspec.tools.fit import GIB, question_of
from ggufspec.tools.options import parse
from ggufspec.tools.settings import Settings

LENGTHS = (2000, 300, 1200, 90)  # of prompts


def planner_of(settings: Settings, n_slots: int) -> Planner:
    assert settings.model.path is not None
    file = runtime.open_model_file(settings.model.path, settings.model.overrides)
    spec = settings.speculative
    draft_file = None if spec.model is None else runtime.open_model_file(spec.model, ())
    devices, memory = command.planned_devices(settings)
    question = question_of(
        settings, file, read_config(file), draft_file, n_slots, devices, memory, runtime.draft_device(spec)
    )
    check(question)
    return Planner(question)


def segments_of(device: torch.device) -> list[str]:
    """What the allocator has from the driver: for graphs and for all else, by the stream that it was asked on."""
    kinds: dict[tuple[bool, int], list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == device.index:
            is_pool, stream = tuple(segment["segment_pool_id"]) != (0, 0), segment["stream"]
            held = kinds.setdefault((is_pool, stream), [0, 0, 0])
            held[0] += segment["total_size"]
            held[1] += segment["allocated_size"]
            held[2] += 1
    return [
        f"{'graphs' if is_pool else 'others'}, {'a side stream' if stream else 'the main stream'}: "
        f"{total / GIB:.3f} in {count}, {allocated / GIB:.3f} in use"
        for (is_pool, stream), (total, allocated, count) in sorted(kinds.items())
    ]


def main() -> None:
    arguments, gib = sys.argv[1:], 0.0
    if "--largest-for" in arguments:
        at = arguments.index("--largest-for")
        gib = float(arguments[at + 1])
        del arguments[at : at + 2]
    settings = parse("plan", arguments)
    assert settings.model.path is not None
    config = read_config(runtime.open_model_file(settings.model.path, ()))
    n_slots, n_ctx = runtime.size_context(settings.context, config)
    planner = planner_of(settings, n_slots)
    if gib:
        limit = int(gib * GIB) - CONTEXT_BYTES
        question = replace(planner.question, memory=(limit,) * len(planner.question.devices))
        n_ctx = Planner(question).largest()
        if not n_ctx:
            raise SystemExit(f"error: no context fits cards of {gib:g} GiB")
        settings = replace(settings, context=replace(settings.context, n_ctx=n_ctx * n_slots, kv_unified=False))
        n_slots, n_ctx = runtime.size_context(settings.context, config)
    plan = {device: dict(parts) for device, parts in planner.plan(n_ctx).parts.items()}
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
    for at in range(2 * n_slots):  # prompts of chunks of several widths, all slots at once, then again on what was kept
        prompt = [100 + (7 * i + at) % 200 for i in range(min(LENGTHS[at % len(LENGTHS)], n_ctx // 2))]
        engine.submit(Request(prompt, greedy if at % 2 else sampled, n_predict=48 + 4 * at))
    while not engine.idle:
        engine.step()
    worst = 0.0
    for device, parts in plan.items():
        total = sum(parts.values())
        fixed = total - parts.get("workspace", 0) - parts.get("graphs", 0) - parts.get("checkpoints", 0)
        running, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
        free_now, on_card = torch.cuda.mem_get_info(device)
        used, in_use = free[device] - free_now, on_card - free_now
        print(f"{device}: " + ", ".join(f"{name} {parts[name] / GIB:.3f}" for name in PARTS if parts.get(name)))
        print(
            f"  planned {total / GIB:.3f} GiB, of it weights and caches {fixed / GIB:.3f}; allocated after loading "
            f"{loaded[device] / GIB:.3f}, peak while loading {peaks[device] / GIB:.3f}, while running "
            f"{running / GIB:.3f}, reserved {reserved / GIB:.3f}, driver {used / GIB:.3f}"
        )
        with_context = total + CONTEXT_BYTES
        print(
            f"  with the context {with_context / GIB:.3f} GiB; nvidia-smi's reading {in_use / GIB:.3f}: "
            f"{100 * abs(with_context / in_use - 1):.1f} %"
        )
        print("  segments, GiB: " + "; ".join(segments_of(device)))
        worst = max(worst, abs(with_context / in_use - 1), abs(total / used - 1))
    if gib:
        rooms, whole, half = [], planner.plan(n_ctx), planner.plan(n_ctx // 2)
        for device in plan:
            free_now, on_card = torch.cuda.mem_get_info(device)
            per_token = (whole.total(device) - half.total(device)) / (n_ctx - n_ctx // 2)
            if per_token > 0:
                rooms.append((gib * GIB - (on_card - free_now)) / per_token)
        print(
            f"longest context for cards of {gib:g} GiB: planned {n_ctx} tokens a slot; by what the fullest holds "
            f"{n_ctx + min(rooms):.0f} ({100 * min(rooms) / n_ctx:+.1f} %)"
        )
    print(f"largest difference of plan and memory in use: {100 * worst:.1f} %")


if __name__ == "__main__":
    main()
