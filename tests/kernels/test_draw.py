"""Filter, weigh and draw: kernel against twin. What the twin means is tested in tests/sampling."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_kernel_equals_its_twin_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "interpreted_draw.py"], cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
