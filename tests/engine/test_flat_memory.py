"""Requests leave nothing behind: objects and bytes of tensors are as many after a thousand as after a hundred."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import families
import pytest
import torch

from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Request
from ggufspec.models import load_model
from ggufspec.prompt_cache import PromptCache
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer

N_A_ROUND = 25
DIGITS = GrammarSpec("gbnf", "root ::= [0-9]+")


def small_engine(folder: Path) -> Engine:
    """An MTP drafter and one of n-grams, a host cache that is full after a few prompts."""
    file = open_gguf(families.make_qwen35(folder / "m.gguf", seed=1, n_layers=2, full_interval=2, n_embd=64, n_ff=64,
                                          head_dim=32, state_size=16))  # fmt: skip
    model = load_model(file)
    spec = SpecOptions(("draft-mtp", "ngram-mod"), DraftOptions(n_max=2))
    drafter = load_drafter(spec, file, model, None, n_slots=5, n_ctx=256)
    return Engine(model, Tokenizer.from_metadata(file.metadata), drafter=drafter, n_slots=5, n_ctx=256, n_ubatch=32,
                  prompt_cache=PromptCache(200_000))  # fmt: skip


def play_round(engine: Engine, number: int) -> None:
    """Greedy, sampled, with a grammar, with probabilities, with a stop string; two of them are cancelled."""
    kinds = [
        dict(sampling=SamplingParams(temperature=0.0)),
        dict(sampling=SamplingParams(seed=number)),
        dict(sampling=SamplingParams(temperature=0.0), grammar=DIGITS),
        dict(sampling=SamplingParams(temperature=0.0, n_probs=2)),
        dict(sampling=SamplingParams(seed=number), stop=("a", "bc")),
    ]
    jobs = []
    for k in range(N_A_ROUND):
        prompt = [33 + (number * 7 + k * 3 + i * (1 + k % 5)) % 90 for i in range(6 + k % 3)]
        jobs.append(engine.submit(Request(prompt, n_predict=3, **kinds[k % 5])))  # type: ignore[arg-type]
    engine.step()
    engine.cancel(jobs[3]), engine.cancel(jobs[-1])
    while not engine.idle:
        engine.step()


def alive() -> tuple[Counter[str], int]:
    """(objects by type, bytes of tensors)"""
    gc.collect()
    objects = gc.get_objects()
    counts = Counter(type(o).__name__ for o in objects)
    del counts["UntypedStorage"]  # made by looking at a tensor's
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in objects if type(t) is torch.Tensor}
    return counts, sum(tensors.values())


@pytest.mark.parametrize("n_rounds", [4, pytest.param(36, marks=pytest.mark.slow)])
def test_requests_leave_memory_flat(tmp_path: Path, n_rounds: int) -> None:
    engine = small_engine(tmp_path)
    for number in range(4):
        play_round(engine, number)
    before, bytes_before = alive()
    for number in range(4, 4 + n_rounds):
        play_round(engine, number)
    after, bytes_after = alive()
    assert engine.stats.draft_n > 50 and engine.prompt_cache.n_bytes > 0
    # What only the fifth of requests with a grammar, say, left behind would show.
    grown = {name: n - before[name] for name, n in after.items() if n - before[name] > n_rounds * N_A_ROUND // 10}
    assert not grown, grown
    assert bytes_after < bytes_before + 100_000
