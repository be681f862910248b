"""Decoders against the reference decoder, bit for bit, on random bytes."""

import libgguf
import numpy as np
import pytest
import torch

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.quant import layouts
from ggufspec.quant.dequantize import DECODERS, dequantize, dequantize_torch

QUANTIZED = [name for name in DECODERS if layouts.BY_NAME[name].is_quantized]


def random_rows(name: str, n_rows: int = 64, n_blocks: int = 3, seed: int = 0) -> np.ndarray:
    """Random bytes; exponents of the halves are kept finite so that NaN payloads do not matter."""
    rng = np.random.default_rng(seed)
    layout = layouts.BY_NAME[name]
    raw = rng.integers(0, 256, (n_rows, n_blocks, layout.n_bytes), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    pairs = {"Q4_1": (0, 2), "Q5_1": (0, 2)}
    for at in halves.get(name, pairs.get(name, (0,))):
        raw[..., at + 1] &= 0xBB  # clears one exponent bit: never Inf or NaN
    return raw.reshape(n_rows, -1)


def reference(raw: np.ndarray, name: str) -> np.ndarray:
    layout = layouts.BY_NAME[name]
    n_columns = raw.shape[1] // layout.n_bytes * layout.n_elements
    return libgguf.dequantize_rows(raw, layout.id, n_per_row=n_columns)


@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_equal_reference(name):
    raw = random_rows(name)
    np.testing.assert_array_equal(dequantize(raw, name).view(np.uint32), reference(raw, name).view(np.uint32))


@pytest.mark.parametrize("name", list(DECODERS))
def test_torch_equals_numpy(name):
    raw = random_rows(name, n_blocks=8) if name in QUANTIZED else np.random.default_rng(1).integers(
        0, 60, (4, 64), np.uint8)
    ours = dequantize_torch(torch.from_numpy(raw), name).numpy()
    np.testing.assert_array_equal(ours.view(np.uint32), dequantize(raw, name).view(np.uint32))


def test_plain_types():
    x = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    assert (dequantize(x.view(np.uint8), "F32") == x).all()
    assert (dequantize(x.astype(np.float16).view(np.uint8), "F16") == x.astype(np.float16)).all()
    b = torch.from_numpy(x).bfloat16()
    assert (dequantize(b.view(torch.uint8).numpy(), "BF16") == b.float().numpy()).all()


def test_leading_dimensions_stay():
    raw = random_rows("Q4_K", n_rows=6, n_blocks=2).reshape(2, 3, -1)
    assert dequantize(raw, "Q4_K").shape == (2, 3, 512)


def test_refusals():
    with pytest.raises(FileError, match="17 bytes"):
        dequantize(np.zeros((2, 17), np.uint8), "Q8_0")
    with pytest.raises(UnsupportedError, match="I32"):
        dequantize(np.zeros((2, 16), np.uint8), "I32")
