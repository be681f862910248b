"""The packed cache: bytes against the gguf package, rotation against the matrix, scatter, rings, save and restore."""

import gguf
import numpy as np
import oracles
import pytest
import torch

from ggufspec.errors import ConfigError
from ggufspec.kernels import kv as kvs
from ggufspec.kernels.kv import blocks, hadamard
from ggufspec.kernels.kv.plain import cell_positions

# largest error over the largest magnitude of a block that the type's rounding allows
ERROR = {"f32": 0, "f16": 5e-4, "bf16": 4e-3, "q8_0": 0.5 / 127 + 1e-3, "q5_1": 1 / 31 + 1e-3, "q5_0": 1 / 15,
         "q4_1": 1 / 15 + 1e-3, "q4_0": 1 / 7.9, "iq4_nl": 0.12}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("type_name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_bytes_are_the_file_formats(type_name):
    x = random(60, 128)
    x[3, 32:64] = 0.0
    row = blocks.encode(x, type_name)
    assert row.shape[-1] == blocks.layout_of(type_name).row_bytes(128)
    raw = blocks.to_file_blocks(row, type_name, 128).numpy()
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    assert np.array_equal(raw, gguf.quants.quantize(x.numpy(), kind))
    assert np.array_equal(gguf.quants.dequantize(raw, kind), blocks.decode(row, type_name, 128).numpy())


def test_q8_0_rounds_ties_to_even():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    assert blocks.encode(x, "q8_0")[0, :4].view(torch.int8).tolist() == [127, 0, 2, -2]


def test_iq4_nl_single_pass():
    x = random(20, 32)
    row = blocks.encode(x, "iq4_nl")
    raw = blocks.to_file_blocks(row, "iq4_nl", 32).numpy()
    decoded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.IQ4_NL)
    assert np.array_equal(decoded, blocks.decode(row, "iq4_nl", 32).numpy())
    table = np.array(blocks.IQ4_NL_VALUES, dtype=np.float64)
    for i, block in enumerate(x.double().numpy()):
        scale = block[np.abs(block).argmax()] / -127
        codes = table[np.abs(block[:, None] / scale - table).argmin(-1)]
        d = (block**3 * codes).sum() / (block**2 * codes**2).sum()
        assert np.allclose(decoded[i], np.float16(d) * codes, rtol=1e-3)


@pytest.mark.parametrize("type_name", kvs.TYPES)
def test_zeros_stay_zero(type_name):
    assert (blocks.decode(blocks.encode(torch.zeros(2, 64), type_name), type_name, 64) == 0).all()


def test_rotation_sizes():
    sizes = {hd: (hadamard.rotation_size("q8_0", hd, True), hadamard.rotation_size("q8_0", hd, False))
             for hd in (32, 64, 96, 128, 192, 256)}  # fmt: skip
    assert sizes == {32: (0, 0), 64: (64, 64), 96: (0, 0), 128: (128, 64), 192: (64, 64), 256: (256, 64)}
    assert hadamard.rotation_size("f16", 128, True) == 0


@pytest.mark.parametrize("n", [64, 128, 256])
def test_rotation_is_the_hadamard_matrix(n):
    x = random(5, 2, 256)
    expected = (x.double().view(5, 2, -1, n) @ oracles.hadamard(n)).view(5, 2, 256)
    assert torch.allclose(hadamard.rotate(x, n).double(), expected, atol=1e-5)
    assert torch.equal(hadamard.rotate(x[2:3], n), hadamard.rotate(x, n)[2:3])


@pytest.mark.parametrize("type_name", kvs.TYPES)
def test_store_and_load(type_name):
    kv = kvs.allocate(type_name, type_name, 3, 300, 2, 128, 64, "cpu")
    assert kv.n_cells == 512
    k, v = random(2, 6, 2, 128), random(2, 6, 2, 64, seed=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1]])
    kvs.store(kv, k, v, torch.tensor([2, 0]), positions)
    for slot, entry, n in ((2, 0, 6), (0, 1, 3)):
        for got, x, rotation in zip(kvs.load(kv, slot, n), (k, v), (kv.rotation_k, kv.rotation_v)):
            limit = hadamard.rotate(x[entry, :n], rotation).abs().max().item() * ERROR[type_name]
            error = hadamard.rotate(got - x[entry, :n], rotation).abs().max().item()
            assert error <= limit + 1e-7, (error, limit)
    assert (kv.k[0, 3:] == 0).all() and (kv.k[1] == 0).all()


def test_a_ring_wraps():
    kv = kvs.allocate("f32", "f32", 1, 256, 1, 32, 32, "cpu", ring=True)
    x = random(1, 300, 1, 32)
    slots = torch.tensor([0])
    for start in range(0, 300, 50):
        kvs.store(kv, x[:, start : start + 50], x[:, start : start + 50], slots, torch.arange(start, start + 50)[None])
    cells = cell_positions(kv, torch.tensor([300]))[0]
    assert sorted(cells.tolist()) == list(range(44, 300))
    assert torch.equal(kv.k[0], x[0, cells])


def test_positions_past_the_end_are_refused():
    kv = kvs.allocate("f16", "f16", 1, 256, 1, 32, 32, "cpu")
    with pytest.raises(IndexError, match="256 cells"):
        kvs.store(kv, *(random(1, 1, 1, 32),) * 2, torch.tensor([0]), torch.tensor([[256]]))


def test_save_and_restore():
    kv, other = (kvs.allocate("q4_1", "bf16", 2, 256, 2, 64, 64, "cpu") for _ in range(2))
    x = random(1, 9, 2, 64)
    kvs.store(kv, x, x, torch.tensor([1]), torch.arange(9)[None])
    saved = kvs.save(kv, 1, 9)
    assert kvs.fits(other, saved)
    kvs.restore(other, 0, saved)
    assert all(torch.equal(a, b) for a, b in zip(kvs.load(kv, 1, 9), kvs.load(other, 0, 9)))
    assert not kvs.fits(kvs.allocate("q4_1", "f16", 2, 256, 2, 64, 64, "cpu"), saved)
    assert not kvs.fits(kvs.allocate("q4_1", "bf16", 2, 256, 1, 64, 64, "cpu"), saved)


def test_bad_types_are_refused():
    with pytest.raises(ConfigError, match="q6_0.*f32, f16"):
        kvs.allocate("q6_0", "f16", 1, 1, 1, 64, 64, "cpu")
    with pytest.raises(ConfigError, match="divisible by 32.*48"):
        kvs.allocate("f16", "q8_0", 1, 1, 1, 64, 48, "cpu")


def test_a_saved_ring_fits_only_a_ring_of_its_size() -> None:
    small, large = (kvs.allocate("f16", "f16", 1, n, 2, 64, 64, "cpu", ring=True) for n in (256, 512))
    saved = kvs.save(small, 0, 10)
    assert kvs.fits(small, saved) and not kvs.fits(large, saved)


@pytest.mark.parametrize("n_past", [0, 1, 250, 256, 257, 500, 511, 512, 700])
def test_a_saved_ring_holds_its_own_positions_alone(n_past: int) -> None:
    """Zeros where an earlier text, rejected drafts or nothing at all stands; what attention may still see is there."""
    window, n_beside = 240, 16
    ring = kvs.allocate("f32", "f16", 2, window + n_beside, 2, 32, 32, "cpu", ring=True)
    ring.k.fill_(7.0), ring.v.fill_(7.0)
    x = random(1, n_past + n_beside, 2, 32)
    for start in range(0, n_past + n_beside, 50):  # the last n_beside are a draft's
        part = x[:, start : start + 50]
        kvs.store(ring, part, part, torch.tensor([1]), torch.arange(start, start + part.shape[1])[None])
    first = max(n_past - window, 0)
    want = torch.zeros(256, 2, 32)
    want[torch.arange(first, n_past) % 256] = x[0, first:n_past]
    for saved in (kvs.save(ring, 1, n_past, n_beside), kvs.copy(ring, 1, n_past, n_beside)):
        assert torch.equal(saved[0], want) and torch.equal(saved[1], want.half())
    assert not (ring.k == 0).any()  # the ring itself stays as it is
