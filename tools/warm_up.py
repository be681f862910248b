"""What happens between loading and the first request: kernels are compiled, steps captured, their times taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ggufspec.engine import Engine
from ggufspec.job import Request
from ggufspec.rehearsal import forget_statistics, rehearse
from ggufspec.sampling import SamplingParams
from ggufspec.tools.model_defaults import sampling_of
from ggufspec.tools.runtime import Runtime

log = logging.getLogger(__name__)

N_PROMPT, N_STEPS = 8, 4


def warm_up(runtime: Runtime) -> None:
    """On a GPU: kernels are compiled, then steps run that nobody reads. `--no-warmup` leaves all that to requests."""
    engine = runtime.engine
    if engine.device.type != "cuda":
        return
    if runtime.settings.common.warmup:
        compile_kernels(engine, [sampling_of(runtime.settings, runtime.file.metadata)])
        run_all(engine, runtime.tokenizer.bos or 0)
    from ggufspec.kernels.ahead import tell_of_compilations

    tell_of_compilations()  # whatever comes now comes in the middle of somebody's request


def run_all(engine: Engine, token: int) -> None:
    """One stream and all slots together, at the draft lengths that `auto` begins with."""
    for n_streams in sorted({1, len(engine.slots)}):
        run(engine, token, n_streams)
    if engine.policy is not None:
        for n_streams in sorted({1, len(engine.slots)}):
            log.info("times with %d stream(s): %s", n_streams, engine.policy.costs.shown(n_streams))


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
    forget_statistics(engine)
    if engine.link is None:
        for slot in engine.slots:
            engine.erase_slot(slot.id)
    if policy is not None:
        policy.forget_texts()
