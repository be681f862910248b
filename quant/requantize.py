"""File to file: plan the type of every tensor, then stream the tensors through the converter into a new file.

    plan = make_plan(open_gguf("model-Q8_0.gguf"), Options(Choices(file_type("Q4_K_M")), allow_requantize=True))
    summary = run_plan(plan, "model-Q4_K_M.gguf", n_workers=8)

Everything that can be refused is refused by `make_plan`, before a byte is written, except what only the data can
show (NaN, infinity) and what the disk says. A tensor is never in memory as a whole.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ggufspec.errors import ConfigError, FileError
from ggufspec.gguf_file import GGUFFile
from ggufspec.gguf_header import TensorInfo
from ggufspec.gguf_write import Entry, Key, keys_of, shard_name, write_gguf, write_split
from ggufspec.quant import layouts, policy
from ggufspec.quant.convert import Task
from ggufspec.quant.imatrix import Imatrix, importance_of
from ggufspec.quant.pool import N_GPU_THREADS, converted

QUANTIZATION_VERSION = 2
IN_FLIGHT_BYTES = 1 << 30  # tensor data in memory at once, however many workers there are
MAX_TEXT = 127  # bytes of a text in a key override, llama-quantize's limit


@dataclass(frozen=True)
class Options:
    """What to make of a file. `overrides` are keys set at the end; `prune` lists blocks to drop."""

    choices: policy.Choices
    allow_requantize: bool = False
    keep_split: bool = False
    imatrix: Imatrix | None = None
    overrides: tuple[Key, ...] = ()
    prune: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output. `importance` is float32 [experts, columns] or None."""

    info: TensorInfo
    name: str
    decision: policy.Decision
    importance: np.ndarray | None

    @property
    def target(self) -> str:
        return self.decision.type_name

    @property
    def is_converted(self) -> bool:
        return self.target != self.info.type_name

    @property
    def entry(self) -> Entry:
        shape = self.info.shape
        while len(shape) > 1 and shape[0] == 1:  # llama.cpp writes [1, n] as [n]
            shape = shape[1:]
        return Entry(self.name, shape, layouts.BY_NAME[self.target])


@dataclass(frozen=True)
class Plan:
    """The output: its keys and tensors, in order."""

    file: GGUFFile
    options: Options
    keys: list[Key]
    tensors: list[TensorPlan]
    missing_imatrix: list[str] = field(default_factory=list)  # tensors that llama.cpp refuses without one

    @property
    def n_bytes_in(self) -> int:
        return sum(t.info.n_bytes for t in self.tensors)

    @property
    def n_bytes_out(self) -> int:
        return sum(t.entry.n_bytes for t in self.tensors)

    @property
    def n_elements(self) -> int:
        return sum(t.info.n_elements for t in self.tensors)

    def by_type(self) -> list[tuple[str, int, int, int]]:
        """(type, tensors, elements, bytes) of the output, largest first."""
        rows: dict[str, list[int]] = {}
        for t in self.tensors:
            row = rows.setdefault(t.target, [0, 0, 0])
            row[0] += 1
            row[1] += t.info.n_elements
            row[2] += t.entry.n_bytes
        return sorted(((k, *v) for k, v in rows.items()), key=lambda r: -r[3])  # type: ignore[misc]


@dataclass(frozen=True)
class Summary:
    """What a run wrote. `seconds` counts from the first read to the rename."""

    paths: list[Path]
    n_bytes: int
    seconds: float


def make_plan(file: GGUFFile, options: Options, *, dry_run: bool = False) -> Plan:
    """Decide everything about the output of `file`. Raises ConfigError, FileError or UnsupportedError.

    A dry run plans what a real run would refuse: requantizing, and types that need an importance matrix.
    """
    sources, names = _pruned(file, options)
    facts = _facts(file)
    renamed = [_renamed(info, names[info.name]) for info in sources]
    decisions = policy.decide(renamed, facts, options.choices)
    tensors = [
        TensorPlan(info, names[info.name], decision, _importance(info, decision, options))
        for info, decision in zip(sources, decisions)
    ]
    needy = [] if options.imatrix else [
        t.name for t in tensors if policy.needs_imatrix(t.name, t.target, options.choices)
    ]
    _check(file, tensors, needy if not dry_run else [], options, dry_run)
    return Plan(file, options, _keys(file, options, len(_blocks(names.values()))), tensors, needy)


def _check(file: GGUFFile, tensors: list[TensorPlan], needy: list[str], options: Options, dry_run: bool) -> None:
    for t in tensors:
        source = t.info.layout  # a type that nothing here knows is refused, also where it would only be copied
        if not t.is_converted:
            continue
        target = layouts.BY_NAME[t.target]
        if source.is_quantized and not options.allow_requantize and not dry_run:
            raise ConfigError(
                f"{file.path}: tensor {t.info.name!r}: requantizing from type {shown_type(source.name)} is disabled; "
                "start from an F16/BF16/F32 file, or accept the loss with --allow-requantize"
            )
        if source.name not in policy.GUESSED:
            raise ConfigError(f"{file.path}: tensor {t.info.name!r} cannot be converted from {source.name}")
        if t.info.columns % target.n_elements:
            raise ConfigError(
                f"{file.path}: tensor {t.info.name!r} has rows of {t.info.columns} elements, not a multiple of "
                f"{target.n_elements}: it cannot have the type {t.target} asked for it"
            )
    if needy:
        raise ConfigError(
            f"{file.path}: tensor {needy[0]!r}: this quantization requires an imatrix! Give one with --imatrix"
        )


def _importance(info: TensorInfo, decision: policy.Decision, options: Options) -> np.ndarray | None:
    if options.imatrix is None or decision.kept or decision.type_name in policy.PLAIN:
        return None
    n_matrices = info.shape[-3] if len(info.shape) > 2 else 1
    return importance_of(options.imatrix, info.name, info.columns, n_matrices)


def _facts(file: GGUFFile) -> policy.Facts:
    def first(suffix: str, default: int) -> int:
        value = file.metadata.get(file.key(suffix), default)
        return int(value if np.ndim(value) == 0 else value[0])

    heads = first("attention.head_count", 0)
    kv_heads = first("attention.head_count_kv", heads)
    return policy.Facts(
        architecture=file.architecture,
        n_blocks=first("block_count", 0),
        n_gqa=heads // kv_heads if kv_heads else 0,
        n_experts=first("expert_count", 0),
        has_gqa=heads != kv_heads,
    )


def _renamed(info: TensorInfo, name: str) -> TensorInfo:
    return TensorInfo(name, info.shape, info.type_id, info.offset, info.n_bytes, info.shard)


def _blocks(names: Any) -> set[int]:
    return {int(m[1]) for name in names if (m := re.match(r"blk\.(\d+)\.", name))}


def _pruned(file: GGUFFile, options: Options) -> tuple[list[TensorInfo], dict[str, str]]:
    """The tensors that stay, in visiting order, and their names in the output by their names in the input."""
    order = policy.visiting_order(file.tensors)
    present = sorted(_blocks(order))
    for block in options.prune:
        if block not in present:
            raise ConfigError(f"{file.path}: block {block} is to be pruned, but the file has blocks {_span(present)}")
    numbers = {old: new for new, old in enumerate(b for b in present if b not in options.prune)}
    names: dict[str, str] = {}
    for name in order:
        match = re.match(r"blk\.(\d+)\.", name)
        if not match or not options.prune:
            names[name] = name
        elif int(match[1]) in numbers:
            names[name] = f"blk.{numbers[int(match[1])]}.{name[match.end():]}"
    if options.keep_split:
        order = sorted(file.tensors, key=lambda n: (file.tensors[n].shard, file.tensors[n].offset))
    return [file.tensors[name] for name in order if name in names], names


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"


def _keys(file: GGUFFile, options: Options, n_blocks: int) -> list[Key]:
    """The input's keys without split.*; then, each moved to the end: version, file type, overrides."""
    keys = {key.name: key for key in keys_of(file) if not key.name.startswith("split.")}

    def put(key: Key) -> None:
        keys.pop(key.name, None)
        keys[key.name] = key

    put(Key("general.quantization_version", "u32", QUANTIZATION_VERSION))
    put(Key("general.file_type", "u32", _file_type_number(file, options)))
    for key in (*options.overrides, *_imatrix_keys(options.imatrix)):
        put(key)
    if options.prune:
        put(Key(file.key("block_count"), "u32", n_blocks))
        # Blocks at the end are MTP blocks as far as this key says so: without them it would take trunk blocks for them.
        nextn = file.key("nextn_predict_layers")
        count, first = int(file.metadata.get(nextn, 0)), int(file.metadata.get(file.key("block_count"), 0))
        n_gone = sum(block >= first - count for block in set(options.prune)) if count else 0
        if n_gone:
            keys[nextn] = Key(nextn, "u32", count - n_gone)
    return list(keys.values())


def _file_type_number(file: GGUFFile, options: Options) -> int:
    if options.choices.file_type is not policy.COPY:
        return options.choices.file_type.id
    if "general.file_type" in file.metadata:
        return file.get("general.file_type", int)
    counts = Counter(file.tensors[name].type_name for name in policy.visiting_order(file.tensors))
    commonest = counts.most_common(1)[0][0]
    return policy.GUESSED.get(commonest, 0) + policy.GUESSED_FLAG


def _imatrix_keys(matrix: Imatrix | None) -> list[Key]:
    if matrix is None:
        return []
    keys = [Key("quantize.imatrix.file", "str", _limited(matrix.file))]
    if matrix.dataset is not None:
        keys.append(Key("quantize.imatrix.dataset", "str", _limited(matrix.dataset)))
    keys.append(Key("quantize.imatrix.entries_count", "u32", len(matrix.values)))
    if matrix.n_chunks > 0:
        keys.append(Key("quantize.imatrix.chunks_count", "u32", matrix.n_chunks))
    return keys


def _limited(text: str) -> str:
    return text.encode()[:MAX_TEXT].decode(errors="ignore")


def shown_type(type_name: str) -> str:
    """A type's name the way llama.cpp prints it: q4_0, q6_K."""
    return type_name.lower().replace("_k", "_K")


def output_paths(plan: Plan, out: str | os.PathLike[str]) -> list[Path]:
    """The files a run will write. With `keep_split`, `out` is the prefix, with or without `.gguf`."""
    if not plan.options.keep_split:
        return [Path(out)]
    n_shards = 1 + max(t.info.shard for t in plan.tensors)
    prefix = os.fspath(out).removesuffix(".gguf")
    return [Path(shard_name(prefix, i, n_shards)) for i in range(n_shards)]


def run_plan(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    n_workers: int = 1,
    device: str = "cpu",
    max_buffer_bytes: int = 1 << 33,
    on_tensor: Callable[[int, TensorPlan], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Summary:
    """Write the output of a plan: all of it, or nothing. The bytes do not depend on `n_workers` or `device`.

    `max_buffer_bytes` bounds the tensor data in flight. `on_tensor` is called before a tensor is written,
    `on_bytes` with the number of input bytes done since the last call. Raises ConfigError if the output is an
    input, FileError if data or disk are bad.
    """
    paths = output_paths(plan, out)
    inputs = {os.path.realpath(shard) for shard in plan.file.shards}
    for path in paths:
        if os.path.realpath(path) in inputs or _same_file(path, plan.file.shards):
            raise ConfigError(f"error: input and output files are the same: '{path}'; choose another output name")
    start = time.perf_counter()
    _check_space(plan, paths[0])
    n_elements = _task_elements(n_workers, device, max_buffer_bytes)
    chunks = _chunks(plan, n_workers, device, n_elements, on_tensor, on_bytes)
    entries = [t.entry for t in plan.tensors]
    if plan.options.keep_split:
        shards: list[list[Entry]] = [[] for _ in paths]
        for t, entry in zip(plan.tensors, entries):
            shards[t.info.shard].append(entry)
        n_bytes = write_split(os.fspath(out).removesuffix(".gguf"), plan.keys, shards, chunks)
    else:
        n_bytes = write_gguf(out, plan.keys, entries, chunks)
    return Summary(paths, n_bytes, time.perf_counter() - start)


def _same_file(path: Path, others: Sequence[Path]) -> bool:
    return path.exists() and any(path.samefile(other) for other in others)


def _chunks(
    plan: Plan, n_workers: int, device: str, n_elements: int,
    on_tensor: Callable[[int, TensorPlan], None] | None, on_bytes: Callable[[int], None] | None,
) -> Iterator[np.ndarray]:  # fmt: skip
    """The encoded bytes of all tensors, in order."""
    tasks: list[Task] = []
    starts: dict[int, int] = {}  # number of a tensor's first task -> number of the tensor
    for i, t in enumerate(plan.tensors):
        starts[len(tasks)] = i
        tasks.extend(_tasks(t, str(plan.file.shards[t.info.shard]), n_elements))
    results = converted(tasks, n_workers, device)
    try:
        for number, (task, chunk) in enumerate(zip(tasks, results)):
            if on_tensor and number in starts:
                on_tensor(starts[number], plan.tensors[starts[number]])
            yield chunk
            if on_bytes:
                on_bytes(task.n_bytes)
    finally:
        results.close()


def _check_space(plan: Plan, path: Path) -> None:
    """Refuse at once what would fill the disk; a disk that others fill meanwhile is met when writing."""
    folder = path.parent
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < plan.n_bytes_out:
        raise FileError(f"{path}: needs {plan.n_bytes_out >> 20} MiB, but {folder} has {free >> 20} MiB free")


def _task_elements(n_workers: int, device: str, max_buffer_bytes: int) -> int:
    """Elements of a task. A task on the CPU holds its input, float32 numbers and output, about 12 bytes an element;
    on a GPU only input and output lie in the host's memory. Finished tasks wait for the writer."""
    on_cpu = device == "cpu"
    in_flight, n_bytes = (3 * n_workers + 2, 12) if on_cpu else (2 * (N_GPU_THREADS + 1), 5)
    budget = min(max_buffer_bytes, IN_FLIGHT_BYTES) // (n_bytes * in_flight)
    return max(1, min(budget, 1 << 20 if on_cpu else 1 << 26))


def _tasks(t: TensorPlan, path: str, n_elements: int) -> Iterator[Task]:
    """Cut a tensor into tasks of whole rows, none of which reaches over two experts."""
    info = t.info
    n_matrices = 1 if t.importance is None else len(t.importance)
    rows_each = info.rows // n_matrices
    step = max(1, n_elements // info.columns)
    for m in range(n_matrices):
        importance = None if t.importance is None else t.importance[m]
        for row in range(0, rows_each, step):
            first, n_rows = m * rows_each + row, min(step, rows_each - row)
            yield Task(
                path, info.name, info.offset + first * info.row_bytes, n_rows * info.row_bytes, first,
                info.columns, info.type_name, t.target, importance,
            )  # fmt: skip
