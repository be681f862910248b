"""Values of benchmark options: lists and ranges."""

from __future__ import annotations

import re

from ggufspec.errors import ConfigError

_RANGE = re.compile(r"(-?\d+)-(-?\d+)(?:([+*])(\d+))?")
_DOTS = re.compile(r"(\d+)\.\.(\d+)")
MOST = 10_000  # values of one range; every value is a run


def integers(text: str, name: str) -> list[int]:
    """`1,2,4`, `first-last`, `first-last+step`, `first-last*factor`, `first..last`. ConfigError otherwise."""
    out: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"-?\d+", part):
            out.append(int(part))
        elif found := _DOTS.fullmatch(part):
            out += _span(int(found[1]), int(found[2]), "+", 1, part, name)
        elif found := _RANGE.fullmatch(part):
            out += _span(int(found[1]), int(found[2]), found[3] or "+", int(found[4] or 1), part, name)
        else:
            raise ConfigError(
                f"error: invalid parameter for argument: {name}: {part!r}; expected integers, first-last, "
                "first-last+step or first-last*factor"
            )
    return out


def _span(first: int, last: int, sign: str, by: int, text: str, name: str) -> list[int]:
    if first > last or (sign == "+" and by < 1) or (sign == "*" and (by < 2 or first < 1)):
        raise ConfigError(f"error: invalid parameter for argument: {name}: {text!r} never ends or is empty")
    out: list[int] = []
    while first <= last:
        if len(out) == MOST:
            raise ConfigError(f"error: invalid parameter for argument: {name}: {text!r} is more than {MOST} values")
        out.append(first)
        first = first + by if sign == "+" else first * by
    return out


def numbers(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"error: invalid parameter for argument: {name}: {text!r}; expected numbers") from None
