"""Quantized matmul on the CPU: decoders against the gguf package, products against float64, rows alone."""

import gguf
import numpy as np
import pytest
import torch
from random_blocks import random_raw

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.kernels import matmul as mm
from ggufspec.kernels.matmul.decode import DECODERS, decode

TYPES = tuple(DECODERS)


@pytest.mark.parametrize("type_name", TYPES)
def test_decoder_equals_the_reference(type_name):
    raw = random_raw(type_name, 5, 512)
    expected = raw.view(torch.float32).numpy() if type_name == "F32" else gguf.quants.dequantize(
        raw.numpy(), gguf.GGMLQuantizationType[type_name]
    )
    assert np.array_equal(decode(raw, type_name).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("type_name", TYPES)
def test_product_equals_float64(type_name):
    raw = random_raw(type_name, 70, 512)
    weight = mm.pack(raw, type_name, (70, 512))
    x = torch.randn(19, 512, generator=torch.Generator().manual_seed(1))
    (y,) = mm.matmul(x, mm.fuse([weight]))
    expected = x.double() @ decode(raw, type_name).double().T
    assert y.shape == (19, 70) and y.dtype == torch.float32
    assert (y - expected).norm() / expected.norm() < 1e-6


def test_a_row_does_not_depend_on_its_neighbours():
    raw = random_raw("Q4_K", 96, 1280)
    group = mm.fuse([mm.pack(raw, "Q4_K", (96, 1280))])
    x = torch.randn(40, 1280, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([mm.matmul(x[i : i + 1], group)[0] for i in range(40)])
    for n in range(1, 41):
        assert torch.equal(mm.matmul(x[:n], group)[0], alone[:n]), n
        assert torch.equal(mm.matmul(x[40 - n :], group)[0], alone[40 - n :]), n


def test_a_group_gives_each_weight_its_own_product():
    types = ("Q4_K", "Q6_K", "Q8_0")
    weights = [mm.pack(random_raw(t, n, 256), t, (n, 256)) for t, n in zip(types, (48, 16, 80))]
    x = torch.randn(3, 256)
    together = mm.matmul(mm.prepare(x), mm.fuse(weights))
    for weight, y in zip(weights, together):
        assert torch.equal(y, mm.matmul(x, mm.fuse([weight]))[0])


@pytest.mark.parametrize("type_name", TYPES)
def test_without_dense_copy_nothing_changes(type_name):
    raw = random_raw(type_name, 33, 256)
    kept = mm.pack(raw, type_name, (33, 256))
    lean = mm.pack(raw, type_name, (33, 256), keep_dense=False)
    assert lean.dense is None and lean.n_bytes == raw.numel() < kept.n_bytes
    x = torch.randn(17, 256)
    assert torch.equal(mm.matmul(x, mm.fuse([kept]))[0], mm.matmul(x, mm.fuse([lean]))[0])
    ids = torch.tensor([32, 0, 7, 7])
    assert torch.equal(mm.gather(kept, ids), decode(raw, type_name)[ids])
    assert torch.equal(mm.gather(lean, ids), mm.gather(kept, ids))
    assert torch.equal(mm.unpack(kept), raw)


def test_bad_input_is_named():
    with pytest.raises(FileError, match="needs bytes"):
        mm.pack(random_raw("Q8_0", 4, 256), "Q8_0", (4, 512))
    with pytest.raises(FileError, match="multiple of its block"):
        mm.pack(torch.zeros(4, 144, dtype=torch.uint8), "Q4_K", (4, 300))
    with pytest.raises(UnsupportedError, match="I32"):
        mm.pack(torch.zeros(4, 4, dtype=torch.uint8), "I32", (4, 1))
    weight = mm.pack(random_raw("Q8_0", 4, 256), "Q8_0", (4, 256))
    with pytest.raises(ValueError, match="columns"):
        mm.matmul(torch.zeros(1, 512), mm.fuse([weight]))
    with pytest.raises(ValueError, match="one input"):
        mm.fuse([weight, mm.pack(random_raw("Q8_0", 4, 512), "Q8_0", (4, 512))])
