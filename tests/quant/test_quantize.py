"""Encoders against the reference quantizers (libgguf), byte for byte, with and without an importance matrix."""

import libgguf
import numpy as np
import pytest
import torch
from rows import stress_rows

from ggufspec import bundled
from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.gguf_file import open_gguf
from ggufspec.quant import layouts
from ggufspec.quant.dequantize import dequantize
from ggufspec.quant.quantize import ENCODERS, quantize, quantize_torch

BLOCK_TYPES = [name for name in ENCODERS if layouts.BY_NAME[name].is_quantized]
N_COLUMNS = 768
IMPORTANCE = np.random.default_rng(5).uniform(0.01, 10, N_COLUMNS).astype(np.float32)
STRESS = stress_rows(n_columns=N_COLUMNS)

# x_i = ((37 i + (i^2 mod 53)) mod 101 - 50) / 64, importance 1 + (7 i mod 13); hexadecimal of the first block.
VECTORS = {
    ("Q8_0", False): "4d1e81e247b121950f8e8b14a2af475e0021cdf829e41e5ea272c0146dcb2e9503ee",
    ("Q4_0", False): "402e5086bc63aae129f14199f253bc1e887a",
    ("Q4_0", True): "442e5086bc63aae129f14199f253bc1e887a",
    ("Q4_1", False): "552e40ba5076ac63aae129f14199f253bc1e887a",
    ("Q5_0", False): "402a54f2b456a0fc59c644c342e28133e496693c00e4",
    ("Q5_1", False): "212a40ba54f2b456a0fc69d645c342f28133e496693c10e5",
    ("Q4_K", False): "b0166922fbfbfefdfef9fbfd69aaff8be056ede36af109a1c16982336d9e589ad5186bb60a6ec22f94097ff57b71f887"
    "a9d304cef04b8dd12c70d438950a7fe56be1e76efd049cb4547d265781327cbeaf0c70e65cd1474ed5637b021bcbe38d"
    "bee7a9e315603386d2268aff53c8be236a82224af4154e004a8cc79aed399df156ba2f158a01878d14abb34b6b042ced",
    ("Q4_K", True): "cd166222fcfafdfffff9fbfe89a8feaae056ece36af109a1c16982336c9e589ad5176ab60a6ec22f94097ff57b71f887"
    "99c204bef04b8dc12c70c438950a7fe56bd1d76eed049ca4547d264771327caeaf0c70e65cd1484ed5637b031bcbe39d"
    "bef7a9e315603386d2268aff53c8be237a82224af4255e004a8cc79aed399df156ca2f158a01878d14abb35b6b043ced",
}  # fmt: skip


def reference(x: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    raw = np.asarray(libgguf.quantize_rows(x, layouts.BY_NAME[name].id, importance))
    return raw.view(np.uint8).reshape(len(x), -1)


def n_different(ours: np.ndarray, theirs: np.ndarray, name: str) -> int:
    return int((ours != theirs).reshape(-1, layouts.BY_NAME[name].n_bytes).any(axis=1).sum())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "imatrix"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_bytes_equal_reference(name, weighted):
    importance = IMPORTANCE if weighted else None
    counts = {}
    for kind, x in STRESS.items():
        counts[kind] = n_different(quantize(x, name, importance), reference(x, name, importance), name)
    assert counts == dict.fromkeys(STRESS, 0)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_plain_types_equal_reference(name):
    for x in STRESS.values():
        expected = libgguf.store_rows(x, layouts.BY_NAME[name].id).view(np.uint8).reshape(len(x), -1)
        np.testing.assert_array_equal(quantize(x, name), expected)


@pytest.mark.parametrize(("name", "weighted"), list(VECTORS), ids=lambda v: str(v))
def test_vectors(name, weighted):
    n = layouts.BY_NAME[name].n_elements
    i = np.arange(n)
    x = (((37 * i + i * i % 53) % 101 - 50) / 64).astype(np.float32)
    importance = (1 + 7 * i % 13).astype(np.float32) if weighted else None
    assert quantize(x, name, importance).tobytes().hex() == VECTORS[name, weighted]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_one_block_equals_the_same_block_among_many(name):
    """Chunking must not matter, nor may numpy sum a lone group in another order."""
    n = layouts.BY_NAME[name].n_elements
    x = np.random.default_rng(3).standard_normal((40, n)).astype(np.float32)
    w = np.random.default_rng(4).uniform(0.1, 2, n).astype(np.float32)
    for importance in (None, w):
        alone = np.stack([quantize(row, name, importance) for row in x])
        np.testing.assert_array_equal(alone, quantize(x, name, importance))


def test_many_real_sized_rows():
    """A quarter of a million blocks of the commonest type: none may differ."""
    x = np.random.default_rng(6).standard_normal((256, 8192)).astype(np.float32) * np.float32(0.02)
    for name in ("Q4_K", "Q6_K"):
        assert n_different(quantize(x, name), reference(x, name), name) == 0


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_round_trip_is_close(name):
    x = STRESS["normal"]
    error = np.sqrt(np.mean((dequantize(quantize(x, name), name) - x) ** 2))
    bits = layouts.BY_NAME[name].bits_per_weight
    assert error < 2.2 * 2.0 ** (1 - bits)


def test_leading_dimensions_and_torch():
    x = STRESS["normal"].reshape(2, 3, 4, N_COLUMNS)
    raw = quantize(x, "Q4_K", IMPORTANCE)
    assert raw.shape == (2, 3, 4, N_COLUMNS // 256 * 144)
    ours = quantize_torch(torch.from_numpy(x), "Q4_K", torch.from_numpy(IMPORTANCE))
    assert (ours.numpy() == raw).all()
    short = torch.from_numpy(x).bfloat16()
    assert (quantize_torch(short, "Q6_K").numpy() == quantize(short.float().numpy(), "Q6_K")).all()


def test_refusals():
    with pytest.raises(ConfigError, match="multiple of 256 for Q4_K"):
        quantize(np.zeros((2, 96), np.float32), "Q4_K")
    with pytest.raises(ConfigError, match=r"expected \(256,\)"):
        quantize(np.zeros((2, 256), np.float32), "Q4_K", np.ones(255, np.float32))
    with pytest.raises(UnsupportedError, match="Q8_K"):
        quantize(np.zeros((2, 256), np.float32), "Q8_K")




@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_trained_weights_equal_reference(name):
    """Slices of the bundled target's tensors, every kind of tensor in it."""
    file = open_gguf(bundled.target_path())
    for tensor in (t for t in file.tensors.values() if t.layout.is_quantized and not t.name.startswith("blk.1")):
        x = dequantize(np.array(file.read(tensor.name)[:24]), tensor.type_name)
        w = np.random.default_rng(tensor.columns).uniform(0.01, 10, tensor.columns).astype(np.float32)
        for importance in (None, w):
            assert n_different(quantize(x, name, importance), reference(x, name, importance), name) == 0, tensor.name
