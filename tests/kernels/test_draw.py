"""Filter, weigh and draw: kernel against twin. What the twin means is tested in tests/sampling."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", ["interpreted_draw.py", "compiled_draw.py"])
def test_kernel_equals_its_twin_and_compiles(script):
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, folder / script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
