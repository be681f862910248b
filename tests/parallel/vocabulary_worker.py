"""One rank of a test's tensor split: choices from logits of which it has a part, against those from all of them.

    python vocabulary_worker.py RANK SHARES OUT        writes what differed, and how often logits were joined
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from ggufspec import bundled
from ggufspec.choose import Chooser
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.scores import best
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec
from ggufspec.job import Job, JobState, Request
from ggufspec.models import load_model, read_config
from ggufspec.parallel import WHOLE, Range, Shard
from ggufspec.placement import Placement
from ggufspec.ranks import Ranks, join
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.slot import Slot
from ggufspec.tokenizer import Tokenizer
from ggufspec.unjoined import Unjoined, argmax, top_k, whole
from ggufspec.weights import Weights

V, W = 1000, 3
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, biased": SamplingParams(temperature=0, logit_bias=((0, 1.5), (63, -torch.inf), (500, 9.0), (999, 20.0))),
    "top_k 20": SamplingParams(seed=1, top_k=20, temperature=1.5),
    "top_k 1": SamplingParams(seed=2, top_k=1),
    "hot, biased": SamplingParams(
        seed=3, top_k=40, top_p=1.0, min_p=0.0, temperature=9.0, logit_bias=((1, 3.0), (998, -torch.inf))
    ),
}
WIDE = {
    "top_k 0": SamplingParams(seed=4, top_k=0, temperature=3.0),
    "top_k 600": SamplingParams(seed=5, top_k=600, temperature=9.0, top_p=1.0, min_p=0.0),
}


@contextmanager
def counted_joins() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is joined inside."""
    joined, join_columns = [], Shard.join

    def counting(self: Shard, x: Tensor, bounds: Sequence[Range]) -> Tensor:
        joined.append(tuple(x.shape))
        return join_columns(self, x, bounds)

    Shard.join = counting
    try:
        yield joined
    finally:
        Shard.join = join_columns


def cuts(size: int) -> list[list[Range]]:
    """Some ranks have a lot, a few columns, or none."""
    ends = {2: [[512], [3], [0], [V]], 3: [[256, 640], [0, 320], [2, 2]], 4: [[250, 500, 750], [1, 1, 700], [0, 0, 0]]}
    return [list(zip([0, *inner], [*inner, V])) for inner in ends[size]]


def some_logits(case: int) -> Tensor:
    """[2, W, V]: ties within and across ranks; a row of one value, one of zeros of both signs, one of -inf but few."""
    generator = torch.Generator().manual_seed(case)
    x = torch.randint(-40, 40, (2, W, V), generator=generator) / 8
    x[0, 1] = 0.25
    x[0, 2] = torch.where(torch.rand(V, generator=generator) < 0.5, 0.0, -0.0)
    x[1, 2, torch.rand(V, generator=generator) < 0.98] = -torch.inf
    return x


def choices(shard: Shard, tokenizer: Tokenizer) -> dict:
    """What differs between a part and the whole."""
    wrong, chooser, ids = [], Chooser(tokenizer, V, torch.device("cpu")), count()
    tokens, n_past, n_rows = torch.zeros(2, W, dtype=torch.int64), torch.tensor([5, 70]), torch.tensor([W, W])
    rows = Rows(tokens, torch.arange(2), n_past, n_rows, tentative=True)

    def check(name: str, f: Callable) -> None:
        for case, bounds in enumerate(cuts(shard.size)):
            x = some_logits(case)
            start, stop = bounds[shard.rank]
            part = Unjoined(x[..., start:stop].contiguous(), shard, bounds)
            expected, got = f(x), f(part)
            if not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
                wrong.append(f"{name}, {bounds}")

    def chosen(params: Sequence[SamplingParams]) -> Callable:
        slots = [Slot(i, Job(next(ids), Request([0], chooser.bind(p)))) for i, p in enumerate(params)]
        return lambda logits: (chooser.rows(logits, rows, slots).tokens,)

    def all_checks(samplings: dict[str, SamplingParams]) -> None:
        for name, params in samplings.items():
            check(name, chosen([params, params if params.temperature == 0 else replace(params, seed=99)]))

    with counted_joins() as joined:
        check("argmax", lambda x: (argmax(x),))
        for k in (1, 2, 10, 64, 125):
            check(f"the best {k}", lambda x, k=k: top_k(x, k))
        for p_min in (0.0, 0.5):
            check(f"drafted with p_min {p_min}", lambda x, p_min=p_min: best(x, p_min))
        all_checks(SAMPLINGS)
        check("greedy beside sampled", chosen([SAMPLINGS["greedy, biased"], SAMPLINGS["hot, biased"]]))
    few = len(joined)
    with counted_joins() as joined:
        check("whole", lambda x: (whole(x),))
        check("the best 600", lambda x: top_k(x, 600))
        all_checks(WIDE)
        all_checks({"penalties": SamplingParams(seed=6, repeat_penalty=1.5)})
    return {"wrong": wrong, "joins of few candidates": few, "joins of many": len(joined)}


REQUESTS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(seed=7, temperature=1.2, top_k=20, ignore_eos=True, logit_bias=((100, 2.0), (7, 1.0))),
    "penalized": SamplingParams(seed=8, repeat_penalty=1.3, ignore_eos=True),
    "all candidates": SamplingParams(seed=9, top_k=0, ignore_eos=True),
    "probabilities": SamplingParams(temperature=0, n_probs=3, ignore_eos=True),
    "grammar": SamplingParams(seed=10),
}  # fmt: skip
PARTS_DO = ("greedy", "sampled")  # need no whole logits


def answers(engine: Engine, tokenizer: Tokenizer, leads: bool, names: Sequence[str]) -> dict:
    """The tokens of requests that run side by side."""
    prompt = tokenizer.encode("import os\n\ndef main():\n")
    if leads:
        for name in names:
            spec = GrammarSpec("gbnf", "root ::= [a-z ]+") if name == "grammar" else None
            engine.submit(Request(prompt, REQUESTS[name], n_predict=10, grammar=spec))
    engine.step()
    jobs = sorted({slot.job.id: slot.job for slot in engine.slots if slot.job is not None}.values(), key=lambda j: j.id)
    while any(job.state is not JobState.DONE for job in jobs):
        engine.step()
    assert len(jobs) == len(names)
    return {name: job.generated for name, job in zip(names, jobs)}


def texts(link: Ranks | None, tokenizer: Tokenizer) -> dict:
    """Of the bundled target, without a drafter and with MTP that goes by probability."""
    file = open_gguf(bundled.target_path())
    weights = Weights(file)
    placement = Placement.single("cpu", read_config(file).n_layers)
    model = load_model(file, placement, weights=weights, shard=link.shard if link else WHOLE)
    found, joins = {}, {}
    for name in ("none", "draft-mtp"):
        for group in (PARTS_DO, tuple(REQUESTS)):
            drafter = None
            if name != "none":
                options = SpecOptions(types=(name,), draft=DraftOptions(n_max=3, p_min=0.3))
                drafter = load_drafter(
                    options, file, model, None, n_slots=len(group), n_ctx=128, target_weights=weights
                )
            engine = Engine(model, tokenizer, drafter=drafter, n_slots=len(group), n_ctx=128, link=link)
            with counted_joins() as joined:
                made = answers(engine, tokenizer, link is None or link.rank == 0, group)
            key = f"{name} of {len(group)}"
            found[key], joins[key] = made, len(joined)
    return {"tokens": found, "joins": joins}


def main(rank: int, shares: tuple[float, ...], out: str) -> None:
    torch.set_num_threads(1)
    link = join(rank, shares, torch.device("cpu")) if len(shares) > 1 else None
    tokenizer = Tokenizer.from_metadata(open_gguf(bundled.target_path()).metadata)
    found = texts(link, tokenizer)
    if link is not None:
        found |= choices(link.shard, tokenizer)
    with open(f"{out}.{rank}", "w") as f:
        json.dump(found, f)
    if link is not None:
        os._exit(0)  # as programs do (`ranks.leave`): the library's threads do not stand the interpreter's end


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(float(x) for x in sys.argv[2].split(",")), sys.argv[3])
