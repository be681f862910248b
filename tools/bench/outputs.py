"""llama-bench's output formats: rows that its readers can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .tests_options import BY_FIELD, Options

# field: type
FIELDS: dict[str, str] = {
    "build_commit": "TEXT", "build_number": "INTEGER", "cpu_info": "TEXT", "gpu_info": "TEXT", "backends": "TEXT",
    "model_filename": "TEXT", "model_type": "TEXT", "model_size": "INTEGER", "model_n_params": "INTEGER",
    "n_batch": "INTEGER", "n_ubatch": "INTEGER", "n_threads": "INTEGER", "cpu_mask": "TEXT", "cpu_strict": "BOOL",
    "poll": "INTEGER", "type_k": "TEXT", "type_v": "TEXT", "n_gpu_layers": "INTEGER", "n_cpu_moe": "INTEGER",
    "split_mode": "TEXT", "main_gpu": "INTEGER", "no_kv_offload": "BOOL", "flash_attn": "INTEGER", "devices": "TEXT",
    "tensor_split": "TEXT", "tensor_buft_overrides": "TEXT", "load_mode": "TEXT", "lazy_mode": "TEXT",
    "embeddings": "BOOL", "no_op_offload": "INTEGER", "no_host": "BOOL", "repack": "BOOL", "fit_target": "TEXT",
    "fit_min_ctx": "INTEGER", "n_prompt": "INTEGER", "n_gen": "INTEGER", "n_depth": "INTEGER", "test_time": "TEXT",
    "avg_ns": "INTEGER", "stddev_ns": "INTEGER", "avg_ts": "REAL", "stddev_ts": "REAL",
}  # fmt: skip
SAMPLES = ("samples_ns", "samples_ts")
# columns of the markdown table that stand only where the option differs from its default or has several values
OPTIONAL = (
    "n_cpu_moe", "n_threads", "cpu_mask", "cpu_strict", "poll", "n_batch", "n_ubatch", "type_k", "type_v", "main_gpu",
    "split_mode", "no_kv_offload", "flash_attn", "devices", "tensor_split", "tensor_buft_overrides", "load_mode",
    "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx",
)  # fmt: skip
WIDTHS = {
    "model": -30, "size": 10, "params": 10, "t/s": 20, "test": 15, "n_gpu_layers": 3, "n_threads": 7, "n_batch": 7,
    "n_ubatch": 8, "type_k": 6, "type_v": 6, "split_mode": 5, "flash_attn": 2, "devices": -12, "no_op_offload": 4,
}  # fmt: skip
Row = dict[str, Any]


def value_of(row: Row, name: str) -> Any:
    """As JSON has it."""
    value = row[name]
    if FIELDS.get(name) == "BOOL":
        return bool(value)
    return split_text(value) if name == "tensor_split" else value


def text_of(row: Row, name: str) -> str:
    """As csv and sql have it: flags are 0 or 1."""
    value = value_of(row, name)
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def split_text(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.2f}" for share in shares) if shares else "0.00"


class Printer:
    """`header`, one `row` a test, `footer`."""

    def __init__(self, file: TextIO, options: Options, is_cpu: bool):
        self.file, self.options, self.is_cpu = file, options, is_cpu

    def write(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def header(self) -> None: ...

    def row(self, row: Row) -> None:
        raise NotImplementedError

    def footer(self, row: Row | None) -> None: ...


class Csv(Printer):
    def header(self) -> None:
        self.write(",".join(FIELDS))

    def row(self, row: Row) -> None:
        quoted = ['"' + text_of(row, name).replace('"', '""') + '"' for name in FIELDS]
        self.write(",".join(quoted))


def as_object(row: Row) -> Row:
    return {name: value_of(row, name) for name in FIELDS} | {name: row[name] for name in SAMPLES}


class JsonLines(Printer):
    def row(self, row: Row) -> None:
        self.write(json.dumps(as_object(row)))


class Json(Printer):
    n_rows = 0

    def header(self) -> None:
        self.write("[")

    def row(self, row: Row) -> None:
        self.file.write(",\n" if self.n_rows else "")
        self.file.write("\n".join("  " + line for line in json.dumps(as_object(row), indent=2).splitlines()))
        self.file.flush()
        self.n_rows += 1

    def footer(self, row: Row | None) -> None:
        self.write("\n]")


class Sql(Printer):
    def header(self) -> None:
        types = [f"  {name} {'INTEGER' if kind == 'BOOL' else kind}" for name, kind in FIELDS.items()]
        self.write("CREATE TABLE IF NOT EXISTS llama_bench (\n" + ",\n".join(types) + "\n);\n")

    def row(self, row: Row) -> None:
        values = ", ".join("'" + text_of(row, name).replace("'", "''") + "'" for name in FIELDS)
        self.write(f"INSERT INTO llama_bench ({', '.join(FIELDS)}) VALUES ({values});")


class Markdown(Printer):
    def columns(self) -> list[str]:
        shown = ["model", "size", "params", "backend"]
        if not self.is_cpu:
            shown.append("n_gpu_layers")
        values = self.options.values
        for name in OPTIONAL:
            differs = len(values[name]) > 1 or (name != "n_threads" and values[name] != [BY_FIELD[name].default])
            if differs or (name == "n_threads" and self.is_cpu):
                shown.append(name)
        return [*shown, "test", "t/s"]

    def width(self, name: str) -> int:
        if name in WIDTHS:
            return WIDTHS[name]
        return max(len(name), 10) * (-1 if FIELDS.get(name, "TEXT") == "TEXT" else 1)

    def line(self, cells: Sequence[str]) -> None:
        widths = [self.width(name) for name in self.columns()]
        self.write("|" + "".join(f" {c.ljust(-w) if w < 0 else c.rjust(w)} |" for c, w in zip(cells, widths)))

    def header(self) -> None:
        names = self.columns()
        self.line([BY_FIELD[n].column or n if n in BY_FIELD else n for n in names])
        widths = [self.width(name) for name in names]
        self.write("|" + "".join(f" {'-' * (abs(w) - 1)}{':' if w > 0 else '-'} |" for w in widths))

    def row(self, row: Row) -> None:
        shown = {
            "model": row["model_type"], "size": size_text(row["model_size"]),
            "params": params_text(row["model_n_params"]), "backend": row["backends"], "test": test_text(row),
            "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        }  # fmt: skip
        self.line([str(shown[name]) if name in shown else text_of(row, name) for name in self.columns()])

    def footer(self, row: Row | None) -> None:
        if row is not None:
            self.write(f"\nbuild: {row['build_commit']} ({row['build_number']})")


PRINTERS: dict[str, Callable[[TextIO, Options, bool], Printer]] = {
    "csv": Csv, "json": Json, "jsonl": JsonLines, "md": Markdown, "sql": Sql,
}  # fmt: skip


def test_text(row: Row) -> str:
    n_prompt, n_gen = row["n_prompt"], row["n_gen"]
    name = "+".join([f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0))
    return name + (f" @ d{row['n_depth']}" if row["n_depth"] > 0 else "")


test_text.__test__ = False  # type: ignore[attr-defined]


def size_text(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def params_text(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"
