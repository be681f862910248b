"""Times of a step's phases, taken where the work is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Laps:
    """Times of a step's phases: draft, verify, sample, observe. On a GPU they are taken with events.

    Events of a captured step are nodes of its graph and are recorded anew at every replay. A step that runs ahead is
    therefore captured twice, and the two take turns: its events stand until the step after the next one.
    """

    def __init__(self, device: torch.device, captured: bool = False):
        self.make: Callable[[], Any] | None = None
        if device.type == "cuda":
            self.make = lambda: torch.cuda.Event(enable_timing=True, external=captured)
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.make is None:
            self.marks.append(time.perf_counter())
            return
        event = self.make()
        event.record()
        self.marks.append(event)

    def ms(self) -> list[float]:
        """Milliseconds between marks; on a GPU call it after the device has finished the step."""
        pairs = zip(self.marks, self.marks[1:])
        if self.make is not None:
            return [a.elapsed_time(b) for a, b in pairs]
        return [1000 * (b - a) for a, b in pairs]
