"""One rank of a test's tensor split: the bundled target, each drafter in turn, tokens written as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
from streams import DRAFTERS, SAMPLINGS, answer, make_drafter

from ggufspec import bundled
from ggufspec.drafters.owned import Ownership
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model, read_config
from ggufspec.parallel import WHOLE
from ggufspec.placement import Placement
from ggufspec.ranks import join
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights


def main(rank: int, shares: tuple[float, ...], out: str, n_tokens: int, owner: int | None,
         ahead: bool) -> None:
    torch.set_num_threads(1)
    link = join(rank, shares, torch.device("cpu")) if len(shares) > 1 else None
    file = open_gguf(bundled.target_path())
    weights, tokenizer = Weights(file), Tokenizer.from_metadata(file.metadata)
    placement = Placement.single("cpu", read_config(file).n_layers)
    model = load_model(file, placement, weights=weights, shard=link.shard if link else WHOLE)
    results, accepted = {}, {}
    for name in DRAFTERS:
        at = Ownership(owner, rank, link.devices, link.host) if link is not None and owner is not None else None
        drafter = make_drafter(name, file, model, weights, 256, ownership=at)
        if at is not None and name.startswith("draft-"):
            assert (drafter.inner is not None) == (rank == owner)
        for sampling in SAMPLINGS[name]:
            engine = Engine(model, tokenizer, drafter=drafter, n_ctx=256, link=link, ahead=ahead)
            if drafter is not None:
                drafter.reset(0)
            tokens = answer(engine, tokenizer, sampling, n_tokens, leads=rank == 0)
            results[f"{name} {sampling.temperature}"] = tokens
            accepted[f"{name} {sampling.temperature}"] = engine.stats.draft_n_accepted
    with open(f"{out}.{rank}", "w") as f:
        json.dump({"tokens": results, "accepted": accepted, "cache_bytes": engine.cache.n_bytes}, f)
    if link is not None:
        os._exit(0)  # as programs do (`ranks.leave`): the library's threads do not stand the interpreter's end


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(float(x) for x in sys.argv[2].split(",")), sys.argv[3], int(sys.argv[4]),
         int(sys.argv[5]) if len(sys.argv) > 5 else None, ahead="ahead" in sys.argv[6:])
