"""Triton kernels against their twins, on any device: run by the CPU interpreter at small sizes (`test_triton.py`)
and by a card at real ones (`tests/gpu/test_kernels.py`). A file a room of kernels.

A case takes the device and whether sizes are real; it raises AssertionError on a difference.
"""

from . import attention, carry, conv, gdn, kv, norm, prepared, rope, rows, select  # noqa: F401, each adds its cases
from .comparing import CASES

__all__ = ["CASES"]
