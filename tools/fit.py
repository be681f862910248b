"""Settings to a planner's question, and `--fit`: the context that the GPUs have room for, before a weight is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ggufspec.adaptive import AUTO_N_MAX
from ggufspec.best_split import best_split
from ggufspec.errors import ConfigError, PlacementError
from ggufspec.placement import device_name, devices_of
from ggufspec.planner import PARTS, Plan, Planner
from ggufspec.question import Question, check

if TYPE_CHECKING:
    from ggufspec.gguf_file import GGUFFile
    from ggufspec.models import Config
    from ggufspec.tools.settings import ModelSettings, Settings

log = logging.getLogger(__name__)

AUTO_WIDTHS = AUTO_N_MAX + 1  # draft lengths that `auto` has graphs for, none at all among them
GIB, MIB = 1 << 30, 1 << 20


def question_of(settings: Settings, file: GGUFFile, config: Config, draft_file: GGUFFile | None, n_slots: int,
                devices: Sequence[torch.device], memory: Sequence[int | None],
                draft_device: torch.device | None, draft_memory: int | None = None) -> Question:
    """Everything that memory depends on. `auto` shares are left out: they are an answer."""
    from ggufspec.tools.runtime import n_ubatch_of, spec_options

    model, context = settings.model, settings.context
    spec = spec_options(settings.speculative, draft_file)
    return Question(
        file, config, tuple(devices), tuple(memory), draft_file, spec.types, spec.draft, draft_device,
        spec.type_k, spec.type_v, model.split_mode, () if isinstance(model.tensor_split, str) else model.tensor_split,
        model.main_gpu, model.gpu_layers, n_slots, n_ubatch_of(context), context.type_k, context.type_v,
        context.n_checkpoints, model.graphs, 2 if isinstance(settings.speculative.n_max, int) else AUTO_WIDTHS,
        draft_memory,
    )


def with_shares(settings: Settings, shares: tuple[float, ...]) -> Settings:
    return replace(settings, model=replace(settings.model, tensor_split=shares))


def with_context(settings: Settings, n_slots: int, n_ctx: int) -> Settings:
    """Settings that come to `n_slots` slots of `n_ctx` cells each."""
    context = replace(settings.context, n_ctx=n_slots * n_ctx, n_parallel=n_slots, kv_unified=False)
    return replace(settings, context=context)


def margins(model: ModelSettings, n: int) -> list[int]:
    """`--fit-target` in bytes for n devices."""
    values = model.fit_margin_mib
    if len(values) not in (1, n):
        raise ConfigError(f"--fit-target has {len(values)} values for {n} GPUs; expected one, or one a GPU")
    return [MIB * value for value in (values * n if len(values) == 1 else values)]


def fitted(settings: Settings, file: GGUFFile, config: Config, draft_file: GGUFFile | None, n_slots: int, n_ctx: int,
           draft_device: torch.device | None) -> Settings:
    """`settings` with `--tensor-split auto` in numbers and, with `--fit`, a context that the GPUs have room for.

    A context the user set is kept. ConfigError when it, or the least one, does not fit: with what is missing where.
    Only GPUs are weighed. Under torchrun nothing is: its processes could come to different answers.
    """
    model = settings.model
    wants_shares = model.tensor_split == "auto"
    devices = devices_of(model.devices)
    gpus = [device for device in devices if device.type == "cuda"]
    if not (wants_shares or model.fit) or not gpus or model.gpu_layers == 0:
        if wants_shares:
            raise ConfigError("--tensor-split auto weighs the memory of GPUs, and none is used; name the shares")
        return settings
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if wants_shares:
            raise ConfigError("--tensor-split auto: under torchrun name the shares (ggufspec plan shows them)")
        return settings
    free = {device: int(torch.cuda.mem_get_info(device)[0]) for device in gpus}
    kept = dict(zip(gpus, margins(model, len(gpus))))
    memory = [free[device] - kept[device] if device in free else None for device in devices]
    draft_memory = None
    if draft_device is not None and draft_device.type == "cuda" and draft_device not in free:
        free[draft_device] = int(torch.cuda.mem_get_info(draft_device)[0])
        draft_memory = free[draft_device] - MIB * model.fit_margin_mib[-1]
    question = question_of(settings, file, config, draft_file, n_slots, devices, memory, draft_device, draft_memory)
    check(question)
    if wants_shares:
        question = replace(question, shares=best_split(question))
        settings = with_shares(settings, question.shares)
        log.info("--tensor-split auto: %s", shown_shares(question.shares))
    if not model.fit:
        return settings
    planner = Planner(question)
    is_set = settings.context.n_ctx > 0
    if planner.plan(n_ctx).fits:
        return settings
    if is_set:
        plan = planner.plan(n_ctx)
        without_margin = replace(plan, memory={**plan.memory, **free})
        if without_margin.fits:
            return settings
        raise PlacementError(refusal(without_margin, planner.largest(most=n_ctx), n_slots))
    best = planner.largest(most=n_ctx)
    least = min(model.fit_ctx, n_ctx)
    if best < least:
        raise PlacementError(refusal(planner.plan(least), best, n_slots))
    log.warning("the context of a slot is lowered from %d to %d tokens to fit the GPUs' memory", n_ctx, best)
    return with_context(settings, n_slots, best)


def refusal(plan: Plan, best: int, n_slots: int) -> str:
    """One line: what the worst device lacks, what it is needed for, what would fit."""
    device = max(plan.parts, key=plan.missing)
    parts = plan.parts[device]
    needed = ", ".join(f"{name} {parts[name] / GIB:.2f}" for name in PARTS if parts[name])
    limit = plan.memory[device] or 0
    hint = f"; {best} tokens a slot would fit" if best else "; no context fits"
    return (
        f"{device_name(device)} needs {plan.total(device) / GIB:.2f} GiB for {n_slots} slot(s) of {plan.n_ctx} tokens "
        f"and has {limit / GIB:.2f}: {plan.missing(device) / GIB:.2f} GiB are missing ({needed}){hint}"
    )


def shown_shares(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)
