"""Compile kernels for a card that is not there: launches compile for the target and do nothing else.

    with compiling(75): attention.triton.attend(...)     # CPU tensors; results are meaningless
"""

from collections.abc import Iterator
from contextlib import contextmanager

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# Bytes of shared memory that a program may take, by capability.
SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


class NoCard:
    """As much of a driver as compilation asks for."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # compiled kernels are kept per device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[str]]:
    """Inside, every launch only compiles; yields the names of the kernels launched."""
    names: list[str] = []
    run = triton.JITFunction.run

    def warm(self, *args, grid, warmup, **kwargs):
        assert "enable_fp_fusion" in kwargs, f"{self.__name__}: say whether multiply-adds may be fused"
        names.append(self.__name__)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        shared = getattr(getattr(kernel, "metadata", None), "shared", 0)
        assert shared <= SHARED.get(capability, shared), f"{self.__name__}: {shared} bytes of shared memory"
        return kernel

    active = driver._active
    driver.set_active(NoCard(capability))
    triton.JITFunction.run = warm
    try:
        yield names
    finally:
        triton.JITFunction.run = run
        driver._active = active
