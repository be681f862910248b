"""Static SVG plots: lines, grouped bars, stacked bars. No script, no font file, no request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 16, 54
LETTER = 7.0  # width of a letter
COLORS = (
    "#2563a8", "#c4532d", "#2f8f5b", "#8a4fa3", "#b08a1e", "#4c5a67", "#c23b6b", "#3aa0a6", "#7b5a3c", "#8fb13c",
    "#9db4d6", "#e0a58f", "#a3d3b5", "#cfb0de", "#e3cf8f", "#a9b4bf",
)  # fmt: skip

Points = Sequence[tuple[float, float]]


def lines(series: Mapping[str, Points], x_label: str, y_label: str, reference: float | None = None) -> str:
    """One line a series, points marked; `reference` draws a dashed horizontal line."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points] + ([] if reference is None else [reference])
    if not xs:
        return ""
    frame = Frame(xs[0], xs[-1], max(ys))
    body = [frame.axes(xs, x_label, y_label)]
    if reference is not None:
        y = frame.y(reference)
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="reference"/>')
    for color, points in zip(cycle(len(series)), series.values()):
        places = [(frame.x(x), frame.y(y), y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{value:.4g}</title></circle>'
            for x, y, value in places
        ]
    return svg(body, list(series), y_label)


def bars(groups: Mapping[str, Mapping[str, float]], y_label: str, *, stacked: bool = False,
         reference: float | None = None) -> str:  # fmt: skip
    """Groups along x, each with one bar a name, side by side or on top of one another."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    tops = [sum(v.values()) if stacked else max(v.values(), default=0) for v in groups.values()]
    if not tops:
        return ""
    frame = Frame(0, len(groups), max([*tops, reference or 0]))
    color_of = dict(zip(names, cycle(len(names))))
    body = [frame.axes([], "", y_label)]
    slot = frame.x(1) - frame.x(0)
    for g, (label, values) in enumerate(groups.items()):
        left, base = frame.x(g) + 0.12 * slot, 0.0
        width = 0.76 * slot / (1 if stacked else max(len(names), 1))
        for i, name in enumerate(names):
            if name not in values:
                continue
            low, high = (base, base + values[name]) if stacked else (0.0, values[name])
            x = left if stacked else left + i * width
            body.append(
                f'<rect x="{x:.1f}" y="{frame.y(high):.1f}" width="{width:.1f}" '
                f'height="{max(frame.y(low) - frame.y(high), 0):.1f}" fill="{color_of[name]}">'
                f"<title>{escape(label)}, {escape(name)}: {values[name]:.4g}</title></rect>"
            )
            base = high
        body.append(group_label(left + 0.38 * slot, label, slot))
    if reference is not None:
        y = frame.y(reference)
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="reference"/>')
    return svg(body, names, y_label)


class Frame:
    """From values to places."""

    def __init__(self, x_low: float, x_high: float, y_high: float):
        self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
        self.step = nice_step(y_high / 5 if y_high > 0 else 1)
        self.y_high = self.step * max(math.ceil(y_high / self.step - 1e-9), 1)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_high * (HEIGHT - TOP - BOTTOM)

    def axes(self, ticks: Sequence[float], x_label: str, y_label: str) -> str:
        out = []
        for i in range(round(self.y_high / self.step) + 1):
            y = self.y(i * self.step)
            out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            out.append(text(LEFT - 6, y + 4, f"{i * self.step:g}", "end"))
        out += [text(self.x(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for x in ticks]
        out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
        return "".join(out)


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))


def cycle(n: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(n)]


def text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def group_label(x: float, label: str, room: float) -> str:
    """Under its group; slanted where labels would run into one another."""
    y = HEIGHT - BOTTOM + 16
    if LETTER * len(label) <= room:
        return text(x, y, label, "middle")
    return (
        f'<text x="{x:.1f}" y="{y - 4}" text-anchor="end" transform="rotate(-35 {x:.1f} {y - 4})" '
        f'style="font-size: 10px">{escape(label)}</text>'
    )


def svg(body: Sequence[str], names: Sequence[str], label: str) -> str:
    """The picture with its legend at the right."""
    legend = []
    step = min(18.0, (HEIGHT - TOP - 10) / max(len(names), 1))  # a long legend stays inside the picture
    for i, (name, color) in enumerate(zip(names, cycle(len(names)))):
        y = round(TOP + 10 + step * i, 1)
        legend.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        legend.append(text(WIDTH - RIGHT + 28, y, name, "start"))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}{''.join(legend)}</svg>"
    )
