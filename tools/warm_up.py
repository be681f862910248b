"""What happens between loading and the first request: kernels are compiled, prompts and steps captured, times taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from tqdm import tqdm

from ggufspec.engine import Engine
from ggufspec.job import Request
from ggufspec.prefill import WIDTHS, padded_width
from ggufspec.rehearsal import forget_statistics, rehearse
from ggufspec.sampling import SamplingParams
from ggufspec.tools.model_defaults import sampling_of
from ggufspec.tools.runtime import Runtime

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.5  # no bar for what is over at once

N_PROMPT, N_STEPS = 8, 4
PROMPT_SECONDS = 10.0  # widths of prompts that are not captured by then are when they are first needed
STEP_SECONDS = 8.0  # steps that are not captured by then are when nobody waits


def warm_up(runtime: Runtime, step_seconds: float = STEP_SECONDS) -> None:
    """On a GPU: kernels are compiled, then steps run that nobody reads. `--no-warmup` leaves all that to requests."""
    engine = runtime.engine
    if engine.device.type != "cuda":
        return
    if runtime.settings.common.warmup:
        sampling = [sampling_of(runtime.settings, runtime.file.metadata)]
        compile_kernels(engine, sampling)
        capture_prompts(engine, runtime.tokenizer.bos or 0)
        run_all(engine, runtime.tokenizer.bos or 0)
        capture_steps(engine, sampling, step_seconds)
    from ggufspec.kernels.ahead import tell_of_compilations

    tell_of_compilations()  # whatever comes now comes in the middle of somebody's request


def run_all(engine: Engine, token: int) -> None:
    """One stream and all slots together, at the draft lengths that `auto` begins with."""
    for n_streams in sorted({1, len(engine.slots)}):
        run(engine, token, n_streams)
    if engine.policy is not None:
        for n_streams in sorted({1, len(engine.slots)}):
            log.info("times with %d stream(s): %s", n_streams, engine.policy.costs.shown(n_streams))


def capture_prompts(engine: Engine, token: int) -> None:
    """Prompts of every width, the shortest first, as far as the time goes."""
    if engine.prefill.graphs is None and engine.prefill.stages is None:
        return
    began = time.perf_counter()
    most = min(engine.n_ubatch, engine.n_ctx - 1)
    widths = [width for width in WIDTHS if width <= padded_width(most)]
    n_captured = 0
    for width in tqdm(widths, desc="capturing prompts", unit="width", leave=False, delay=QUIET_SECONDS, disable=None):
        if time.perf_counter() - began > PROMPT_SECONDS:
            break
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        engine.submit(Request([token] * min(width, most), sampling, n_predict=1, cache_prompt=False))
        while not engine.idle:
            engine.step()
        n_captured += 1
    leave_nothing(engine)
    log.info("%d of %d widths of prompts captured in %.1f s", n_captured, len(widths), time.perf_counter() - began)


def capture_steps(engine: Engine, sampling: Sequence[SamplingParams], seconds: float = STEP_SECONDS) -> None:
    """Steps of all numbers of streams and all draft lengths, those first that the others can be replaced by, as far as
    the time goes. From here on streams do not wait for captures: see `Engine.serve`.

    sampling: as requests will ask for it, beside greedy choice. The ranks of a tensor split go on as before.
    """
    decoder = engine.decoder
    if decoder.graphs is None or engine.link is not None:
        return
    began, free, n_before = time.perf_counter(), free_bytes(engine), len(decoder.graphs.captured)
    engine.serve(sampling)
    n_wished = len(decoder.forms.wishes)
    with tqdm(desc="capturing steps", unit="step", leave=False, delay=QUIET_SECONDS, disable=None) as bar:
        while time.perf_counter() - began < seconds and engine.capture_one():
            bar.update()
    n_captured = len(decoder.graphs.captured) - n_before
    n_left = sum(not decoder.graphs.has(shape) for shape in decoder.forms.wishes)
    log.info(
        "%d steps captured in %.1f s, %d MiB; %d of %d are left for when nobody waits", n_captured,
        time.perf_counter() - began, (free - free_bytes(engine)) >> 20, n_left, n_wished,
    )  # fmt: skip


def free_bytes(engine: Engine) -> int:
    """Of the engine's GPU, with what the allocator keeps for nobody."""
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(engine.device)[0] if engine.device.type == "cuda" else 0


def leave_nothing(engine: Engine) -> None:
    """What has run was nobody's. In a tensor split slots keep their texts, which no request begins with."""
    forget_statistics(engine)
    if engine.link is None:
        for slot in engine.slots:
            engine.erase_slot(slot.id)


def compile_kernels(engine: Engine, sampling: Sequence[SamplingParams]) -> None:
    """On a GPU: all kernels that requests will need, several at once; those of earlier runs are read from disk.

    sampling: as requests will ask for it, beside greedy choice. The ranks of a tensor split rehearse nothing: they
    would have to do it all together. There kernels are compiled where they are first launched.
    """
    if engine.device.type != "cuda" or engine.link is not None:
        return
    from ggufspec.kernels.ahead import compiled_ahead

    began = time.perf_counter()
    with compiled_ahead() as kernels:
        rehearse(engine, sampling)
    log.info("%d kernels compiled or read from disk in %.1f s", kernels.n_kernels, time.perf_counter() - began)


def run(engine: Engine, token: int, n_streams: int) -> None:
    """Decode some steps of `n_streams` streams that nobody reads; nothing but times is kept.

    In a tensor split the other ranks see the requests and nothing else: there lengths are left to the policy.
    """
    policy = engine.policy if engine.link is None else None
    n_steps = N_STEPS if policy is None else len(policy.start_steps()) + N_STEPS
    n_predict = max(1, min((n_steps + n_streams) * (engine.n_max + 1), engine.n_ctx - N_PROMPT - 1))
    request = Request([token] * N_PROMPT, SamplingParams(temperature=0, ignore_eos=True), n_predict, cache_prompt=False)
    jobs = [engine.submit(request) for _ in range(n_streams)]
    for _ in range(n_streams):
        engine.step()
    if policy is not None:
        policy.forced.extend(policy.start_steps())
    for _ in range(n_steps):
        engine.step()
    for job in jobs:
        engine.cancel(job)
    while not engine.idle:
        engine.step()
    leave_nothing(engine)
    if policy is not None:
        policy.forget_texts()
