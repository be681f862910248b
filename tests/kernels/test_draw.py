"""Filter, weigh and draw: kernel against twin. What the twin means is tested in tests/sampling."""

import pytest
from processes import python


@pytest.mark.parametrize("script", ["interpreted_draw.py", "compiled_draw.py"])
def test_kernel_equals_its_twin_and_compiles(script):
    pytest.importorskip("triton")
    python(script)
