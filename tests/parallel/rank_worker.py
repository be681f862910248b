"""One rank of a test's tensor split: the bundled target, each drafter in turn, tokens written as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from ggufspec import bundled
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.owned import Ownership
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.job import JobState, Request
from ggufspec.models import load_model, read_config
from ggufspec.parallel import WHOLE
from ggufspec.placement import Placement
from ggufspec.ranks import join
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

DRAFTERS = {"none": None, "draft-mtp": None, "draft-dspark": "dspark", "draft-dflash": "dflash2"}
TEXT = "import os\nimport sys\n\n\ndef read_config(path):\n"


def answer(engine: Engine, tokenizer: Tokenizer, leads: bool, sampling: SamplingParams, n: int) -> list[int]:
    """The tokens of one request; a follower takes it from the leader and steps until it is done."""
    job = engine.submit(Request(tokenizer.encode(TEXT), sampling, n_predict=n)) if leads else None
    engine.step()
    job = job or next(slot.job for slot in engine.slots if slot.job is not None)
    while job.state is not JobState.DONE:
        engine.step()
    return job.generated


def main(rank: int, shares: tuple[float, ...], out: str, owner: int | None, ahead: bool) -> None:
    torch.set_num_threads(1)
    link = join(rank, shares, torch.device("cpu")) if len(shares) > 1 else None
    file = open_gguf(bundled.target_path())
    weights, tokenizer = Weights(file), Tokenizer.from_metadata(file.metadata)
    placement = Placement.single("cpu", read_config(file).n_layers)
    model = load_model(file, placement, weights=weights, shard=link.shard if link else WHOLE)
    results, accepted = {}, {}
    for name, draft in DRAFTERS.items():
        drafter = None
        if name != "none":
            draft_file = open_gguf(bundled.path(draft)) if draft else None
            options = SpecOptions(types=(name,), draft=DraftOptions(n_max=4))
            at = Ownership(owner, rank, link.devices, link.host) if link is not None and owner is not None else None
            drafter = load_drafter(
                options, file, model, draft_file, n_slots=1, n_ctx=256, target_weights=weights, ownership=at
            )
            assert owner is None or (drafter.inner is not None) == (rank == owner)
        for sampling in (SamplingParams(temperature=0, ignore_eos=True), SamplingParams(seed=7, ignore_eos=True)):
            engine = Engine(model, tokenizer, drafter=drafter, n_ctx=256, link=link, ahead=ahead)
            if drafter is not None:
                drafter.reset(0)
            tokens = answer(engine, tokenizer, rank == 0, sampling, 24)
            results[f"{name} {sampling.temperature}"] = tokens
            accepted[f"{name} {sampling.temperature}"] = engine.stats.draft_n_accepted
    with open(f"{out}.{rank}", "w") as f:
        json.dump({"tokens": results, "accepted": accepted, "cache_bytes": engine.cache.n_bytes}, f)
    if link is not None:
        dist.destroy_process_group()  # its threads must not outlive the interpreter


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(float(x) for x in sys.argv[2].split(",")), sys.argv[3],
         int(sys.argv[4]) if len(sys.argv) > 4 else None, ahead="ahead" in sys.argv[5:])
