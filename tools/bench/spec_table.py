"""The terminal's tables of `bench spec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .summary import Cell

if TYPE_CHECKING:
    from .spec import Results

HEADS = (
    "drafter", "n", "temp", "np", "workload", "len", "acc %", "draft ms", "verify ms", "sample ms", "host ms",
    "plain ms/t", "ms/token", "decode x", "wall x", "t/s", "t/s/stream", "parity",
)  # fmt: skip
LEFT = {"drafter", "workload", "parity"}


def text(results: Results) -> str:
    """All tables of a run."""
    parts = [grid(HEADS, [row(cell) for cell in results.cells])]
    notes = [f"{c.drafter} n={c.n_max} {c.workload}: {c.parity}" for c in results.cells if is_difference(c.parity)]
    largest = {(c.drafter, c.n_max, c.temperature, c.n_streams): c for c in results.cells}  # the last: all workloads
    n = max((len(c.accepted_per_position) for c in largest.values()), default=0)
    parts.append(grid(
        ("drafter", "n", "temp", "np", *(f"at {i + 1}" for i in range(n))),
        [[c.drafter, str(c.n_max), f"{c.temperature:g}", str(c.n_streams),
          *(f"{rate:.3f}" for rate in c.accepted_per_position)] for c in largest.values()],
        "share of drafts with at least so many tokens right",
    ))  # fmt: skip
    if results.parity:
        parts.append("\n".join(
            f"at temperature {p['temperature']:g}, {p['drafter']} n={p['n_max']}, {p['n_streams']} streams: "
            f"{p['result']}" for p in results.parity
        ))  # fmt: skip
    if results.split:
        parts.append(split_text(results.split))
    return "\n\n".join(parts + ([] if not notes else ["\n".join(notes)]))


def row(cell: Cell) -> list[str]:
    parity = "differs" if is_difference(cell.parity) else cell.parity
    return [
        cell.drafter, length(cell), f"{cell.temperature:g}", str(cell.n_streams), cell.workload,
        f"{cell.mean_length:.3f}", f"{100 * cell.accept_rate:.1f}", cell.draft_ms.text(), cell.verify_ms.text(),
        cell.sample_ms.text(), cell.host_ms.text(), cell.plain_ms_per_token.text(), cell.ms_per_token.text(),
        cell.decode_speedup.text(2, "x"), cell.wall_speedup.text(2, "x"), cell.tokens_per_second.text(1),
        cell.stream_tokens_per_second.text(1), parity,
    ]  # fmt: skip


def length(cell: Cell) -> str:
    """`7`; for auto also what was drafted on average."""
    return str(cell.n_max) if isinstance(cell.n_max, int) else f"{cell.n_max} ({cell.drafted_per_step:.1f})"


def is_difference(parity: str) -> bool:
    return parity not in ("equal", "synthetic")


def split_text(split: Sequence[dict[str, Any]]) -> str:
    rows = []
    for entry in split:
        for phase in ("draft", "verify"):
            parts = entry[phase]
            largest_first = sorted(parts.items(), key=lambda item: -item[1])
            shown = [f"{name} {ms:.3f}" for name, ms in largest_first if ms >= 0.0005]
            rows.append([entry["drafter"], str(entry["n_max"]), phase, f"{sum(parts.values()):.3f}", ", ".join(shown)])
    return grid(("drafter", "n", "phase", "ms", "of which"), rows, f"one step in parts, ms ({split[0]['measured_by']})")


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Columns as wide as their longest entry; short rows are filled up."""
    filled = [[*r, *[""] * (len(heads) - len(r))] for r in rows]
    widths = [max(len(h), *(len(r[i]) for r in filled)) if filled else len(h) for i, h in enumerate(heads)]
    left = [h in LEFT or h in ("phase", "of which") for h in heads]

    def line(cells: Sequence[str]) -> str:
        out = [c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left)]
        return "  ".join(out).rstrip()

    return "\n".join([*([title] if title else []), line(heads), *(line(r) for r in filled)])
