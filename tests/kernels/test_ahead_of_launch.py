"""Launches that only collect kernels, which are compiled together: for a card that is not there, in processes."""

from pathlib import Path

import pytest
from processes import python

pytest.importorskip("triton")
BEGIN = """
import torch, triton
from pretended import card, recorded
from ggufspec.kernels.ahead import compiled_ahead
from ggufspec.kernels.norm import triton as norm
from ggufspec.kernels.rows import triton as rows

def compiled(kernel):
    return list(kernel.device_caches[90][0].values())

x, n = torch.ones(3, 64), torch.ones(3, dtype=torch.int64)
"""


def run(code: str, folder: Path) -> str:
    return python("-c", BEGIN + code, TRITON_CACHE_DIR=str(folder)).stderr


USUAL = """
with card(90):
    with compiled_ahead() as kernels:
        for _ in range(3):
            out = norm.swiglu(x, x)
            every, valid = rows.positions(n, n, 4)
        kinds = {type(kernel) for kernel in compiled(norm.activation_kernel)}
        assert triton.compiler.CompiledKernel not in kinds  # it only begins at the end
    assert not out.any() and not every.any()  # nothing ran, and nothing is left of what memory held before
    assert sorted(kernels.launched.values()) == ["activation_kernel", "positions_kernel"]
    assert kernels.n_kernels == 2
    for kernel in (norm.activation_kernel, rows.positions_kernel):
        (found,) = compiled(kernel)
        assert isinstance(found, triton.compiler.CompiledKernel) and found.asm["cubin"]
    with compiled_ahead() as again:
        norm.swiglu(x, x)
    assert again.n_kernels == 0 and len(again.launched) == 1
"""


def test_launches_are_collected_and_compiled(tmp_path):
    run(USUAL, tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(files) == 2
    run(USUAL, tmp_path)  # read from disk by another process
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == files


def test_an_interrupted_collection_compiles_nothing(tmp_path):
    run(
        """
with card(90):
    run = triton.JITFunction.run
    try:
        with compiled_ahead():
            norm.swiglu(x, x)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert triton.JITFunction.run is run and not compiled(norm.activation_kernel)
    with recorded() as launches:  # and the next launch is one again
        norm.swiglu(x, x)
    assert len(launches) == 1
""",
        tmp_path,
    )
    assert not list(tmp_path.rglob("*.cubin"))


def test_a_kernel_that_cannot_be_compiled_fails_where_it_is_launched(tmp_path):
    source = tmp_path / "broken.py"
    source.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef broken_kernel(x_ptr):\n"
        "    tl.store(x_ptr, tl.arange(0, 3))\n"
    )
    run(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from broken import broken_kernel
with card(90):
    with compiled_ahead() as kernels:
        broken_kernel[(1,)](x, enable_fp_fusion=False)
        norm.swiglu(x, x)
    assert kernels.n_kernels == 2 and len(compiled(norm.activation_kernel)) == 1
    try:
        broken_kernel.run(x, grid=(1,), warmup=True, enable_fp_fusion=False)
    except triton.compiler.errors.CompilationError as error:
        assert "power of 2" in str(error.__cause__ or error), error
    else:
        raise AssertionError("it was compiled")
""",
        tmp_path,
    )


def test_later_compilations_are_told(tmp_path):
    log = run(
        """
import logging, sys
from ggufspec.kernels.ahead import tell_of_compilations
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
tell_of_compilations()
tell_of_compilations()
with card(90):
    for _ in range(2):
        norm.activation_kernel.run(x, x, x, 192, 0, 1024, False, grid=(1,), warmup=True, enable_fp_fusion=True)
""",
        tmp_path,
    )
    assert log.count("compiled activation_kernel in ") == 1
