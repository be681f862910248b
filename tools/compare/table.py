"""The comparison as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ggufspec.tools.bench.spec_table import grid

from .sides import Row

HEADS = (
    "drafter", "n", "equal", "drafted", "accepted", "acc % here", "acc % llama.cpp", "points", "len here",
    "len llama.cpp", "t/s here", "t/s llama.cpp", "speed (95%)",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    ratio, low, high = row.ratio()
    speeds = [statistics.median(values) for values in (row.ours_per_second, row.theirs_per_second)]
    shown = [row.name, str(row.n_max) if row.n_max else "", f"{row.n_equal}/{row.n_prompts}"]
    if row.n_max:
        shown += [
            f"{row.drafted[0]} / {row.drafted[1]}", f"{row.accepted[0]} / {row.accepted[1]}",
            f"{100 * row.rates[0]:.2f}", f"{100 * row.rates[1]:.2f}", f"{row.points:+.2f}",
            f"{row.lengths[0]:.3f}", f"{row.lengths[1]:.3f}",
        ]  # fmt: skip
    else:
        shown += [""] * 7
    interval = "(one pair)" if math.isnan(low) else f"({low:.3f}-{high:.3f})"
    return [*shown, f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", f"{ratio:.3f}x {interval}"]


def text(rows: Sequence[Row]) -> str:
    return "\n".join([grid(HEADS, [cells(row) for row in rows]), *differences(rows)])


def markdown(rows: Sequence[Row]) -> str:
    body = ["| " + " | ".join(cells(row)) + " |" for row in rows]
    head = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    return "\n".join([*head, *body, *differences(rows)])


def differences(rows: Sequence[Row]) -> list[str]:
    """Where streams part, and both sides' likeliest tokens there."""
    out = []
    for row in rows:
        for d in row.differences:
            kind = "a tie" if d.is_tie else "NOT a tie"
            out.append(f"{row.name} n={row.n_max}, prompt {d.prompt}, token {d.at}: {kind}, gap {d.gap:.2g}")
            for side, top in (("here", d.ours), ("llama.cpp", d.theirs)):
                out.append(f"  {side:<10}" + "  ".join(f"{token}: {logprob:.4f}" for token, logprob in top))
    return ["", *out] if out else []
