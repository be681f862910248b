"""`ggufspec inspect`: what a GGUF file holds, for people and, with `--json`, for programs."""

import json
import math
from collections import Counter
from typing import Any

import click
import numpy as np

from ggufspec.gguf_file import GGUFFile, TensorInfo, open_gguf

MAX_ITEMS, MAX_TEXT = 8, 100  # what is shown of an array and of a text without --full


@click.command(name="inspect")
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--full", is_flag=True, help="Show whole arrays and texts.")
@click.option("--tensors/--no-tensors", default=True, help="List the tensors (on).")
def command(file: str, as_json: bool, full: bool, tensors: bool) -> None:
    """Show the metadata and tensors of FILE, a GGUF file or the first shard of a split one.

    Nothing but the header is read. Shapes are in row-major order: the last number is the length of a row.
    Files with tensor types that can't be run are shown as well.
    """
    opened = open_gguf(file)
    if as_json:
        click.echo(json.dumps(as_object(opened), ensure_ascii=False, allow_nan=False))
        return
    for line in summary(opened):
        click.echo(line)
    click.echo()
    _table(
        ["key", "type", "value"],
        [[_printable(key), opened.types[key], shown_value(opened, key, full)] for key in opened.metadata],
    )
    if tensors and opened.tensors:
        click.echo()
        _table(["tensor", "type", "shape", "size"], [_tensor_row(tensor) for tensor in opened.tensors.values()])


def as_object(file: GGUFFile) -> dict[str, Any]:
    """Everything `--json` prints. Numbers that JSON has no form for become the texts NaN, Infinity,
    -Infinity.
    """
    n_parameters = sum(tensor.n_elements for tensor in file.tensors.values())
    return {
        "path": str(file.path),
        "shards": [str(path) for path in file.shards],
        "version": file.version,
        "alignment": file.alignment,
        "architecture": _architecture(file),
        "n_parameters": n_parameters,
        "n_bytes": file.n_bytes,
        "bits_per_weight": 8 * file.n_bytes / n_parameters if n_parameters else None,
        "metadata": {
            key: {"type": file.types[key], "value": _plain(value, file.types[key])}
            for key, value in file.metadata.items()
        },
        "tensors": [
            {
                "name": tensor.name,
                "type": tensor.type_name,
                "supported": tensor.is_supported,
                "shape": list(tensor.shape),
                "shard": tensor.shard,
                "offset": tensor.offset,
                "n_bytes": tensor.n_bytes,
            }
            for tensor in file.tensors.values()
        ],
    }


def summary(file: GGUFFile) -> list[str]:
    """The lines above the tables: what kind of file, how large, which tensor types."""
    architecture = _architecture(file) or "no architecture"
    lines = [f"{file.path}: GGUF version {file.version}, {_printable(architecture)}"]
    if len(file.shards) > 1:
        lines.append(f"{len(file.shards)} shards: {file.shards[0].name} to {file.shards[-1].name}")
    n_parameters = sum(tensor.n_elements for tensor in file.tensors.values())
    if n_parameters:
        bits = 8 * file.n_bytes / n_parameters
        lines.append(
            f"{len(file.tensors)} tensors, {_count(n_parameters)} parameters, {_bytes(file.n_bytes)}, "
            f"{bits:.2f} bits per weight"
        )
    types: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    supported = {tensor.type_name: tensor.is_supported for tensor in file.tensors.values()}
    for tensor in file.tensors.values():
        types[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.n_bytes
    for name, n_bytes in sizes.most_common():
        note = "" if supported[name] else "  (not supported)"
        lines.append(f"  {name:<8} {types[name]:>5} tensors  {_bytes(n_bytes):>10}{note}")
    return lines


def shown_value(file: GGUFFile, key: str, full: bool = False) -> str:
    """A value on one line, cut to what a table can hold unless `full`. Control characters are escaped."""
    value, kind = file.metadata[key], file.types[key]
    if not kind.startswith("arr["):
        text = _scalar(value, kind)
        return text if full or len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"
    element, n = kind[4:-1], len(value)
    items = [_scalar(item, element, quote=True) for item in (value if full else value[:MAX_ITEMS])]
    more = f", … ({n} elements)" if n > len(items) else ""
    return f"[{', '.join(items)}{more}]"


def _scalar(value: Any, kind: str, quote: bool = False) -> str:
    if kind == "str":
        return _printable(json.dumps(value, ensure_ascii=False) if quote else value)
    if kind == "bool":
        return "true" if value else "false"
    return str(_plain(value, kind))


def _plain(value: Any, kind: str) -> Any:
    """A value as JSON's types; a 32-bit float by its shortest text (1e-06, not 9.999999974752427e-07)."""
    if kind.startswith("arr["):
        return [_plain(item, kind[4:-1]) for item in value]
    if kind in ("f32", "f64"):
        number = float(value)
        if math.isnan(number):
            return "NaN"
        if math.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        return float(str(np.float32(value))) if kind == "f32" else number
    if kind == "bool":
        return bool(value)
    return value if kind == "str" else int(value)


def _architecture(file: GGUFFile) -> str | None:
    """Unlike the loader, this shows files whose architecture is missing or of a wrong type."""
    value = file.metadata.get("general.architecture")
    return value if isinstance(value, str) else None


def _tensor_row(tensor: TensorInfo) -> list[str]:
    note = "" if tensor.is_supported else " (not supported)"
    shape = " x ".join(map(str, tensor.shape))
    return [_printable(tensor.name), tensor.type_name + note, shape, _bytes(tensor.n_bytes)]


def _table(head: list[str], rows: list[list[str]]) -> None:
    """Columns padded to their widest entry, the last one as it is."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    for row in [head, *rows]:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())


def _printable(text: str) -> str:
    """Text that can't move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def _count(n: int) -> str:
    for unit, size in ((" G", 10**9), (" M", 10**6)):
        if n >= size:
            return f"{n / size:.2f}{unit}"
    return str(n)
