"""`ggufspec quantize`: convert a GGUF file to another file type, with llama-quantize's options and bytes."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ggufspec.errors import ConfigError, FileError, GgufspecError
from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_write import Key
from ggufspec.quant import policy
from ggufspec.quant.imatrix import Imatrix, read_imatrix
from ggufspec.quant.requantize import MAX_TEXT, Options, Plan, TensorPlan, make_plan, run_plan, shown_type

MIB = 1 << 20
EPILOG = "TYPE is one of " + ", ".join(f"{t.name} ({t.id})" for t in policy.FILE_TYPES) + ", COPY."


class WrongUse(click.UsageError):
    """Exits with 1, like llama-quantize, where click would exit with 2."""

    exit_code = 1


class QuantizeCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise WrongUse(error.format_message(), ctx) from None


def _usage(message: str) -> WrongUse:
    return WrongUse(message, click.get_current_context(silent=True))


@click.command("quantize", cls=QuantizeCommand, epilog=EPILOG)
@click.option("--allow-requantize", is_flag=True, help="Accept an input that is already quantized.")
@click.option("--leave-output-tensor", is_flag=True, help="Keep the type of output.weight.")
@click.option("--pure", is_flag=True, help="Give every quantizable tensor the default type of TYPE.")
@click.option("--imatrix", "imatrix_file", metavar="FILE", help="Importance matrix (GGUF or the older .dat).")
@click.option("--include-weights", multiple=True, metavar="TEXT", help="Use only imatrix entries naming TEXT.")
@click.option("--exclude-weights", multiple=True, metavar="TEXT", help="Drop imatrix entries naming TEXT.")
@click.option("--output-tensor-type", metavar="T", help="Type of output.weight, such as q8_0.")
@click.option("--token-embedding-type", metavar="T", help="Type of token_embd.weight.")
@click.option("--tensor-type", "tensor_types", multiple=True, metavar="REGEX=T",
              help="Type of tensors whose name matches; may be repeated, the first match wins.")
@click.option("--tensor-type-file", metavar="FILE", help="More REGEX=T entries, separated by white space.")
@click.option("--prune-layers", metavar="A,B,...", help="Drop these blocks and renumber the others.")
@click.option("--keep-split", is_flag=True, help="Write as many shards as the input has.")
@click.option("--override-kv", multiple=True, metavar="KEY=TYPE:VALUE",
              help="Set a key; TYPE is int, float, bool or str; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Show each tensor's type and size; write nothing.")
@click.option("--max-buffer-size", type=int, default=8192, show_default=True, metavar="MIB",
              help="Most memory for tensor data in flight.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda or cuda:N.")
@click.argument("words", nargs=-1, metavar="INPUT [OUTPUT] TYPE [NTHREADS]")
def command(words: tuple[str, ...], **options: Any) -> None:
    """Quantize INPUT to the file type TYPE, byte for byte as llama-quantize does.

    Without OUTPUT the result is ggml-model-TYPE.gguf in the input's folder.
    """
    started = time.perf_counter()
    source, out, kind, n_workers = _positionals(words, options["keep_split"])
    if options["max_buffer_size"] <= 0:
        raise _usage(f"--max-buffer-size is {options['max_buffer_size']}, expected a positive number of MiB")
    try:
        matrix = _imatrix(options)
        file = open_gguf(source)
        request = Options(
            _choices(kind, options, matrix), options["allow_requantize"], options["keep_split"], matrix,
            tuple(_override(text) for text in options["override_kv"]), _blocks(options["prune_layers"]),
        )  # fmt: skip
        plan = make_plan(file, request, dry_run=options["dry_run"])
        _show_warnings(plan)
        if options["dry_run"]:
            _show_dry_run(plan)
        else:
            _run(plan, out, n_workers, options["device"], options["max_buffer_size"] * MIB)
    except GgufspecError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"   total time = {1000 * (time.perf_counter() - started):8.2f} ms")


def _positionals(words: tuple[str, ...], keep_split: bool) -> tuple[str, str, str, int]:
    """Input, output, file type and number of workers."""
    if len(words) < 2:
        raise _usage("expected INPUT [OUTPUT] TYPE [NTHREADS]")
    source, rest = words[0], list(words[1:])
    try:
        if policy.is_file_type(rest[0]):
            kind = rest.pop(0)
            suffix = "" if keep_split else ".gguf"
            out = str(Path(source).with_name(f"ggml-model-{policy.display_name(kind)}{suffix}"))
        else:
            out = rest.pop(0)
            if not rest:
                raise _usage(f"missing ftype: {out!r} is no file type, so it is taken for the output")
            kind = rest.pop(0)
            policy.file_type(kind)
    except GgufspecError as error:
        raise _usage(str(error)) from None
    n_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if rest:
        text = rest.pop(0)
        if not text.isdecimal():
            raise _usage(f"invalid nthread '{text}', expected a number")
        n_workers = int(text) or n_workers
    if rest:
        raise _usage(f"unexpected argument {rest[0]!r}; options come before INPUT")
    return source, out, kind, n_workers


def _imatrix(options: dict[str, Any]) -> Imatrix | None:
    include, exclude = options["include_weights"], options["exclude_weights"]
    if options["imatrix_file"] is None:
        if include or exclude:
            raise ConfigError("--include-weights and --exclude-weights need an importance matrix: --imatrix FILE")
        return None
    return read_imatrix(options["imatrix_file"], include, exclude)


def _choices(kind: str, options: dict[str, Any], matrix: Imatrix | None) -> policy.Choices:
    entries = list(options["tensor_types"])
    if path := options["tensor_type_file"]:
        try:
            entries += Path(path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"{path}: cannot be read as a list of REGEX=TYPE entries: {error}") from None

    def asked(name: str) -> str | None:
        return policy.tensor_type(options[name]) if options[name] is not None else None

    return policy.Choices(
        policy.file_type(kind),
        pure=options["pure"],
        leave_output=options["leave_output_tensor"],
        output_type=asked("output_tensor_type"),
        embedding_type=asked("token_embedding_type"),
        patterns=tuple(_pattern(entry) for entry in entries),
        has_imatrix=matrix is not None,
    )


def _pattern(entry: str) -> tuple[re.Pattern[str], str]:
    text, separator, type_name = entry.partition("=")
    if not text or not separator:
        raise ConfigError(f"malformed tensor type {entry!r}, expected REGEX=TYPE, such as ffn_down=q6_K")
    try:
        return re.compile(text.lower()), policy.tensor_type(type_name)
    except re.error as error:
        raise ConfigError(f"tensor type {entry!r}: {text!r} is no regular expression: {error}") from None


def _override(text: str) -> Key:
    name, _, value = text.partition("=")
    kind, separator, value = value.partition(":")
    if not name or not separator or len(name.encode()) > MAX_TEXT:
        raise ConfigError(f"malformed --override-kv {text!r}, expected KEY=TYPE:VALUE")
    try:
        if kind == "int":
            return Key(name, "u32", abs(int(value)))
        if kind == "float":
            return Key(name, "f32", float(value))
    except ValueError:
        raise ConfigError(f"--override-kv {text!r}: {value!r} is no {kind}") from None
    if kind == "bool" and value in ("true", "false"):
        return Key(name, "bool", value == "true")
    if kind == "str" and len(value.encode()) <= MAX_TEXT:
        return Key(name, "str", value)
    raise ConfigError(
        f"--override-kv {text!r}: expected int:N, float:X, bool:true|false, or str:TEXT of at most {MAX_TEXT} bytes"
    )


def _blocks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--prune-layers {text!r}: expected block numbers separated by commas")
    return tuple(sorted({int(part) for part in parts}))


def _run(plan: Plan, out: str, n_workers: int, device: str, max_buffer_bytes: int) -> None:
    started = time.perf_counter()
    with tqdm(total=plan.n_bytes_in, unit="B", unit_scale=True, desc=Path(out).name, disable=None) as bar:

        def show(i: int, t: TensorPlan) -> None:
            line = _tensor_line(plan, i, dry_run=False)
            bar.write(line, file=sys.stdout)

        summary = run_plan(
            plan, out, n_workers=n_workers, device=device, max_buffer_bytes=max_buffer_bytes,
            on_tensor=show, on_bytes=bar.update,
        )  # fmt: skip
    _show_sizes(plan)
    rate = plan.n_bytes_in / 1e6 / summary.seconds
    click.echo(f"wrote {', '.join(map(str, summary.paths))}: {summary.n_bytes} bytes, {rate:.1f} MB/s of input")
    click.echo(f"quantize time = {1000 * (time.perf_counter() - started):8.2f} ms")


def _tensor_line(plan: Plan, index: int, dry_run: bool) -> str:
    """One tensor the way llama-quantize lists it."""
    t = plan.tensors[index]
    ne = [*reversed(t.info.shape), 1, 1, 1][:4]
    line = f"[{index + 1:4d}/{len(plan.tensors):4d}] {t.name:<36s} - [{', '.join(f'{n:6d}' for n in ne)}], "
    line += f"type = {shown_type(t.info.type_name):>6s}, "
    before, after = t.info.n_bytes / MIB, t.entry.n_bytes / MIB
    if not t.is_converted:
        return line + f"size = {before:8.3f} MiB"
    if dry_run:
        return line + f"size = {before:8.2f} MiB -> {after:8.2f} MiB ({shown_type(t.target)})"
    return line + f"converting to {shown_type(t.target)} .. size = {before:8.2f} MiB -> {after:8.2f} MiB"


def _show_warnings(plan: Plan) -> None:
    n_fallbacks = 0
    default = plan.options.choices.file_type.default
    for t in plan.tensors:
        decision = t.decision
        if decision.fell_back:
            n_fallbacks += 1
            click.echo(
                f"warning: {t.name} - ncols {t.info.columns:3d} not divisible by "
                f"{policy.block_elements(decision.wanted):3d} (required for type {shown_type(decision.wanted):>7s})"
                f" -> falling back to {shown_type(t.target):>7s}", err=True,
            )  # fmt: skip
        if decision.by_pattern and decision.wanted != default:
            override = f"{shown_type(default)} -> {shown_type(decision.wanted)}"
            click.echo(f"{t.name:<36s} - applying manual override: {override}", err=True)
        if plan.options.imatrix and t.is_converted and t.importance is None and t.target not in policy.PLAIN:
            click.echo(f"did not find weights for {t.name}", err=True)
    for pattern, _ in plan.options.choices.patterns:
        if not any(pattern.search(t.name) for t in plan.tensors):
            click.echo(f"warning: --tensor-type {pattern.pattern}=...: no tensor has such a name", err=True)
    if n_fallbacks:
        n_decided = sum(not t.decision.kept for t in plan.tensors)
        click.echo(
            f"WARNING: {n_fallbacks} of {n_decided} tensor(s) required fallback quantization", err=True
        )


def _show_dry_run(plan: Plan) -> None:
    for i in range(len(plan.tensors)):
        click.echo(_tensor_line(plan, i, dry_run=True))
    _show_sizes(plan)
    if plan.missing_imatrix:
        click.echo(
            f"WARNING: this quantization requires an imatrix (first for {plan.missing_imatrix[0]}): "
            "without --imatrix the real run will be refused", err=True,
        )  # fmt: skip


def _show_sizes(plan: Plan) -> None:
    """The table of types and the two totals."""
    click.echo(f"{'type':<8s} {'tensors':>8s} {'MiB':>10s} {'BPW':>6s}")
    for name, n_tensors, n_elements, n_bytes in plan.by_type():
        bits = 8 * n_bytes / n_elements
        click.echo(f"{shown_type(name):<8s} {n_tensors:8d} {n_bytes / MIB:10.2f} {bits:6.2f}")
    n_elements = max(plan.n_elements, 1)  # a file of a vocabulary alone has none
    for label, n_bytes in (("model size ", plan.n_bytes_in), ("quant size ", plan.n_bytes_out)):
        click.echo(f"{label} = {n_bytes / MIB:8.2f} MiB ({8 * n_bytes / n_elements:.2f} BPW)")
