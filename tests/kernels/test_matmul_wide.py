"""Products of many rows without a card: under the CPU interpreter, and compiled for real cards."""

import pytest
import torch
from compiling import compiling
from processes import python

from ggufspec.kernels.matmul import cuda


def test_products_equal_float64_in_the_interpreter():
    python("-c", "import interpreter, interpreted_wide; interpreted_wide.everything()")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_kernels_compile(capability, monkeypatch):
    from test_matmul_triton import COLUMNS, ROWS, weights

    from ggufspec.kernels.matmul import wide

    for room in (cuda, wide):
        monkeypatch.setattr(room, "capability", lambda index: divmod(capability, 10))
    monkeypatch.setattr(wide, "product", lambda a, w, factor, out: None)
    with compiling(capability) as names:
        for type_name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "F32"):
            group = cuda.fuse((weights(type_name)[-1],))
            (y,) = wide.multiply(wide.prepare(torch.zeros(300, COLUMNS)), group)
            assert y.shape == (300, ROWS)
    assert set(names) == {"prepare_kernel", "unpack_rows"} | ({"unpack"} if capability >= 80 else set())
