"""Shared by all tests: `tests/` is importable (`from peer import Peer`, `from families import make_qwen35`);
tests whose machine or reference is missing are skipped with the reason.
"""

import importlib.util
import logging
import os
from collections.abc import Iterator

import pytest

# Child processes import the installed package, never the source folder they are started in: it lacks the rooms that
# lie beside it (quant, kernels, tools).
os.environ["PYTHONSAFEPATH"] = "1"
# Several test processes share the cores; OpenMP threads that spin for one another would take all of them.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Nor do tests of values measure time.
    settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared cores")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Commands that run in this process set the package's log up, on a stream that is gone after their test."""
    log = logging.getLogger("ggufspec")
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"peer": _no_peer(), "gpu": _no_gpu()}
    for item in items:
        for mark, reason in needs.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_peer() -> str | None:
    return None if importlib.util.find_spec("xllamacpp") else "xllamacpp is not installed (extra `peer`)"


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"
