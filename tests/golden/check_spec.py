"""Compare drafted and accepted counts of the trained family with recorded ones of llama.cpp.

    python tests/golden/check_spec.py FAMILY_DIRECTORY spec.json [--drafters mtp,dspark] [--device cpu] [--json OUT]

The directory holds tiny-target-F16.gguf, tiny-dspark-F16.gguf and tiny-dflash2-F16.gguf. For every drafter, n and
prompt of the record: the text with the drafter must equal the plain text token for token, and the totals of drafted
and accepted tokens must be within 2% of the recorded totals. Where a single prompt differs, its counts are listed.
Exit status 1 when something does not hold.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from ggufspec.drafters import DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.job import Request
from ggufspec.models import load_model
from ggufspec.placement import Placement
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

TYPES = {"mtp": ("draft-mtp", None), "dspark": ("draft-dspark", "dspark"), "dflash2": ("draft-dflash", "dflash2")}
N_PREDICT = 128
N_CTX = 512
TOLERANCE = 0.02


def generate(engine: Engine, prompt: list[int]):
    job = None
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    for event in engine.generate(Request(prompt, sampling, n_predict=N_PREDICT, cache_prompt=False)):
        job = event.job
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--drafters", default="mtp,dspark,dflash2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", help="only these prompts, by index: 0,5,8")
    parser.add_argument("--n", help="only these draft lengths: 1,7")
    parser.add_argument("--json", type=Path, help="write the acceptance table here")
    args = parser.parse_args()

    record = json.loads(args.record.read_text())
    chosen = range(len(record["prompts"])) if args.prompts is None else [int(i) for i in args.prompts.split(",")]
    prompts = [record["prompts"][i] for i in chosen]
    file = open_gguf(args.family / "tiny-target-F16.gguf")
    weights = Weights(file)
    n_blocks = file.get(file.key("block_count"), int)
    target = load_model(file, Placement.single(args.device, n_blocks), weights=weights)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    tokens = [tokenizer.encode(p["prompt"], add_special=True, parse_special=True) for p in prompts]
    runs = [key for key in record["drafters"] if key.split()[0] in args.drafters.split(",")]
    runs = [key for key in runs if args.n is None or key.split("n=")[1] in args.n.split(",")]
    bar = tqdm(total=len(prompts) * (1 + len(runs)), unit="stream")

    failures: list[str] = []
    plain = []
    engine = Engine(target, tokenizer, n_ctx=N_CTX)
    for prompt, ids in zip(prompts, tokens):
        job = generate(engine, ids)
        plain.append(job.generated)
        wanted = [row["id"] for row in prompt["plain"]["logprobs"]["content"]]
        if len(ids) != prompt["plain"]["prompt_n"]:
            failures.append(f"prompt has {len(ids)} tokens, recorded {prompt['plain']['prompt_n']}")
        if job.generated != wanted:
            at = next(i for i, (a, b) in enumerate(zip(job.generated, wanted)) if a != b)
            top = prompt["plain"]["logprobs"]["content"][at]["top_logprobs"]
            gap = top[0]["logprob"] - top[1]["logprob"]
            print(f"plain {prompt['workload']}: first difference at {at}, recorded top-2 gap {gap:.2g}")
            if gap > 1e-3:
                failures.append(f"plain text of a {prompt['workload']} prompt differs at token {at}")
        bar.update()

    table: dict[str, dict[str, dict[str, float]]] = {}
    for run in runs:
        name, n = run.split(" n=")
        kind, part = TYPES[name]
        draft_file = None if part is None else open_gguf(args.family / f"tiny-{part}-F16.gguf")
        spec = SpecOptions(types=(kind,), draft=DraftOptions(n_max=int(n)))
        drafter = load_drafter(
            spec, file, target, draft_file, n_slots=1, n_ctx=N_CTX, target_weights=weights
        )
        engine = Engine(target, tokenizer, drafter=drafter, n_ctx=N_CTX)
        ours, theirs = [0, 0], [0, 0]
        by_workload: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
        start = time.perf_counter()
        rows = [record["drafters"][run][i] for i in chosen]
        for prompt, ids, text, want in zip(prompts, tokens, plain, rows):
            job = generate(engine, ids)
            if job.generated != text:
                failures.append(f"{run}: the text of a {prompt['workload']} prompt is not the plain one")
            got = (job.stats.draft_n, job.stats.draft_n_accepted)
            counts = by_workload[prompt["workload"]]
            for i, value in enumerate((*got, job.stats.n_verify)):
                counts[i] += value
            recorded = (want["draft_n"], want["draft_n_accepted"])
            if want["same_as_plain"]:
                ours = [a + b for a, b in zip(ours, got)]
                theirs = [a + b for a, b in zip(theirs, recorded)]
                if got != recorded:
                    bar.write(f"{run} {prompt['workload']}: {got}, recorded {recorded}")
            bar.update()
        seconds = time.perf_counter() - start
        line = f"{run}: drafted {ours[0]} / {theirs[0]}, accepted {ours[1]} / {theirs[1]}"
        line += f", {len(prompts) * N_PREDICT / seconds:.0f} tok/s"
        for workload, (_, accepted, steps) in by_workload.items():
            line += f", {workload} {1 + accepted / steps:.2f}"
        bar.write(line)
        table[run] = {
            w: {"drafted": d, "accepted": a, "mean_length": 1 + a / s} for w, (d, a, s) in by_workload.items()
        }
        for what, a, b in zip(("drafted", "accepted"), ours, theirs):
            if abs(a - b) > TOLERANCE * b:
                failures.append(f"{run}: {what} {a}, recorded {b}")
    bar.close()
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    for failure in failures:
        print("FAILED", failure)
    print("all equal within the tolerance" if not failures else f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
