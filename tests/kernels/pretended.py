"""A card that is not there: tensors of the CPU say that they are on CUDA, launches can be recorded or only compiled.

    with card(90):
        model = load_model(file, Placement.single("cuda:0", n))     # takes the kernels' paths
        with recorded() as launches, ZeroFilled(): model.forward(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from compiling import NoCard
from torch.overrides import TorchFunctionMode
from triton.runtime import driver

from ggufspec.kernels.matmul import wide

CUDA = torch.device("cuda", 0)
_is_cuda, _device = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]


class OnTheCpu(TorchFunctionMode):
    """Every tensor is on the CPU and says it is on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _is_cuda:
            return True
        if func == _device:
            return CUDA
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(here, args), **kwargs)


def here(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return torch.device("cpu") if is_device else value


class Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Stream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Event:
        return Event()


def no_product(a: torch.Tensor, w: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    out.zero_()


@contextmanager
def card(capability: int) -> Iterator[None]:
    """A card of that capability with the sizes of an H200."""
    properties = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448
    )
    pretended = {
        "get_device_capability": lambda *_: divmod(capability, 10), "get_device_name": lambda *_: "no card",
        "get_device_properties": lambda *_: properties, "device": lambda *_: nullcontext(),
        "Event": Event, "Stream": Stream, "current_stream": lambda *_: Stream(), "stream": lambda *_: nullcontext(),
        "is_current_stream_capturing": lambda: False, "synchronize": lambda *_: None, "current_device": lambda: 0,
        "device_count": lambda: 1,
    }  # fmt: skip
    active = driver._active
    with ExitStack() as stack:
        for name, value in pretended.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(wide, "product", no_product))  # there is none of halves on the CPU
        driver.set_active(NoCard(capability))
        stack.callback(setattr, driver, "_active", active)
        stack.enter_context(OnTheCpu())
        yield


@contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """Inside, launches do nothing; yields (name, what Triton compiles it for) of all of them."""
    run, found = triton.JITFunction.run, set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, _, _, _, bind = self.device_caches[driver.active.get_current_device()]
        given = {"debug": False, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode, **options}
        _, kinds, chosen = bind(*args, **given)
        found.add((self.__name__, f"{kinds} {chosen}"))

    triton.JITFunction.run = record
    try:
        yield found
    finally:
        triton.JITFunction.run = run
