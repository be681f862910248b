"""Check that drafting changes nothing: the stream with any drafter, draft length and cache type is the plain one.

    python tests/golden/check_parity.py TARGET.gguf [DRAFT.gguf ...] [--device cuda:0] [--tokens 128] [--widths 1-8]

The target's MTP block, if it has one, and every draft file are drafters. Each runs at every draft length, greedy and
sampled (temperature 1, top-p 0.95, top-k 20, seed 42), with KV caches of f16, q8_0 and q4_0 for target and drafter.
Exit status 1 when a stream differs.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.recognize import infer_types, mtp_block
from ggufspec.engine import Engine
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.job import Request
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, top_p=0.95, top_k=20, min_p=0.0, seed=42, ignore_eos=True),
}
KV_TYPES = ("f16", "q8_0", "q4_0")
PROMPT = "def read_config(path):\n    "


class Pair:
    """A loaded target and the drafters that go with it."""

    def __init__(self, target: Path, device: str = "cpu"):
        self.file = open_gguf(target)
        self.weights = Weights(self.file)
        n_blocks = self.file.get(self.file.key("block_count"), int)
        placement = Placement.single(device, n_blocks)
        self.model: Model = load_model(self.file, placement, weights=self.weights)
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata)

    def engine(self, draft: GGUFFile | None, types: Sequence[str], n_max: int, kv: str, n_ctx: int) -> Engine:
        drafter = None
        if types:
            spec = SpecOptions(tuple(types), DraftOptions(n_max=n_max), type_k=kv, type_v=kv)
            drafter = load_drafter(
                spec, self.file, self.model, draft, n_slots=1, n_ctx=n_ctx, target_weights=self.weights
            )
        return Engine(self.model, self.tokenizer, drafter=drafter, n_ctx=n_ctx, type_k=kv, type_v=kv)


def stream(engine: Engine, prompt: list[int], sampling: SamplingParams, n: int) -> tuple[list[int], int]:
    """(tokens, drafted tokens that were accepted)"""
    job = None
    for event in engine.generate(Request(prompt, sampling, n_predict=n, cache_prompt=False)):
        job = event.job
    assert job is not None
    return job.generated, job.stats.draft_n_accepted


def check(
    pair: Pair,
    prompt: list[int],
    drafts: Sequence[GGUFFile | None],
    widths: Sequence[int],
    n: int,
    kv_types: Sequence[str] = KV_TYPES,
) -> Iterator[tuple[str, str | None, int]]:
    """Every case as (name, what is wrong or None, accepted tokens). A draft of None is the target's MTP block."""
    n_ctx = len(prompt) + n + 16
    for kv in kv_types:
        plain = {}
        for name, sampling in SAMPLING.items():
            plain[name], _ = stream(pair.engine(None, (), 0, kv, n_ctx), prompt, sampling, n)
        for draft in drafts:
            types = ("draft-mtp",) if draft is None else infer_types(draft)
            for width in widths:
                engine = pair.engine(draft, types, width, kv, n_ctx)
                for name, sampling in SAMPLING.items():
                    tokens, n_accepted = stream(engine, prompt, sampling, n)
                    file = "" if draft is None else f" ({draft.path.name})"
                    case = f"{types[0]}{file} n={width} {name} {kv}"
                    wrong = None
                    if tokens != plain[name]:
                        at = next((i for i, (a, b) in enumerate(zip(tokens, plain[name])) if a != b), n)
                        wrong = f"{case}: differs from the plain stream at token {at}"
                    yield case, wrong, n_accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafts", type=Path, nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--widths", default="1-8", help="first and last draft length")
    args = parser.parse_args()
    pair = Pair(args.target, args.device)
    drafts: list[GGUFFile | None] = [None] if mtp_block(pair.file) is not None else []
    drafts += [open_gguf(path) for path in args.drafts]
    first, last = (int(w) for w in args.widths.split("-"))
    widths = range(first, last + 1)
    total = len(drafts) * len(widths) * len(SAMPLING) * len(KV_TYPES)
    failures, accepted = [], 0
    cases = check(pair, pair.tokenizer.encode(PROMPT), drafts, widths, args.tokens)
    for _, wrong, n_accepted in tqdm(cases, total=total, unit="stream"):
        accepted += n_accepted
        if wrong is not None:
            failures.append(wrong)
            tqdm.write(f"FAILED {wrong}")
    print(f"{total - len(failures)} of {total} streams are the plain ones; {accepted} drafted tokens were accepted")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
