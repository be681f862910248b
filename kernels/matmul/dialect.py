"""Gluon's operations whose names differ between the Triton releases the kernels compile with (3.6 to 3.9).

Only the names differ, so each is looked up once, here. Source: triton.experimental.gluon of 3.6.0, 3.7.1, 3.8.0, 3.9.0.

here         3.6                                     3.7                                     3.8            3.9
copy_async   async_copy.async_copy_global_to_shared  async_copy.async_copy_global_to_shared  async_load     async_load
barrier      thread_barrier                          barrier                                 barrier        barrier
reinterpret  descriptor._reinterpret                 _reinterpret                            _reinterpret   reinterpret
"""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


def _first(owner: object, *names: str) -> Any:
    """The first of these that this release has; newer names first, for 3.9 keeps an old one that only raises."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


copy_async = _first(async_copy, "async_load", "async_copy_global_to_shared")
barrier = _first(gl, "barrier", "thread_barrier")
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
