"""llama-bench's options: most take several values, and every combination is a test."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ggufspec.errors import ConfigError
from ggufspec.tools import option_values as read

from . import lists

FORMATS = ("csv", "json", "jsonl", "md", "sql")
_FLASH = {"auto": -1, "-1": -1, "on": 1, "1": 1, "off": 0, "0": 0}
_ONE_WAY = "weights are read once into the memory of their device"
_NO_THREADS = "PyTorch schedules its own threads; -t sets how many"
_NO_FIT = "what does not fit is an error; ggufspec plan says what does"
_OTHER = "an operation runs where its weights are"


@dataclass(frozen=True)
class Parameter:
    """An option with several values. `field` is its name in the output, `column` the one in the markdown table."""

    names: tuple[str, ...]
    field: str
    default: Any
    parse: Callable[[str, str], list[Any]]
    help: str
    column: str = ""
    refused: Callable[[Any], str] | None = None  # why a value cannot be had, or ""
    no_effect: str = ""  # why values other than the default change nothing here


def texts(separator: str = ",") -> Callable[[str, str], list[str]]:
    return lambda text, name: text.split(separator)


def switches(text: str, name: str) -> list[int]:
    return [_word(part, {"0": 0, "1": 1}, name) for part in text.split(",")]


def flash(text: str, name: str) -> list[int]:
    return [_word(part, _FLASH, name) for part in text.split(",")]


def modes(text: str, name: str) -> list[str]:
    return [_word(part, {m: m for m in ("none", "layer", "row", "tensor")}, name) for part in text.split(",")]


def splits(text: str, name: str) -> list[tuple[float, ...]]:
    out = []
    for part in text.split(","):
        try:
            shares = read.tensor_split(part.replace(";", "/"))
        except ValueError as error:
            raise ConfigError(f"error: invalid parameter for argument: {name}: {error}") from None
        if isinstance(shares, str):
            raise ConfigError(f"error: invalid parameter for argument: {name}: {part!r}; expected shares such as 3/1")
        out.append(shares)
    return out


def layers(text: str, name: str) -> list[int]:
    return [n for part in text.split(",") for n in ([-1] if part in ("auto", "all") else lists.integers(part, name))]


def _word(text: str, known: dict[str, Any], name: str) -> Any:
    if text not in known:
        raise ConfigError(
            f"error: invalid parameter for argument: {name}: {text!r}; expected one of {', '.join(known)}"
        )
    return known[text]


def only_off(reason: str) -> Callable[[Any], str]:
    return lambda value: "" if value in (0, "none", "") else reason


# in the order of llama-bench's loops, the outermost first
PARAMETERS = (
    Parameter(("-m", "--model"), "model_filename", None, texts(), "GGUF file (default: the bundled model)"),
    Parameter(("-ngl", "--n-gpu-layers"), "n_gpu_layers", -1, layers, "layers on the GPU (-1: all)", "ngl"),
    Parameter(("-ncmoe", "--n-cpu-moe"), "n_cpu_moe", 0, lists.integers, "", no_effect="no expert layers here"),
    Parameter(("-sm", "--split-mode"), "split_mode", "layer", modes, "none, layer, row or tensor", "sm"),
    Parameter(("-mg", "--main-gpu"), "main_gpu", 0, lists.integers, "the GPU of -sm none"),
    Parameter(("-dev", "--device"), "devices", "auto", texts(), "GPUs of a test, separated by /", "dev"),
    Parameter(("-ts", "--tensor-split"), "tensor_split", (), splits, "shares of the GPUs, separated by /", "ts"),
    Parameter(("-ot", "--override-tensor"), "tensor_buft_overrides", "none", texts(), "", "ot",
              refused=only_off("whole layers are placed; use -ngl, -ts or -dev")),
    Parameter(("-lm", "--load-mode"), "load_mode", "auto", texts(), "", "lm", no_effect=_ONE_WAY),
    Parameter(("-lzm", "--lazy-mode"), "lazy_mode", "auto", texts(), "", no_effect=_ONE_WAY),
    Parameter(("-embd", "--embeddings"), "embeddings", 0, switches, "", "embd",
              refused=only_off("embeddings are measured like prompts; use -p")),
    Parameter(("-nopo", "--no-op-offload"), "no_op_offload", 0, switches, "", "nopo", no_effect=_OTHER),
    Parameter(("--no-host",), "no_host", 0, switches, "", "noh", no_effect="there are no host buffers to bypass"),
    Parameter(("--repack",), "repack", 1, switches, "", "rpk", no_effect="every device has one weight layout"),
    Parameter(("-b", "--batch-size"), "n_batch", 2048, lists.integers, "most tokens of a prompt chunk"),
    Parameter(("-ub", "--ubatch-size"), "n_ubatch", 512, lists.integers, "most tokens of one forward"),
    Parameter(("-ctk", "--cache-type-k"), "type_k", "f16", texts(), "type of the K cache"),
    Parameter(("-ctv", "--cache-type-v"), "type_v", "f16", texts(), "type of the V cache"),
    Parameter(("-nkvo", "--no-kv-offload"), "no_kv_offload", 0, switches, "", "nkvo",
              refused=only_off("the KV cache lies on the device of its layer")),
    Parameter(("-fa", "--flash-attn"), "flash_attn", -1, flash, "attention over quantized V needs it: on, off, auto",
              "fa"),
    Parameter(("-t", "--threads"), "n_threads", 0, lists.integers, "CPU threads (0: as PyTorch chooses)", "threads"),
    Parameter(("-C", "--cpu-mask"), "cpu_mask", "0x0", texts(), "", no_effect=_NO_THREADS),
    Parameter(("--cpu-strict",), "cpu_strict", 0, switches, "", no_effect=_NO_THREADS),
    Parameter(("--poll",), "poll", 50, lists.integers, "", no_effect=_NO_THREADS),
    Parameter(("-fitt", "--fit-target"), "fit_target", "off", texts(), "", "fitt", no_effect=_NO_FIT),
    Parameter(("-fitc", "--fit-ctx"), "fit_min_ctx", 0, lists.integers, "", "fitc", no_effect=_NO_FIT),
    Parameter(("-d", "--n-depth"), "n_depth", 0, lists.integers, "tokens in the cache before timing"),
    Parameter(("-p", "--n-prompt"), "n_prompt", 512, lists.integers, "prompt test (0: none)"),
    Parameter(("-n", "--n-gen"), "n_gen", 128, lists.integers, "generation test (0: none)"),
)  # fmt: skip
BY_FIELD = {p.field: p for p in PARAMETERS}
BY_NAME = {name: p for p in PARAMETERS for name in p.names}
TESTS = ("n_prompt", "n_gen")


@dataclass
class Options:
    values: dict[str, list[Any]]  # field: values
    pairs: list[tuple[int, int]] = field(default_factory=list)  # -pg
    repetitions: int = 5
    output: str = "md"
    output_err: str = "none"
    delay_s: float = 0.0
    warmup: bool = True
    progress: bool = False
    verbose: bool = False
    action: str = ""  # help, version, list-devices

    def tests(self) -> Iterator[dict[str, Any]]:
        """Every combination, in llama-bench's order: prompts, generations, then pairs."""
        outer = [p.field for p in PARAMETERS if p.field not in TESTS]
        for chosen in itertools.product(*(self.values[name] for name in outer)):
            base = dict(zip(outer, chosen))
            counts = [(p, 0) for p in self.values["n_prompt"] if p] + [(0, n) for n in self.values["n_gen"] if n]
            for n_prompt, n_gen in counts + self.pairs:
                yield {**base, "n_prompt": n_prompt, "n_gen": n_gen}


def parse(args: Sequence[str], warn: Callable[[str], None]) -> Options:
    """ConfigError with llama-bench's wording for what is wrong."""
    found: dict[str, list[Any]] = {}
    options = Options({})
    at = 0
    while at < len(args):
        typed = args[at]
        name = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
        at += 1
        flag = {
            "-h": "help", "--help": "help", "--version": "version", "--list-devices": "list-devices",
            "--no-warmup": "no-warmup", "--progress": "progress", "-v": "verbose", "--verbose": "verbose",
            "--offline": "offline",
        }.get(name)  # fmt: skip
        if flag in ("help", "version", "list-devices"):
            options.action = flag
            return options
        if flag is not None:
            options.warmup &= flag != "no-warmup"
            options.progress |= flag == "progress"
            options.verbose |= flag == "verbose"
            if flag == "offline":
                warn("--offline has no effect here: the network is never used")
            continue
        known = (*BY_NAME, "-pg", "-r", "--repetitions", "-o", "--output", "-oe", "--output-err", "--delay", "--prio",
                 "--numa", "-hf", "-hff", "-hft")  # fmt: skip
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"error: invalid parameter for argument: {typed}" + (
                f" (there is no such option; did you mean {near[0]}?)" if near else " (there is no such option)"
            ))  # fmt: skip
        if at == len(args):
            raise ConfigError(f"error: invalid parameter for argument: {typed} (expected a value)")
        text = args[at]
        at += 1
        if name in BY_NAME:
            _take(BY_NAME[name], text, name, found, warn)
        else:
            _take_single(options, name, text, warn)
    options.values = {p.field: found.get(p.field, [p.default]) for p in PARAMETERS}
    if found.get("n_prompt") is None and found.get("n_gen") is None and options.pairs:
        options.values |= {"n_prompt": [0], "n_gen": [0]}
    options.values["n_threads"] = [n if n > 0 else torch.get_num_threads() for n in options.values["n_threads"]]
    return options


def _take(parameter: Parameter, text: str, name: str, found: dict[str, list[Any]], warn: Callable[[str], None]) -> None:
    values = parameter.parse(text, name)
    for value in values:
        reason = parameter.refused(value) if parameter.refused is not None else ""
        if reason:
            raise ConfigError(f"{name} {text} is not supported: {reason}")
        if parameter.field in ("n_prompt", "n_gen", "n_depth") and value < 0:
            raise ConfigError(f"error: invalid parameter for argument: {name}: {value}; expected 0 or more")
        if parameter.field in ("n_batch", "n_ubatch") and value < 1:
            raise ConfigError(f"error: invalid parameter for argument: {name}: {value}; expected 1 or more")
    if parameter.no_effect and any(value != parameter.default for value in values):
        warn(f"{name} {text} has no effect here: {parameter.no_effect}")
    found.setdefault(parameter.field, []).extend(values)


def _take_single(options: Options, name: str, text: str, warn: Callable[[str], None]) -> None:
    if name == "-pg":
        pair = lists.integers(text, name)
        if len(pair) != 2 or min(pair) < 0:
            raise ConfigError(f"error: invalid parameter for argument: -pg: {text!r}; expected PROMPT,GENERATED")
        options.pairs.append((pair[0], pair[1]))
    elif name in ("-r", "--repetitions"):
        options.repetitions = lists.integers(text, name)[0]
        if options.repetitions < 1:
            raise ConfigError(f"error: invalid parameter for argument: {name}: {text}; expected 1 or more")
    elif name in ("-o", "--output"):
        options.output = _word(text, {f: f for f in FORMATS}, name)
    elif name in ("-oe", "--output-err"):
        options.output_err = _word(text, {f: f for f in (*FORMATS, "none")}, name)
    elif name == "--delay":
        options.delay_s = lists.numbers(text, name)[0]
    elif name in ("-hf", "-hff", "-hft"):
        raise ConfigError(f"{name} is not supported: nothing is downloaded; get the file first and give it with -m")
    else:
        warn(f"{name} has no effect here: {_NO_THREADS if name == '--prio' else 'the operating system places memory'}")


def usage() -> str:
    lines = [
        "usage: ggufspec bench [options]", "",
        "Time prompts and generation with random tokens, as llama-bench does. Options take several values, by comma or",
        "by repeating; integers also ranges: first-last, first-last+step, first-last*factor. All combinations are run.",
        "", "Other benchmarks: ggufspec bench batched | spec | kernels | synth", "",
    ]  # fmt: skip
    for p in PARAMETERS:
        names = ", ".join(p.names)
        default = "" if p.default in (None, ()) or not p.help else f" (default: {p.default})"
        text = p.help or (f"no effect: {p.no_effect}" if p.no_effect else f"only {p.default}: the rest is unsupported")
        lines.append(f"  {names:<28}{text}{default}")
    for names, text in (
        ("-pg PP,TG", "a prompt and then generation in one timed sample; may be repeated"),
        ("-r, --repetitions N", "timed samples of each test (default: 5)"),
        ("-o, --output FORMAT", "csv, json, jsonl, md or sql, to stdout (default: md)"),
        ("-oe, --output-err FORMAT", "the same to stderr (default: none)"),
        ("--delay S", "seconds to wait before each test"),
        ("--no-warmup", "time the first run too"),
        ("--progress", "say on stderr what is running"),
        ("--list-devices, --version", "show these and exit"),
    ):
        lines.append(f"  {names:<28}{text}")
    return "\n".join(lines)
