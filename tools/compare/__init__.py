"""`ggufspec compare`: the same files, prompts and options here and in llama.cpp, side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from ggufspec import bundled
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import open_gguf
from ggufspec.quant import policy
from ggufspec.tools import log
from ggufspec.tools.bench import lists
from ggufspec.tools.bench.attach import (
    Bench,
    DrafterChoice,
    default_drafters,
    drafters_of,
    free,
    natural_n_max,
    parse_drafter,
)
from ggufspec.tools.bench.mixed import MixedCommand
from ggufspec.tools.bench.origin import check_output, lines, origin
from ggufspec.tools.bench.workloads import choose, encode, own_prompts, read_prompts, written
from ggufspec.tools.settings import Settings

from . import table
from .peers import IN_PROCESS, PeerSettings, Server, check_peer, is_url, open_peer
from .quantized import compare_quantized, find_quantizer
from .quantized import table as quantized_table
from .sides import Row, compare

CELLS = 256
EXACT = ("F32", "F16", "BF16")
MAX_POINTS = 2.0


@click.command(
    "compare",
    cls=MixedCommand,
    reads=("common", "model", "context", "speculative"),
    epilog="Options of the model, its cache and drafters are llama.cpp's (-m, -c, -t, -ctk, -ctv, -fa, -dev, -ngl, "
    "-ctkd, -ctvd, --spec-draft-n-min, --spec-draft-p-min ...) and go to both sides.",
)
@click.option("--peer", default=IN_PROCESS, show_default=True, metavar="PEER",
              help="The other side: xllamacpp (llama.cpp in process), the path of a llama-server, or the URL of a "
              "running one, which then has its own model and drafter.")  # fmt: skip
@click.option("--drafter", "drafters", multiple=True, metavar="TYPE[=FILE][,n=N]",
              help="As in bench spec; may be repeated. Default: what the target's file has.")  # fmt: skip
@click.option("--n-max", "--spec-draft-n-max", "n_max_text", metavar="N,...",
              help="Draft lengths (default: as each was trained).")
@click.option("--no-plain", is_flag=True, help="Leave out the run without a drafter.")
@click.option("--keep-types", is_flag=True,
              help="Compare quantized files as they are. Without it they are turned into F16 first: with quantized "
              "weights llama.cpp rounds activations to 8 bits on the CPU, so that its text differs.")  # fmt: skip
@click.option("-n", "--n-gen", "--predict", "--n-predict", "n_tokens", default=128, show_default=True,
              type=click.IntRange(2),
              help="Tokens of a stream.")
@click.option("-r", "--repetitions", default=1, show_default=True, type=click.IntRange(1),
              help="Pairs of runs for each prompt.")
@click.option("--prompts", "prompts_path", metavar="FILE", help="Own prompts, as in bench spec.")
@click.option("--workload", "workload_text", metavar="NAME,...", help="Only these workloads.")
@click.option("--n-prompts", default=4, show_default=True, type=click.IntRange(1), help="Prompts of each workload.")
@click.option("--quantize", "types_text", metavar="TYPE,...",
              help="Compare quantizers instead: the target quantized to each TYPE here and by llama-quantize, bytes "
              "and perplexity.")  # fmt: skip
@click.option("--llama-quantize", "quantizer", metavar="PATH", help="The llama-quantize of --quantize (default: beside "
              "--peer's binary, or on PATH).")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write all figures there.")
@click.option("--markdown", is_flag=True, help="Print the table as markdown.")
def command(
    settings: Settings, peer: str, drafters: tuple[str, ...], n_max_text: str | None, no_plain: bool, keep_types: bool,
    n_tokens: int, repetitions: int, prompts_path: str | None, workload_text: str | None, n_prompts: int,
    types_text: str | None, quantizer: str | None, json_path: str | None, markdown: bool,
) -> int:  # fmt: skip
    """Run the same greedy prompts here and in llama.cpp: tokens, acceptance, speed.

    Status 1 when tokens differ other than by a tie of the two likeliest, or a drafter's acceptance differs by more
    than 2 points.
    """
    log.setup(replace(settings.common, verbosity=min(settings.common.verbosity, 2)))
    if types_text is None:
        peer = check_peer(peer)
    is_bundled = settings.model.path is None
    if is_bundled:
        settings = replace(settings, model=replace(settings.model, path=str(bundled.target_path())))
    assert settings.model.path is not None
    choices: list[DrafterChoice] = [parse_drafter(text, is_bundled) for text in drafters]
    choices += drafters_of(settings, is_bundled)
    if not choices and not is_url(peer):
        choices = default_drafters(open_gguf(settings.model.path), is_bundled)
    if types_text is not None:
        types = types_text.split(",")
        for name in types:
            policy.file_type(name)
        check_output(json_path)
        return _quantizers(settings, find_quantizer(peer, quantizer), types, prompts_path, json_path)
    n_max = lists.integers(n_max_text, "--n-max") if n_max_text else []
    check_drafters(settings, choices, n_max)
    check_output(json_path)
    facts = origin([settings.model.path, *(c.path for c in choices if c.path is not None)])
    with tempfile.TemporaryDirectory(prefix="ggufspec-compare-") as folder:
        notes: list[str] = []
        if not keep_types:
            settings, choices, notes = in_f16(settings, choices, Path(folder))
        prompts = choose(
            own_prompts() if prompts_path is None else read_prompts(prompts_path),
            workload_text.split(",") if workload_text else (), n_prompts,
        )  # fmt: skip
        for line in [*lines(facts), f"peer     {peer}", *notes]:
            click.echo(line)
        chosen = [p for group in prompts.values() for p in group]
        rows, tokens_equal = run(settings, peer, choices, n_max, not no_plain, chosen, n_tokens, repetitions)
    click.echo(f"tokens   {tokens_equal}\n")
    click.echo(table.markdown(rows) if markdown else table.text(rows))
    if json_path:
        data = {"origin": facts, "peer": peer, "notes": notes, "n_tokens": n_tokens}
        data["rows"] = [r.as_dict() for r in rows]
        Path(json_path).write_text(json.dumps(data, indent=1))
    return 0 if all(is_same(row) for row in rows) else 1


def _quantizers(
    settings: Settings, quantizer: str, types: list[str], text_path: str | None, json_path: str | None
) -> int:  # fmt: skip
    """Both quantizers on the target; status 1 when a file's bytes differ."""
    assert settings.model.path is not None
    facts = origin([settings.model.path, quantizer])
    for line in lines(facts):
        click.echo(line)
    texts = own_prompts() if text_path is None else read_prompts(text_path)
    found = compare_quantized(settings, quantizer, types, "\n\n".join(prompt.text for prompt in texts))
    click.echo("\n" + quantized_table(found))
    if json_path:
        Path(json_path).write_text(json.dumps({"origin": facts, "rows": [r.as_dict() for r in found]}, indent=1))
    return 0 if all(row.is_same for row in found) else 1


def is_same(row: Row) -> bool:
    return all(d.is_tie for d in row.differences) and abs(row.points) <= MAX_POINTS


def run(
    settings: Settings, peer: str, choices: list[DrafterChoice], n_max: list[int], plain: bool, prompts: list[Any],
    n_tokens: int, repetitions: int,
) -> tuple[list[Row], str]:  # fmt: skip
    """(rows, what became of the prompts' tokens)"""
    assert settings.model.path is not None
    bench = Bench.load(settings, 1, CELLS)
    ids = [encode(p, bench.tokenizer, bench.file.metadata) for p in prompts]
    bench.n_ctx = settings.context.n_ctx or -(-(max(map(len, ids)) + n_tokens + 32) // CELLS) * CELLS
    context, spec = settings.context, settings.speculative
    base = PeerSettings(
        settings.model.path, bench.n_ctx, torch.get_num_threads(), context.type_k, context.type_v, context.flash_attn,
        gpu_layers=0 if bench.model.device.type == "cpu" else 999,
    )  # fmt: skip
    configurations: list[tuple[DrafterChoice | None, int]] = [(None, 0)] if plain else []
    if is_url(peer):  # the server decides; ours has the one drafter that was named, or none
        configurations = [(choices[0], natural_or(choices[0], n_max)[0])] if choices else [(None, 0)]
    else:
        configurations += [(choice, n) for choice in choices for n in natural_or(choice, n_max)]
    with open_peer(peer, base) as server:
        equal = same_tokens(server, [written(p, bench.tokenizer, bench.file.metadata) for p in prompts], ids)
    rows = []
    with tqdm(total=len(configurations) * len(ids) * repetitions, unit="pair", disable=None) as bar:
        for choice, n in configurations:
            own = base
            if choice is not None:
                own = replace(
                    base, draft=choice.path, kind=choice.kind, n_max=n, n_min=spec.n_min,
                    p_min=choice.p_min or spec.p_min, draft_type_k=spec.type_k, draft_type_v=spec.type_v,
                )  # fmt: skip
            rows.append(compare(bench, peer, own, choice, n, ids, n_tokens, repetitions, bar.update))
            free()
    return rows, equal


def check_drafters(settings: Settings, choices: Sequence[DrafterChoice], n_max: Sequence[int]) -> None:
    """ConfigError for lengths that draft nothing, and for drafts accepted at random, which llama.cpp cannot share."""
    if bad := [n for n in (*n_max, *(c.n_max for c in choices)) if isinstance(n, int) and n < 1]:
        raise ConfigError(f"--n-max and n= of --drafter: found {bad[0]}, expected numbers from 1 on")
    spec = settings.speculative
    if spec.synth_length is not None or spec.synth_rates or any(choice.is_synthetic for choice in choices):
        raise ConfigError("drafts accepted at random (--spec-synth-*, synth-*= of --drafter) cannot be compared; leave "
                          "them out, or measure them with ggufspec bench spec")  # fmt: skip


def natural_or(choice: DrafterChoice, n_max: list[int]) -> list[int]:
    if isinstance(choice.n_max, str):
        raise ConfigError(f"--drafter {choice.label}: n={choice.n_max} cannot be compared, llama.cpp drafts fixed "
                          "lengths; expected a number")  # fmt: skip
    if choice.n_max is not None:
        return [choice.n_max]
    return n_max or [natural_n_max(choice)]


def same_tokens(server: Server, texts: list[str], ids: list[list[int]]) -> str:
    differing = [i for i, (text, own) in enumerate(zip(texts, ids)) if server.tokenize(text) != own]
    if not differing:
        return f"all {len(ids)} prompts are the same tokens on both sides"
    return f"prompts {differing} are other tokens in llama.cpp; both sides get ours"


def in_f16(
    settings: Settings, choices: list[DrafterChoice], folder: Path
) -> tuple[Settings, list[DrafterChoice], list[str]]:
    """The same with quantized files replaced by F16 ones in `folder`, and a line for each."""
    notes: list[str] = []

    def exact(path: str) -> str:
        if all(t.layout.name in EXACT for t in open_gguf(path).tensors.values()):
            return path
        out = folder / f"{Path(path).stem}-F16.gguf"
        if not out.exists():
            to_f16(path, out)
            notes.append(f"note     {Path(path).name} is compared as F16, made of its quantized weights")
        return str(out)

    assert settings.model.path is not None
    settings = replace(settings, model=replace(settings.model, path=exact(settings.model.path)))
    choices = [replace(c, path=exact(c.path)) if c.path is not None else c for c in choices]
    return settings, choices, notes


def to_f16(path: str, out: Path) -> None:
    from ggufspec.quant.requantize import Options, make_plan, run_plan

    plan = make_plan(open_gguf(path), Options(policy.Choices(policy.file_type("F16")), allow_requantize=True))
    run_plan(plan, out)
