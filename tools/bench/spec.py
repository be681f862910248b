"""`ggufspec bench spec`: what drafters are worth on this machine, each measured in turn with plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ggufspec import bundled
from ggufspec.adaptive import adaptive_for
from ggufspec.drafters.synth import NOTICE
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import open_gguf
from ggufspec.sampling import SamplingParams
from ggufspec.sampling.params import RANDOM_SEED
from ggufspec.tools import log
from ggufspec.tools.settings import Settings

from . import lists, spec_table
from .attach import (
    AUTO,
    UNLIMITED,
    Bench,
    DrafterChoice,
    Length,
    default_drafters,
    drafters_of,
    free,
    longest,
    natural_n_max,
    parse_drafter,
    set_width,
)
from .mixed import MixedCommand
from .origin import check_output, lines, origin
from .report import page
from .split import split_step
from .steady import Run, SteadyEngine, accept_at_random, run_streams, take_times
from .summary import Cell, Pair, parity_text, summarize
from .workloads import Prompt, choose, encode, own_prompts, read_prompts

CELLS = 256
SEED = 1
PARITY_TEMPERATURES = (0.0, 1.0)  # greedy and sampled, whether timed or not
PARITY_TOKENS = 48


@dataclass
class Plan:
    """What to measure: every combination."""

    drafters: list[DrafterChoice]
    n_max: list[Length]  # empty: each drafter's own
    temperatures: list[float]
    streams: list[int]
    prompts: dict[str, list[list[int]]]  # workload: token ids
    n_tokens: int
    n_repetitions: int
    sampling: SamplingParams
    ignore_eos: bool

    def widths(self, choice: DrafterChoice) -> list[Length]:
        if choice.n_max is not None:
            return [choice.n_max]
        return self.n_max or [natural_n_max(choice)]

    def groups(self, workload: str, n_streams: int) -> list[list[list[int]]]:
        """One stream: each prompt alone. More: all prompts in turn, as often as it takes, in one group."""
        prompts = self.prompts[workload]
        if n_streams == 1:
            return [[p] for p in prompts]
        return [[prompts[i % len(prompts)] for i in range(n_streams)]]

    def n_pairs(self) -> int:
        per_width = sum(
            len(self.groups(w, np)) * self.n_repetitions
            for w in self.prompts for np in self.streams for _ in self.temperatures
        )  # fmt: skip
        return per_width * sum(len(self.widths(c)) for c in self.drafters)

    def sampling_of(self, temperature: float, n_streams: int) -> list[SamplingParams]:
        return [replace(self.sampling, temperature=temperature, seed=self.sampling.seed + i) for i in range(n_streams)]


@dataclass
class Results:
    cells: list[Cell] = field(default_factory=list)
    parity: list[dict[str, Any]] = field(default_factory=list)
    split: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"cells": [c.as_dict() for c in self.cells], "parity": self.parity, "split": self.split}


def measure(
    bench: Bench, plan: Plan, *, split: bool = False, show_progress: bool = True,
    on_drafter: Callable[[Results], object] = lambda results: None, plain: SteadyEngine | None = None,
) -> Results:  # fmt: skip
    """All cells of the plan. The target is loaded already; drafters come and go one after another.

    `on_drafter` gets the results so far after each of them. plain: an engine without drafts, kept from an earlier plan.
    """
    results = Results()
    plain = plain or bench.engine(None, ignore_eos=plan.ignore_eos)
    with tqdm(total=plan.n_pairs(), unit="pair", disable=None if show_progress else True) as bar:
        for choice in plan.drafters:
            _measure_drafter(bench, plan, choice, plain, results, bar, split)
            free()
            on_drafter(results)
    return results


def _measure_drafter(
    bench: Bench, plan: Plan, choice: DrafterChoice, plain: SteadyEngine, results: Results, bar: Any, split: bool
) -> None:
    widths = plan.widths(choice)
    most = max(longest(choice, width) for width in widths)
    drafter = bench.load_drafter(replace(choice, n_max=None), most)
    engine = bench.engine(drafter, ignore_eos=plan.ignore_eos)
    most = set_width(engine, most)
    rates = choice.rates(most) if choice.is_synthetic else []
    seen: set[Length] = set()
    for wanted in widths:
        n_max: Length = wanted
        if isinstance(wanted, int):
            n_max = set_width(engine, wanted)
        else:
            # an engine of its own: what others captured is for the block of their own width
            set_width(engine, most)
            engine = bench.engine(
                drafter, ignore_eos=plan.ignore_eos, policy=adaptive_for(drafter, bench.settings.speculative.n_min)
            )
        if n_max in seen:  # the drafter cannot draft as much as was asked for
            bar.total -= plan.n_pairs() // sum(len(plan.widths(c)) for c in plan.drafters)
            continue
        seen.add(n_max)
        if choice.is_synthetic:
            accept_at_random(engine, rates[: engine.n_max])
        bar.set_description(f"{choice.label} n={n_max}")
        for temperature in plan.temperatures:
            for n_streams in plan.streams:
                results.cells += _measure_cells(plan, choice, plain, engine, n_max, temperature, n_streams, bar)
        if not choice.is_synthetic:
            others = [t for t in PARITY_TEMPERATURES if t not in plan.temperatures]
            results.parity += [_parity(plan, choice, plain, engine, n_max, t) for t in others]
        if wanted == AUTO:
            engine = bench.engine(drafter, ignore_eos=plan.ignore_eos)
        elif split:
            prompt = next(iter(plan.prompts.values()))[0]
            results.split.append({"drafter": choice.label, "n_max": n_max, **split_step(bench, engine, prompt)})


def _measure_cells(
    plan: Plan, choice: DrafterChoice, plain: SteadyEngine, engine: SteadyEngine, n_max: Length, temperature: float,
    n_streams: int, bar: Any,
) -> Iterator[Cell]:  # fmt: skip
    """One cell a workload, and one over all of them."""
    sampling = plan.sampling_of(temperature, n_streams)
    first = plan.groups(next(iter(plan.prompts)), n_streams)[0]
    for warmed in (plain, engine):  # kernels are compiled and steps captured before anything is timed
        run_streams(warmed, first, min(2 * (engine.n_max + 1), plan.n_tokens), sampling)
    if engine.policy is not None:
        take_times(engine, first, sampling)
    everything: list[Pair] = []
    for workload in plan.prompts:
        pairs: list[Pair] = []
        for _ in range(plan.n_repetitions):
            for group in plan.groups(workload, n_streams):
                nth = len(everything) + len(pairs)
                runs: list[Run] = [run_streams(e, group, plan.n_tokens, sampling, nth) for e in (plain, engine)]
                pairs.append(Pair(*runs))
                bar.update()
        everything += pairs
        yield _cell(pairs, choice, n_max, engine.n_max, temperature, n_streams, workload)
    if len(plan.prompts) > 1:
        yield _cell(everything, choice, n_max, engine.n_max, temperature, n_streams, "all")


def _cell(pairs: list[Pair], choice: DrafterChoice, n_max: Length, n_positions: int, temperature: float,
          n_streams: int, workload: str) -> Cell:  # fmt: skip
    return summarize(
        pairs, drafter=choice.label, n_max=n_max, temperature=temperature, n_streams=n_streams, workload=workload,
        is_synthetic=choice.is_synthetic, n_positions=n_positions,
    )


def _parity(
    plan: Plan, choice: DrafterChoice, plain: SteadyEngine, engine: SteadyEngine, n_max: Length, temperature: float
) -> dict[str, Any]:
    """One prompt of each workload at a temperature that is not timed: the streams must be the plain ones."""
    sampling = plan.sampling_of(temperature, 1)
    n_tokens = min(plan.n_tokens, PARITY_TOKENS)
    pairs = []
    for prompts in plan.prompts.values():
        runs = [run_streams(e, prompts[:1], n_tokens, sampling) for e in (plain, engine)]
        pairs.append(Pair(*runs))
    return {
        "drafter": choice.label, "n_max": n_max, "temperature": temperature, "n_streams": len(pairs),
        "result": parity_text(pairs, False),
    }  # fmt: skip


# -- the command -----------------------------------------------------------------------------------------------


@click.command(
    "spec",
    cls=MixedCommand,
    reads=("common", "model", "context", "sampling", "speculative"),
    epilog="Options of the model, its placement, cache, sampling and drafters are llama.cpp's "
    "(-m, -c, -ctk, -ctv, -dev, -ngl, -sm, -ts, -fa, -t, --seed, --top-k, --spec-draft-* ...).",
)
@click.option("--drafter", "drafters", multiple=True, metavar="TYPE[=FILE][,n=N][,synth-len=L]",
              help="A drafter to measure; may be repeated. TYPE: mtp, dspark, dflash, dflash2, or a name of "
              "--spec-type; a FILE alone says its own type. More items: p-min=P, label=NAME, synth-rates=P0/P1/..., "
              "synth-p=P (each drafted token is right with P if all before it are). "
              "Without -m: the bundled family's three; else the file's MTP block.")  # fmt: skip
@click.option("--n-max", "--spec-draft-n-max", "n_max_text", metavar="1..8|1,2,4|auto",
              help="Draft lengths (default: as each was trained). auto: decided before every step, as the server does.")
@click.option("--temp", "--temperature", "temp_text", default="0", show_default=True, metavar="T,...",
              help="Temperatures.")
@click.option("-np", "--np", "--parallel", "streams_text", default="1", show_default=True, metavar="N,...",
              help="Streams that decode together.")
@click.option("-n", "--n-gen", "--predict", "--n-predict", "n_tokens", default=128, show_default=True,
              type=click.IntRange(2),
              help="Tokens of a stream.")
@click.option("-r", "--repetitions", default=3, show_default=True, type=click.IntRange(1),
              help="Pairs of runs for each prompt.")
@click.option("--prompts", "prompts_path", metavar="FILE",
              help='Own prompts: .json or .jsonl of {"prompt", "workload"}, or a text file that is one prompt.')
@click.option("--workload", "workload_text", metavar="NAME,...", help="Only these workloads (code, json, prose, chat).")
@click.option("--n-prompts", default=4, show_default=True, type=click.IntRange(1), help="Prompts of each workload.")
@click.option("--synth-len", "--spec-synth-len", "synth_len", metavar="L", type=float,
              help="Accept drafts at random so that a step emits L tokens on average: for files without trained "
              "weights. The text is then meaningless.")
@click.option("--synth-rates", "--spec-synth-rates", "synth_rates", metavar="P0,P1,...",
              help="The same with the probability of each position.")
@click.option("--ignore-eos/--no-ignore-eos", default=None,
              help="Go on past tokens that end a text (default: only with --synth-*).")
@click.option("--split", is_flag=True, help="Also profile a step: where draft and verification spend their time.")
@click.option("--json", "json_path", metavar="FILE", help="Write all figures there.")
@click.option("--html", "html_path", metavar="FILE", help="Write a page with plots there.")
def command(
    settings: Settings, drafters: tuple[str, ...], n_max_text: str | None, temp_text: str, streams_text: str,
    n_tokens: int, repetitions: int, prompts_path: str | None, workload_text: str | None, n_prompts: int,
    synth_len: float | None, synth_rates: str | None, ignore_eos: bool | None, split: bool, json_path: str | None,
    html_path: str | None,
) -> int:  # fmt: skip
    """Measure drafters: acceptance, draft, verify and sampling time, speedups, parity.

    Each drafted run stands beside a plain run of the same prompt (A B A B ...); figures are medians with half the
    distance of the quartiles. Decode times run from the first token on; wall times include the prompt.
    """
    log.setup(replace(settings.common, verbosity=min(settings.common.verbosity, 2)))
    is_bundled = settings.model.path is None
    if is_bundled:
        settings = replace(settings, model=replace(settings.model, path=str(bundled.target_path())))
    assert settings.model.path is not None
    file = open_gguf(settings.model.path)
    choices = [parse_drafter(text, is_bundled) for text in drafters]
    choices += drafters_of(settings, is_bundled)
    choices = [_with_synthetic(c, synth_len, synth_rates) for c in choices or default_drafters(file, is_bundled)]
    n_max = _lengths(n_max_text) if n_max_text else []
    streams = lists.integers(streams_text, "--np")
    numbers = [n for n in (*n_max, *(c.n_max for c in choices)) if isinstance(n, int)]
    if bad := [n for n in (*numbers, *streams) if n < 1]:
        raise ConfigError(f"--n-max, n= of --drafter and --np: found {bad[0]}, expected numbers from 1 on")
    check_output(json_path, html_path)
    chosen = choose(
        own_prompts() if prompts_path is None else read_prompts(prompts_path),
        workload_text.split(",") if workload_text else (), n_prompts,
    )  # fmt: skip
    is_synthetic = any(c.is_synthetic for c in choices)
    ids = _prompts(settings, chosen)
    longest = max(len(p) for group in ids.values() for p in group)
    widest = min(max([*numbers, 16]), UNLIMITED)
    room = n_tokens if max(streams) == 1 else 2 * n_tokens  # streams that are ahead go on until the last has its tokens
    n_ctx = settings.context.n_ctx or longest + room + 2 * widest
    n_ctx = -(-n_ctx // CELLS) * CELLS
    seed = SEED if settings.sampling.seed == RANDOM_SEED else settings.sampling.seed
    plan = Plan(
        choices, n_max, lists.numbers(temp_text, "--temp"), streams, ids, n_tokens, repetitions,
        replace(settings.sampling, seed=seed), is_synthetic if ignore_eos is None else ignore_eos,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:  # files are hashed while the target loads
        hashed = pool.submit(origin, [*map(str, file.shards), *(c.path for c in choices if c.path)], False)
        bench = Bench.load(settings, max(streams), n_ctx)
        facts = hashed.result()
    for line in lines(facts):
        click.echo(line)
    if is_synthetic:
        click.echo(f"note     {NOTICE}")

    def save(results: Results) -> None:
        data = {"origin": facts, "n_tokens": n_tokens, "repetitions": repetitions, "seed": seed, **results.as_dict()}
        if json_path:
            Path(json_path).write_text(json.dumps(data, indent=1))
        if html_path:
            Path(html_path).write_text(page(data), encoding="utf-8")

    results = measure(bench, plan, split=split, on_drafter=save)
    click.echo("\n" + spec_table.text(results))
    differing = [c for c in results.cells if not c.is_synthetic and c.parity != "equal"]
    return 1 if differing or any(p["result"] != "equal" for p in results.parity) else 0


def _lengths(text: str) -> list[Length]:
    """Numbers and ranges; `auto` among them."""
    out: list[Length] = []
    for part in text.split(","):
        out += [AUTO] if part == AUTO else lists.integers(part, "--n-max")
    return out


def _prompts(settings: Settings, chosen: dict[str, list[Prompt]]) -> dict[str, list[list[int]]]:
    from ggufspec.tokenizer import Tokenizer

    assert settings.model.path is not None
    metadata = open_gguf(settings.model.path).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    return {name: [encode(p, tokenizer, metadata) for p in prompts] for name, prompts in chosen.items()}


def _with_synthetic(choice: DrafterChoice, length: float | None, rates: str | None) -> DrafterChoice:
    if length is not None and rates is not None:
        raise ConfigError("--synth-len and --synth-rates exclude each other; give one of them")
    if choice.is_synthetic or (length is None and rates is None):
        return choice
    if length is not None:
        return replace(choice, synth_length=length)
    return replace(choice, synth_rates=tuple(lists.numbers(rates or "", "--synth-rates")))

