"""Tensors from one device to the next, without either waiting longer than for the data.

PyTorch copies between two GPUs on their current streams and makes each wait for the other: a device that hands a prompt
chunk on would wait for the one before to be finished there. Here copies run on streams of their own.

While a step over several devices is captured, its recorder is asked instead (see relay): it has to know where the work
of one device ends and that of another begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])

_streams: dict[tuple[torch.device, torch.device, torch.device], Any] = {}


class Recorder(Protocol):
    """What records work on several devices."""

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, work is the device's."""

    def carry(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """`hand_over` between two devices."""


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)  # at work in this thread


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on the device: Triton goes by the current one, not by the tensors'."""
    recording = recorder.get()
    if recording is not None:
        return recording.on(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Journey:
    """`on` for work that goes on to other devices: inside it is `at` one of them after the other."""

    def __init__(self) -> None:
        self._now = ExitStack()
        self._device: torch.device | None = None

    def __enter__(self) -> Journey:
        return self

    def __exit__(self, *how: Any) -> None:
        self._now.close()

    def at(self, device: torch.device) -> None:
        if device != self._device:
            self._now.close()
            self._now.enter_context(on(device))
            self._device = device


def on_own_device(method: Method) -> Method:
    """A method that launches kernels, run `on` its object's `device`."""

    @wraps(method)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        with on(self.device):
            return method(self, *arguments, **named)

    return cast(Method, run)


def hand_over(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors, all on one device, on another one; those that are there already as they are.

    Between GPUs the copies wait for what their source's stream has been given so far, and the target's stream waits for
    the copies. PyTorch goes through host memory where there is no peer access. From page-locked memory nobody waits.
    """
    moved, arrived = send(tensors, device)
    wait_for(arrived, device)
    return moved


def send(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], Any]:
    """`hand_over` whose target does not wait yet: `wait_for` the second value before the tensors are read there."""
    if not tensors or tensors[0].device == device:
        return list(tensors), None
    recording = recorder.get()
    if recording is not None:
        return recording.carry(tensors, device), None
    source = tensors[0].device
    if source.type != "cuda" or device.type != "cuda":
        return [t.to(device, non_blocking=source.type == "cpu" and t.is_pinned()) for t in tensors], None
    out, into = _stream(source, source, device), _stream(device, source, device)
    out.wait_stream(torch.cuda.current_stream(source))
    with torch.cuda.stream(into), torch.cuda.stream(out):
        moved = [t.to(device, non_blocking=True) for t in tensors]
    for t in tensors:
        t.record_stream(out)  # its memory is not used anew before the copy has read it
    for t in moved:
        t.record_stream(torch.cuda.current_stream(device))  # allocated for the copying stream, read by the other
    return moved, into.record_event()


def wait_for(arrived: Any, device: torch.device) -> None:
    """Let the device's stream wait for what was sent."""
    if arrived is not None:
        torch.cuda.current_stream(device).wait_event(arrived)


def wait_for_copies(source: torch.device) -> None:
    """Let the device's stream wait for all copies from it: what they read is written over next. Memory that is not
    fixed needs no such care, it is not used anew before."""
    for (device, own, _), out in _streams.items():
        if device == own == source:
            torch.cuda.current_stream(source).wait_stream(out)


def _stream(device: torch.device, source: torch.device, target: torch.device) -> Any:
    """The stream of `device` for copies from source to target."""
    key = (device, source, target)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]
