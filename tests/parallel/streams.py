"""The streams by which splits are compared with one device: every kind of drafter, greedy and sampled."""

from __future__ import annotations

from pathlib import Path

import torch

from ggufspec import bundled
from ggufspec.drafters import Drafter, DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.ngram_sizes import NgramSizes
from ggufspec.drafters.owned import Ownership
from ggufspec.engine import Engine
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.job import JobState, Request
from ggufspec.models import Model
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

# What each of them is called by --spec-type, and its file beside the target. The target drafts for itself as a small
# model would: nothing it proposes is refused.
DRAFTERS: dict[str, Path | None] = {
    "none": None, "draft-mtp": None, "draft-dspark": bundled.path("dspark"), "draft-dflash": bundled.path("dflash2"),
    "draft-simple": bundled.target_path(), "ngram-simple": None,
}  # fmt: skip
GREEDY, SAMPLED = SamplingParams(temperature=0, ignore_eos=True), SamplingParams(seed=7, ignore_eos=True)
# Of each of them a greedy stream, and a sampled one of those whose choices go other ways: from logits, with a draft's
# scores, from tokens alone.
SAMPLINGS = {
    name: (GREEDY, SAMPLED) if name in ("none", "draft-mtp", "draft-dspark") else (GREEDY,) for name in DRAFTERS
}
TEXT = "import os\nimport sys\n\n\ndef read_config(path):\n"


def make_drafter(name: str, file: GGUFFile, model: Model, weights: Weights, n_ctx: int,
                 device: torch.device | None = None, ownership: Ownership | None = None) -> Drafter | None:
    """One of `DRAFTERS` for a target of one slot."""
    if name == "none":
        return None
    path = DRAFTERS[name]
    options = SpecOptions(types=(name,), draft=DraftOptions(n_max=4), ngram_simple=NgramSizes(1, 3))
    return load_drafter(
        options, file, model, open_gguf(path) if path else None, n_slots=1, n_ctx=n_ctx, target_weights=weights,
        device=device, ownership=ownership,
    )  # fmt: skip


def answer(engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams, n: int, leads: bool = True) -> list[int]:
    """The n tokens of one request; a follower among ranks takes it from the leader and steps until it is done."""
    job = engine.submit(Request(tokenizer.encode(TEXT), sampling, n_predict=n)) if leads else None
    engine.step()
    job = job or next(slot.job for slot in engine.slots if slot.job is not None)
    while job.state is not JobState.DONE:
        engine.step()
    return job.generated
