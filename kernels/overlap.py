"""Programmatic dependent launch: the next kernel of a stream starts while the last programs of this one run.

Every kernel calls `begin` (or its halves, `release` and `wait`) before it touches memory that kernels write, and is
launched with `**overlap(x)`. Cards before capability 9.0 launch one kernel after the other.

Every launch also says whether a multiplication and an addition may become one fused operation, rounded once: results
are compared bit for bit, and Triton's default is about to change (fused up to 3.9, not fused from 3.10 on).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# Arguments that hold one number an entry of the batch, read by itself: their alignment, which follows from the number
# of entries, would only make a kernel of its own.
ENTRY_NUMBERS = ["slot_ptr", "n_past_ptr", "n_rows_ptr", "position_ptr", "counts_ptr", "n_accepted_ptr"]


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start, then wait until the one before has ended and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """The first half of `begin`: let the next kernel start. Until `wait` only what no kernel writes may be read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """The second half of `begin`."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps(x: Tensor) -> bool:
    """Whether kernels on x's device can overlap."""
    return x.is_cuda and _can_overlap(x.device)


def overlap(x: Tensor, fuse: bool = True) -> dict[str, bool]:
    """Launch options of a kernel that begins with `begin(PDL)`. fuse: multiply-adds may round once."""
    if triton.knobs.runtime.interpret:
        return {"PDL": False}
    pdl = overlaps(x)
    return {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": fuse}
