"""The GPU's searches against numpy's: interpreted on the CPU for some types, on a device for all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from files import importance, make_file, weights, write_imatrix

from ggufspec.gguf_file import open_gguf
from ggufspec.quant.imatrix import read_imatrix
from ggufspec.quant.policy import Choices, file_type
from ggufspec.quant.quantize import ENCODERS
from ggufspec.quant.requantize import Options, make_plan, run_plan

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q4_K", "Q3_K", "IQ4_NL"])
def test_interpreted_kernels_equal_numpy(name):
    done = subprocess.run(
        [sys.executable, "triton_twin.py", "1", "256", name], cwd=FOLDER, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER), "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_kernels_equal_numpy_on_the_device():
    done = subprocess.run(
        [sys.executable, "triton_twin.py", "24", "1024", *ENCODERS], cwd=FOLDER, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q3_K_L", "IQ4_XS", "Q8_0", "BF16"])
def test_file_made_on_the_device_equals_the_cpus(tmp_path, kind):
    data = weights()
    matrix = read_imatrix(write_imatrix(tmp_path / "i.gguf", importance(data)))
    for use in (None, matrix):
        options = Options(Choices(file_type(kind), has_imatrix=use is not None), allow_requantize=True, imatrix=use)
        plan = make_plan(open_gguf(make_file(tmp_path / "in.gguf", "Q8_0", data)), options)
        run_plan(plan, tmp_path / "cpu.gguf")
        run_plan(plan, tmp_path / "cuda.gguf", device="cuda")
        assert (tmp_path / "cpu.gguf").read_bytes() == (tmp_path / "cuda.gguf").read_bytes()


def test_memory_stays_small_whatever_the_tensor(tmp_path):
    """A tensor goes through without being in memory at once."""
    script = """
import resource, sys
from ggufspec.gguf_file import open_gguf
from ggufspec.quant.policy import Choices, file_type
from ggufspec.quant.requantize import Options, make_plan, run_plan
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_plan(make_plan(open_gguf(sys.argv[1]), Options(Choices(file_type("Q8_0")))), sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    data = {"output.weight": np.full((4096, 16384), 0.5, np.float32)}
    source = make_file(tmp_path / "in.gguf", "F16", data, 1)
    done = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "out.gguf"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150  # MiB; the tensor is 128 MiB as stored and 256 MiB as float32


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("_sum_kernel", {"N": 32}),
        ("_symmetric_kernel", {"K": 18, "N": 16, "N_MAX": 32.0}),
        ("_asymmetric_kernel", {"K": 21, "N": 32, "N_MAX": 15.0, "USE_MAD": False}),
        ("_positive_kernel", {"K": 9, "N": 8, "N_MAX": 63.0, "BITS": 8}),
        ("_symmetric_sweeps_kernel", {"N": 16, "N_MAX": 4.0, "BITS": 4}),
        ("_nonlinear_kernel", {"FIRST": -127.0, "TRIES": 7, "N": 32}),
    ],
)
def test_compiled_kernels_round_every_operation(kernel, constants):
    """No multiply-add is fused and no division is approximate in the code for an H200 (no device needed)."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ggufspec.quant import search_triton

    function, constants = getattr(search_triton, kernel), {**constants, "SIZE": search_triton.BLOCK}
    signature = {n: "constexpr" if n in constants else "i32" if n == "G" else "*fp32" for n in function.arg_names}
    places = {(i,): constants[n] for i, n in enumerate(function.arg_names) if n in constants}
    source = ASTSource(function, signature, places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    code = made.asm["ptx"]
    assert "fma." not in code and "div.full" not in code and "approx" not in code
    assert "div.rn.f32" in code or kernel == "_sum_kernel"
