"""Launches of a rehearsal and of an engine at work, on a card that is not there. In a process of its own.

Kernels do nothing, so every value they would have written is zero: streams repeat one token, no draft is accepted.
What is launched, and with what sizes and alignments, does not depend on values.
"""

from __future__ import annotations

import torch
from pretended import card, recorded
from two_engines import GREEDY, SAMPLED, Family, drain, replayed

from ggufspec.drafters.chain import Chain
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.engine import Engine
from ggufspec.job import Request, Speculation
from ggufspec.kernels.ahead import ZeroFilled
from ggufspec.rehearsal import rehearse

N_SLOTS, N_CTX = 5, 1024
PROMPTS = (1, 5, 9, 20, 40, 150, 300, 777)


def engine_of(family: Family, kind: str) -> Engine:
    options = {"n_slots": N_SLOTS, "n_ctx": N_CTX, "use_graphs": False, "n_ubatch": 512}
    if kind != "chain":
        return family.engine(kind, True, **options)
    ngram = load_drafter(SpecOptions(("ngram-mod",)), family.file, family.model, None, n_slots=N_SLOTS, n_ctx=N_CTX,
                         target_weights=family.weights)  # fmt: skip
    mtp = family.drafter("mtp", N_SLOTS, N_CTX)
    assert ngram is not None and mtp is not None
    return family.engine("plain", False, drafter=Chain([mtp, *getattr(ngram, "members", [ngram])]), **options)


def work(engine: Engine) -> None:
    """Prompts of several lengths, then all numbers of streams and all draft lengths; steps captured where they can."""
    if engine.decoder.ahead:
        replayed(engine)
    for n in PROMPTS:
        engine.submit(Request([7] * n, GREEDY, n_predict=2, cache_prompt=False))
        drain(engine)
    for sampling in (GREEDY, SAMPLED):
        for n_streams in range(1, N_SLOTS + 1):
            for n_max in range(engine.n_max + 1):
                request = Request([7] * 6, sampling, 6, cache_prompt=False, speculation=Speculation(n_max=n_max))
                for _ in range(n_streams):
                    engine.submit(request)
                drain(engine)


def compare(kind: str) -> None:
    with card(90), torch.inference_mode():
        family = Family("cuda:0")
        family.tokenizer.eog = frozenset()
        with recorded() as rehearsed, ZeroFilled():
            rehearse(engine_of(family, kind), [SAMPLED])
        with recorded() as launched, ZeroFilled():
            work(engine_of(family, kind))
    missing, idle = launched - rehearsed, rehearsed - launched
    shown = "\n".join(f"{name} {kinds}" for name, kinds in sorted(missing))
    assert launched and not missing, f"{len(missing)} of {len(launched)} kernels were not rehearsed:\n{shown}"
    shown = "\n".join(f"{name} {kinds}" for name, kinds in sorted(idle))
    assert len(idle) <= 0.05 * len(launched), f"{len(idle)} kernels were rehearsed for nothing:\n{shown}"
