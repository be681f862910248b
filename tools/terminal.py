"""The terminal: colors, Ctrl-C that first ends an answer, and llama.cpp's timing lines."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ggufspec.drafters import Drafter
from ggufspec.drafters.statistics import acceptance_line
from ggufspec.job import JobStats

_RESET, _PROMPT, _INPUT, _THOUGHT = "\x1b[0m", "\x1b[33m", "\x1b[1m\x1b[32m", "\x1b[90m"


class Screen:
    """Writes to stdout at once. `color` is on, off or auto (on in a terminal)."""

    def __init__(self, color: str):
        self.colored = color == "on" or (color == "auto" and sys.stdout.isatty())
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that is not UTF-8 still gets everything it can show

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def prompt(self, text: str) -> None:
        self.write(self._in(_PROMPT, text))

    def thought(self, text: str) -> None:
        self.write(self._in(_THOUGHT, text))

    @contextmanager
    def user_input(self) -> Iterator[None]:
        """What the user types in between is colored."""
        if self.colored:
            self.write(_INPUT)
        try:
            yield
        finally:
            if self.colored:
                self.write(_RESET)

    def _in(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self.colored and text else text


class Interrupt:
    """Ctrl-C while an answer is written: the first sets `pressed`, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    def __enter__(self) -> Interrupt:
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def edit_lines() -> None:
    """From now on `input()` edits lines with the cursor keys and recalls earlier ones, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


def quit_at_once() -> None:
    """The program is ending anyway: a further Ctrl-C ends it without ceremony, and without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def timing_lines(stats: JobStats, load_ms: float, total_ms: float) -> list[str]:
    """The lines llama.cpp ends with. The first token comes out of the prompt's evaluation: n - 1 steps follow it."""
    n_steps = max(stats.predicted_n - 1, 0)

    def line(name: str, ms: float, n: int, unit: str) -> str:
        per = f"{ms / n:8.2f} ms per token, {1000 * n / ms if ms > 0 else 0:8.2f} tokens per second" if n else ""
        return f"common_perf_print: {name:>16} time = {ms:10.2f} ms / {n:5d} {unit}" + (f" ({per})" if per else "")

    lines = [
        line("sampling", stats.sample_ms, stats.predicted_n, "runs  "),
        f"common_perf_print: {'load':>16} time = {load_ms:10.2f} ms",
        line("prompt eval", stats.prompt_ms, stats.prompt_n, "tokens"),
        line("eval", stats.predicted_ms, n_steps, "runs  "),
        f"common_perf_print: {'total':>16} time = {total_ms:10.2f} ms / {stats.prompt_n + stats.predicted_n:5d} tokens",
    ]
    if stats.draft_n > 0:
        lines.append(acceptance_line(stats.draft_n, stats.draft_n_accepted, stats.n_verify))
    return lines


def drafter_lines(drafter: Drafter | None) -> list[str]:
    """One statistics line for each drafter, as llama.cpp prints them."""
    if drafter is None:
        return []
    return [member.stats.line() for member in getattr(drafter, "members", [drafter])]


def rates(stats: JobStats) -> str:
    """`[ Prompt: X t/s | Generation: Y t/s ]`"""
    prompt = 1000 * stats.prompt_n / stats.prompt_ms if stats.prompt_ms > 0 else 0.0
    n_steps = max(stats.predicted_n - 1, 0)
    generation = 1000 * n_steps / stats.predicted_ms if stats.predicted_ms > 0 else 0.0
    return f"[ Prompt: {prompt:.1f} t/s | Generation: {generation:.1f} t/s ]"


class Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    def ms(self) -> float:
        return 1000 * (time.perf_counter() - self._start)
