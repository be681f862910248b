"""`ggufspec bench`: prompts and generation with random tokens, timed and printed as llama-bench does."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import click
import torch

from ggufspec import __version__, bundled
from ggufspec.gguf_file import GGUFFile
from ggufspec.tools import log, runtime
from ggufspec.tools.command import show
from ggufspec.tools.settings import CommonSettings, ContextSettings, ModelSettings, Settings

from .attach import Bench, free
from .description import model_type
from .origin import cpu_name, gpus
from .outputs import PRINTERS, Printer, Row, test_text
from .stepper import Stepper, now_ns, random_tokens
from .tests_options import Options, parse, usage

# what makes another load necessary
LOADING = ("model_filename", "n_gpu_layers", "split_mode", "main_gpu", "devices", "tensor_split")


class LlamaBenchCommand(click.Command):
    """Its options are llama-bench's own, not those of the other tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["options"] = parse(args, lambda line: click.echo(f"warn: {line}", err=True))
        return []

    def get_help(self, ctx: click.Context) -> str:
        return usage()


@click.command("tests", cls=LlamaBenchCommand, add_help_option=False)
def command(options: Options) -> int:
    """Time prompts and generation."""
    log.setup(CommonSettings(verbosity=5 if options.verbose else 2))
    if options.action == "help":
        click.echo(usage())
        return 0
    if options.action:
        show("bench", options.action, "")
        return 0
    loaded: tuple[tuple[Any, ...], Bench] | None = None
    printers: list[Printer] = []
    last: Row | None = None
    tests = list(options.tests())
    for i, test in enumerate(tests):
        if test["model_filename"] is None:
            test["model_filename"] = str(bundled.target_path())
        key = tuple(test[name] for name in LOADING)
        if loaded is None or loaded[0] != key:
            loaded = None
            free()
            loaded = key, Bench.load(settings_of(test), 1, 1, show_progress=options.progress)
        bench = loaded[1]
        if not printers:
            is_cpu = bench.model.device.type == "cpu"
            for name, file in ((options.output, sys.stdout), (options.output_err, sys.stderr)):
                if name != "none":
                    printers.append(PRINTERS[name](file, options, is_cpu))
                    printers[-1].header()
        if options.progress:
            click.echo(f"ggufspec bench: benchmark {i + 1}/{len(tests)}: {test_text(test)}", err=True)
        time.sleep(options.delay_s)
        last = row_of(test, bench, measure(test, bench, options))
        for printer in printers:
            printer.row(last)
    for printer in printers:
        printer.footer(last)
    return 0


def settings_of(test: dict[str, Any]) -> Settings:
    devices = None if test["devices"] == "auto" else tuple(test["devices"].split("/"))
    return Settings(
        common=CommonSettings(threads=test["n_threads"]),
        model=ModelSettings(
            path=test["model_filename"], devices=devices, gpu_layers=test["n_gpu_layers"],
            split_mode=test["split_mode"], tensor_split=test["tensor_split"], main_gpu=test["main_gpu"],
        ),
        context=context_of(test),
    )  # fmt: skip


def context_of(test: dict[str, Any]) -> ContextSettings:
    return ContextSettings(
        n_batch=test["n_batch"], n_ubatch=test["n_ubatch"], type_k=test["type_k"], type_v=test["type_v"],
        flash_attn={-1: "auto", 0: "off", 1: "on"}[test["flash_attn"]],
    )  # fmt: skip


def measure(test: dict[str, Any], bench: Bench, options: Options) -> list[int]:
    """Nanoseconds of every repetition."""
    runtime.check_context(context_of(test))
    torch.set_num_threads(test["n_threads"])
    n_prompt, n_gen, n_depth = test["n_prompt"], test["n_gen"], test["n_depth"]
    stepper = Stepper(
        bench.model, 1, n_prompt + n_gen + n_depth, test["type_k"], test["type_v"], test["n_ubatch"], test["n_batch"]
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    first = bench.tokenizer.bos if bench.tokenizer.add_bos else None

    def random(n: int) -> torch.Tensor:
        return random_tokens(n, bench.model.n_vocab, generator, first)

    if options.warmup:
        if n_prompt:
            stepper.prompt(random(n_prompt))
        if n_gen:
            stepper.step(random(1), [0])
        stepper.wait()
    deep = None
    samples = []
    for i in range(options.repetitions):
        if deep is None:
            stepper.clear(0)
            if n_depth:
                stepper.prompt(random(n_depth))
                deep = stepper.save(0)
        else:
            stepper.restore(0, deep)
        stepper.wait()
        if options.progress:
            click.echo(f"ggufspec bench: run {i + 1}/{options.repetitions}", err=True)
        prompt = random(n_prompt)
        singles = random(n_gen) if n_gen else None
        start = now_ns()
        if n_prompt:
            stepper.prompt(prompt)
            stepper.wait()
        if singles is not None:
            for at in range(n_gen):
                stepper.step(singles[at : at + 1], [0])
        samples.append(now_ns() - start)
    del stepper
    free()
    return samples


def row_of(test: dict[str, Any], bench: Bench, samples: list[int]) -> Row:
    rates = [1e9 * (test["n_prompt"] + test["n_gen"]) / ns for ns in samples]
    file: GGUFFile = bench.file
    return {
        **test,
        "build_commit": f"ggufspec-{__version__}", "build_number": 0, "cpu_info": cpu_name(),
        "gpu_info": ", ".join(gpus()), "backends": "CPU" if bench.model.device.type == "cpu" else "CUDA",
        "model_type": model_type(file), "model_size": file.n_bytes,
        "model_n_params": sum(t.n_elements for t in file.tensors.values()),
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(statistics.mean(samples)), "stddev_ns": round(deviation(samples)),
        "avg_ts": statistics.mean(rates), "stddev_ts": deviation(rates), "samples_ns": samples, "samples_ts": rates,
    }  # fmt: skip


def deviation(values: list[Any]) -> float:
    """The sample standard deviation, 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
