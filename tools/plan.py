"""`ggufspec plan`: what a server with these options would need on every device, from the files' headers alone."""

from __future__ import annotations

from dataclasses import replace

import click
import torch

from ggufspec.best_split import best_split
from ggufspec.errors import ConfigError
from ggufspec.models import read_config
from ggufspec.placement import device_name, devices_of, free_bytes
from ggufspec.planner import CONTEXT_BYTES, PARTS, Plan, Planner
from ggufspec.question import check
from ggufspec.tools import runtime
from ggufspec.tools.command import OptionCommand
from ggufspec.tools.fit import GIB, question_of, shown_shares
from ggufspec.tools.settings import Settings

SUMMARY = """What fits where, from the files' headers alone: weights, caches and working memory per device, and the
longest context. Takes the server's options for model, context, devices and drafters; --gpu-mem 32,32,32 plans for GPUs
that this machine need not have."""


def run(settings: Settings) -> int:
    """Status 1 when it does not fit."""
    if settings.model.path is None:
        raise ConfigError("--model is required")
    runtime.check_context(settings.context)
    file = runtime.open_model_file(settings.model.path, settings.model.overrides)
    config = runtime.with_rope_options(read_config(file), settings.context)
    spec = settings.speculative
    draft_file = None if spec.model is None else runtime.open_model_file(spec.model, ())
    n_slots, n_ctx = runtime.size_context(settings.context, config)
    devices, memory = planned_devices(settings)
    drafting = draft_device(settings)
    question = question_of(
        settings, file, config, draft_file, n_slots, devices, memory, drafting, memory_of(drafting, settings)
    )
    check(question)
    notes = []
    if settings.model.tensor_split == "auto":
        question = replace(question, shares=best_split(question))
        notes.append(f"--tensor-split auto: {shown_shares(question.shares) or 'nothing to split'}")
    planner = Planner(question)
    largest = planner.largest()
    wanted = n_ctx if settings.context.n_ctx > 0 else max(largest, runtime.CELLS)
    for line in [*head(question.file.n_bytes, draft_file, settings), *notes]:
        click.echo(line)
    click.echo()
    plan = planner.plan(wanted)
    for line in table(plan, {device: planner.largest(device) for device in devices}):
        click.echo(line)
    click.echo()
    for line in verdict(plan, n_slots, largest, config.context_length):
        click.echo(line)
    return 0 if plan.fits else 1


def planned_devices(settings: Settings) -> tuple[list[torch.device], list[int | None]]:
    """The GPUs of `--gpu-mem`, less what the driver keeps; else those of this machine with what is free on them."""
    names, sizes = settings.model.devices, settings.plan.gpu_mem_gib
    if not sizes:
        found = devices_of(names)
        return found, [int(free_bytes(device)) if device.type == "cuda" else None for device in found]
    if names == ("none",):
        return [torch.device("cpu")], [None]
    small = next((size for size in sizes if size * GIB <= CONTEXT_BYTES), None)
    if small is not None:
        raise ConfigError(
            f"--gpu-mem {small:g}: expected GiB of a GPU, more than the {CONTEXT_BYTES / GIB:g} that its driver keeps"
        )
    every = tuple(f"CUDA{i}" for i in range(len(sizes)))
    found = [named(name, len(sizes)) for name in names or every]
    return found, [int(sizes[device.index] * GIB) - CONTEXT_BYTES for device in found]


def named(name: str, n: int) -> torch.device:
    """CUDA0, CUDA1, ... of n planned GPUs."""
    number = name.upper().removeprefix("CUDA").lstrip(":")
    if not number.isdigit() or int(number) >= n:
        raise ConfigError(f"device {name}: --gpu-mem names CUDA0 to CUDA{n - 1}")
    return torch.device("cuda", int(number))


def draft_device(settings: Settings) -> torch.device | None:
    spec, sizes = settings.speculative, settings.plan.gpu_mem_gib
    if not sizes or spec.devices in (None, ("none",)) or spec.gpu_layers == 0:
        return runtime.draft_device(spec)
    assert spec.devices is not None
    if len(spec.devices) > 1:
        raise ConfigError(f"--device-draft {','.join(spec.devices)}: a drafter lives on one device; name one of them")
    return named(spec.devices[0], len(sizes))


def memory_of(device: torch.device | None, settings: Settings) -> int | None:
    """Bytes of a GPU, planned or of this machine; None for other devices."""
    if device is None or device.type != "cuda":
        return None
    sizes = settings.plan.gpu_mem_gib
    return int(sizes[device.index] * GIB) - CONTEXT_BYTES if sizes else int(free_bytes(device))


def head(n_bytes: int, draft_file: object, settings: Settings) -> list[str]:
    """What is planned."""
    model, context = settings.model, settings.context
    drafter = ""
    if draft_file is not None:
        drafter = f", drafter {settings.speculative.model}"
    elif settings.speculative.types:
        drafter = f", {','.join(settings.speculative.types)}"
    return [
        f"{model.path}: {n_bytes / GIB:.2f} GiB of weights{drafter}",
        f"split {model.split_mode}, KV {context.type_k}/{context.type_v}, prompts in steps of "
        f"{runtime.n_ubatch_of(context)} tokens",
    ]


def table(plan: Plan, largest: dict[torch.device, int]) -> list[str]:
    """A row a device, in GiB; the last column is the longest context that this device alone has room for."""
    used = [part for part in PARTS if any(parts[part] for parts in plan.parts.values())]
    rows = [["GiB", *used, "total", "of", "free", "longest context"]]
    for device, parts in plan.parts.items():
        limit = plan.memory[device]
        rows.append([
            device_name(device),
            *(f"{parts[part] / GIB:.2f}" for part in used),
            f"{plan.total(device) / GIB:.2f}",
            "" if limit is None else f"{limit / GIB:.2f}",
            "" if limit is None else f"{max(limit - plan.total(device), 0) / GIB:.2f}",
            str(largest[device]) if limit is not None and device in largest else "",
        ])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows]


def verdict(plan: Plan, n_slots: int, largest: int, trained: int) -> list[str]:
    lines = [f"{n_slots} slot(s) of {plan.n_ctx} tokens " + ("fit" if plan.fits else "do not fit")]
    for device in plan.parts:
        if plan.missing(device):
            lines.append(f"{device_name(device)}: {plan.missing(device) / GIB:.2f} GiB are missing")
    known = " (the context the model was trained with)" if largest >= trained else ""
    lines.append(f"the longest context that fits: {largest} tokens a slot{known}" if largest else "no context fits")
    return lines


command = OptionCommand("plan", run, SUMMARY)
