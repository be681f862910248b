"""What the parts of `measure.py` share: files, sizes, models that stay loaded, and tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggufspec import bundled
from ggufspec.sampling import SamplingParams
from ggufspec.tools.bench import spec_table
from ggufspec.tools.bench.attach import Bench, DrafterChoice, parse_drafter
from ggufspec.tools.bench.origin import origin
from ggufspec.tools.bench.spec import Plan
from ggufspec.tools.bench.workloads import choose, encode, own_prompts
from ggufspec.tools.settings import ModelSettings, Settings

Data = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows under a title. A part that yields a title again has more rows for it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Parts go on adding to the lists they hand over."""
        object.__setattr__(self, "heads", tuple(self.heads))
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))

    def text(self) -> str:
        return spec_table.grid(self.heads, self.rows, self.title)

    def after(self, before: Table) -> Table:
        """What is to be shown when `before` has been: the new rows, or all where old ones have changed."""
        n = len(before.rows)
        is_longer = self.heads == before.heads and self.rows[:n] == before.rows
        return Table("", self.heads, self.rows[n:]) if is_longer else self

    def markdown(self) -> str:
        """The title and a pipe table; `|` inside cells is escaped."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        filled = [[*row, *[""] * (len(self.heads) - len(row))] for row in self.rows]
        return "\n".join([self.title, "", line(self.heads), "|" + "---|" * len(self.heads), *map(line, filled)])


Said = str | Table


@dataclass
class Session:
    """Files and sizes of a run; models that are loaded stay."""

    options: argparse.Namespace
    is_bundled: bool  # the trained family instead of the files named

    def __post_init__(self) -> None:
        self.is_smoke: bool = self.options.smoke
        self.out = Path(self.options.out)
        names = ("target", "q8", "dspark", "dflash2")
        self.paths = {name: str(getattr(self.options, name)) for name in names}
        if self.is_bundled:
            own = {"target": bundled.target_path(), "q8": bundled.target_path()}
            self.paths = {name: str(own.get(name) or bundled.path(name)) for name in names}
        self.loaded: dict[str, Bench] = {}
        self.kept: dict[str, list[Data]] = {}  # of the server without drafts, for parts to come

    def size(self, real: int, smoke: int) -> int:
        return smoke if self.is_smoke else real

    def bench(self, n_slots: int, n_ctx: int, path: str | None = None) -> Bench:
        path = path or self.paths["target"]
        if path not in self.loaded:
            settings = Settings(model=ModelSettings(path=path))
            start = time.perf_counter()
            self.loaded[path] = Bench.load(settings, 1, 256, show_progress=False)
            print(f"{path}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        return replace(self.loaded[path], n_slots=n_slots, n_ctx=n_ctx)

    def drafter(self, text: str) -> DrafterChoice:
        name, sign, rest = text.partition(",")
        file = f"={self.paths[name]}" if name in self.paths else ""
        return parse_drafter(name + file + sign + rest)

    def plan(self, bench: Bench, drafters: Sequence[str], **changes: Any) -> Plan:
        prompts = choose(own_prompts(), changes.pop("workloads", ["code"]), changes.pop("n_prompts", 1))
        ids = {k: [encode(p, bench.tokenizer, bench.file.metadata) for p in v] for k, v in prompts.items()}
        values: dict[str, Any] = dict(
            n_max=[], temperatures=[0.0], streams=[1], prompts=ids, n_tokens=self.size(256, 12),
            n_repetitions=self.size(3, 1), sampling=SamplingParams(temperature=0.0, seed=1), ignore_eos=True,
        )  # fmt: skip
        return Plan([self.drafter(d) for d in drafters], **(values | changes))

    def facts(self) -> Data:
        """Machine and versions; large files are named by their sizes, since hashing takes longer than measuring."""
        files = [Path(path) for path in dict.fromkeys(self.paths.values()) if Path(path).exists()]
        found = [{"name": f.name, "bytes": f.stat().st_size, "sha256": "not taken"} for f in files]
        return {**origin([]), "files": found}
