"""The page of `bench spec`: one HTML file with its plots inside, made from the JSON beside it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from . import plots
from .origin import lines as origin_lines
from .summary import Spread

Data = dict[str, Any]


def page(data: Data) -> str:
    """HTML of the results as `bench spec --json` writes them. Nothing in it is loaded from elsewhere."""
    source = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        data=data, origin=origin_lines(data["origin"]), figures=[f for f in figures(data) if f[1]],
        spread=spread, columns=COLUMNS,
    )  # fmt: skip


# title, key of a cell, digits; digits None: as it is
COLUMNS = (
    ("drafter", "drafter", None), ("n", "n_max", None), ("temp", "temperature", None), ("streams", "n_streams", None),
    ("workload", "workload", None), ("mean length", "mean_length", 3), ("accept rate", "accept_rate", 3),
    ("draft ms", "draft_ms", 3), ("verify ms", "verify_ms", 3), ("sample ms", "sample_ms", 3),
    ("host ms", "host_ms", 3), ("plain ms/token", "plain_ms_per_token", 3), ("ms/token", "ms_per_token", 3),
    ("decode speedup", "decode_speedup", 3), ("wall speedup", "wall_speedup", 3), ("tok/s", "tokens_per_second", 1),
    ("tok/s a stream", "stream_tokens_per_second", 1), ("parity", "parity", None),
)  # fmt: skip


def spread(value: Any, digits: int | None) -> str:
    if isinstance(value, dict):
        assert digits is not None
        return Spread(**value).text(digits)
    return str(value) if digits is None else f"{value:.{digits}f}"


def figures(data: Data) -> list[tuple[str, str]]:
    """(title, SVG) of every plot that the results have points for."""
    cells = data["cells"]
    if not cells:
        return []
    first = cells[0]
    total = [c for c in cells if c["workload"] == cells[-1]["workload"]]  # "all", or the only workload
    one = [c for c in total if c["temperature"] == first["temperature"] and c["n_streams"] == first["n_streams"]]
    fixed = [c for c in one if isinstance(c["n_max"], int)]
    widest = {c["drafter"]: c for c in sorted(one, key=lambda c: c["n_max"] if isinstance(c["n_max"], int) else 0)}
    quickest: dict[str, Data] = {}
    for cell in one:
        best = quickest.setdefault(cell["drafter"], cell)
        if cell["decode_speedup"]["median"] > best["decode_speedup"]["median"]:
            quickest[cell["drafter"]] = cell
    out = [
        ("Decode speedup against draft length", speedup_by_width(fixed)),
        ("Mean accepted length against draft length",
         plots.lines(by_drafter(fixed, "n_max", lambda c: c["mean_length"]), "drafted tokens a step", "tokens a step")),
        ("Acceptance by position: share of drafts with at least so many tokens right", plots.lines(
            {f"{name} n={c['n_max']}": [(i + 1.0, r) for i, r in enumerate(c["accepted_per_position"])]
             for name, c in widest.items()}, "position", "share")),
        ("A step, ms", step_bars(one)),
        ("Decode speedup by workload, every drafter at its quickest length", workload_bars(cells, quickest, first)),
    ]  # fmt: skip
    if len({c["n_streams"] for c in total}) > 1:
        out.append(("Tokens a second of all streams together", throughput(total, first, "tokens_per_second")))
        out.append(("Tokens a second of one stream among others", throughput(total, first, "stream_tokens_per_second")))
    for entry in data["split"]:
        groups = {phase: entry[phase] for phase in ("draft", "verify", "sample")}
        out.append((f"{entry['drafter']} n={entry['n_max']}, a step in parts, ms ({entry['measured_by']})",
                    plots.bars(groups, "ms a step", stacked=True)))  # fmt: skip
    return out


def by_drafter(cells: list[Data], x: str, y: Any) -> dict[str, list[tuple[float, float]]]:
    out: dict[str, list[tuple[float, float]]] = {}
    for cell in sorted(cells, key=lambda c: c[x]):
        out.setdefault(cell["drafter"], []).append((float(cell[x]), y(cell)))
    return out


def speedup_by_width(cells: list[Data]) -> str:
    series = by_drafter(cells, "n_max", lambda c: c["decode_speedup"]["median"])
    return plots.lines(series, "drafted tokens a step", "times plain decoding", reference=1.0)


def step_bars(cells: list[Data]) -> str:
    if not cells:
        return ""
    groups: dict[str, dict[str, float]] = {"plain": {"verify": cells[0]["plain_step_ms"]["median"]}}
    for cell in cells:
        parts = {name: cell[f"{name}_ms"]["median"] for name in ("verify", "draft", "sample", "host")}
        groups[f"{cell['drafter']} {cell['n_max']}"] = {k: max(v, 0.0) for k, v in parts.items()}
    return plots.bars(groups, "ms a step", stacked=True)


def workload_bars(cells: list[Data], chosen: dict[str, Data], first: Data) -> str:
    groups: dict[str, dict[str, float]] = {}
    for cell in cells:
        same = cell["temperature"] == first["temperature"] and cell["n_streams"] == first["n_streams"]
        if same and cell["n_max"] == chosen[cell["drafter"]]["n_max"]:
            name = f"{cell['drafter']} n={cell['n_max']}"
            groups.setdefault(cell["workload"], {})[name] = cell["decode_speedup"]["median"]
    return plots.bars(groups, "times plain decoding", reference=1.0)


def throughput(cells: list[Data], first: Data, key: str) -> str:
    """One line a drafter; of several lengths the one that is quickest with so many streams: a line for each would be
    more than can be told apart."""
    chosen = [c for c in cells if c["temperature"] == first["temperature"]]
    lengths: dict[str, set[Any]] = {}
    best: dict[tuple[str, int], Data] = {}
    plain: dict[int, float] = {}
    for cell in sorted(chosen, key=lambda c: c["n_streams"]):
        lengths.setdefault(cell["drafter"], set()).add(cell["n_max"])
        place = (cell["drafter"], cell["n_streams"])
        rates = [c["tokens_per_second"]["median"] for c in (cell, best.setdefault(place, cell))]
        if rates[0] > rates[1]:
            best[place] = cell
        plain.setdefault(cell["n_streams"], cell[f"plain_{key}"]["median"])
    series: dict[str, list[tuple[float, float]]] = {}
    for (drafter, n_streams), cell in best.items():
        name = f"{drafter} n={cell['n_max']}" if len(lengths[drafter]) == 1 else f"{drafter}, quickest n"
        series.setdefault(name, []).append((n_streams, cell[key]["median"]))
    return plots.lines({"plain": list(plain.items()), **series}, "streams", "tokens a second")
