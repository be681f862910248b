"""Quantized matmul on CUDA: against float64, alone and among neighbours, for every type."""

import pytest
import torch
from random_blocks import random_raw

from ggufspec.kernels import matmul as mm
from ggufspec.kernels.matmul import wide
from ggufspec.kernels.matmul.decode import DECODERS, decode
from ggufspec.kernels.matmul.repack import FORMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an element nothing wrote shows."""
    for size in (1 << 12, 1 << 16, 1 << 20):
        torch.full((size,), float("nan"), device="cuda")


@pytest.mark.parametrize("rows, columns", [(64, 256), (200, 768), (512, 5120), (48, 6144)])
@pytest.mark.parametrize("type_name", FORMS)
def test_narrow_product_equals_float64(type_name, rows, columns):
    raw = random_raw(type_name, rows, columns, seed=rows)
    weight = mm.pack(raw, type_name, (rows, columns), "cuda")
    assert torch.equal(mm.unpack(weight), raw)
    group = mm.fuse([weight])
    x = torch.randn(16, columns, device="cuda")
    expected = x.double() @ decode(raw, type_name).cuda().double().T
    for n in (1, 2, 7, 8, 9, 16):
        poison()
        (y,) = mm.matmul(x[:n], group)
        assert y.shape == (n, rows) and y.dtype == torch.float32 and y.is_contiguous()
        error = float((y - expected[:n]).norm() / expected[:n].norm())
        assert error < 1e-3, (n, error)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0", "Q5_1"])
def test_a_row_does_not_depend_on_its_neighbours(type_name):
    raw = random_raw(type_name, 320, 5120)
    group = mm.fuse([mm.pack(raw, type_name, (320, 5120), "cuda")])
    x = torch.randn(16, 5120, device="cuda")
    alone = torch.cat([mm.matmul(x[i : i + 1], group)[0] for i in range(16)])
    for n in range(1, 17):
        assert torch.equal(mm.matmul(x[:n], group)[0], alone[:n]), n
        assert torch.equal(mm.matmul(x[16 - n :], group)[0], alone[16 - n :]), n


@pytest.mark.parametrize("type_name", FORMS)
def test_prompt_pieces_up_to_192_rows_have_the_bits_of_single_rows(type_name):
    raw = random_raw(type_name, 200, 2048)
    group = mm.fuse([mm.pack(raw, type_name, (200, 2048), "cuda")])
    x = torch.randn(192, 2048, device="cuda")
    alone = torch.cat([mm.matmul(x[i : i + 1], group)[0] for i in range(192)])
    for n in (17, 31, 33, 64, 100, 192):
        poison()
        assert torch.equal(mm.matmul(x[:n], group)[0], alone[:n]), n


@pytest.mark.parametrize("type_name", DECODERS)
def test_every_type_at_every_width(type_name):
    raw = random_raw(type_name, 150, 1024)
    weight = mm.pack(raw, type_name, (150, 1024), "cuda")
    group = mm.fuse([weight])
    x = torch.randn(500, 1024, device="cuda")
    dense = decode(raw, type_name).cuda()
    alone = mm.matmul(x[:1], group)[0]
    for n in (1, 3, 16, 40, 300, 500):
        poison()
        (y,) = mm.matmul(x[:n], group)
        expected = x[:n].double() @ dense.double().T
        assert float((y - expected).norm() / expected.norm()) < 1e-3, n
        if n <= 192:
            assert torch.equal(y[:1], alone), n
    ids = torch.tensor([149, 0, 7, 7], device="cuda")
    assert torch.equal(mm.gather(group.weights[0], ids), dense[ids])
    assert torch.equal(mm.unpack(group.weights[0]), raw)


def test_captured_in_a_graph_the_bits_are_the_same():
    raw = random_raw("Q4_K", 5120, 2048)
    group = mm.fuse([mm.pack(raw, "Q4_K", (5120, 2048), "cuda")])
    x = torch.randn(8, 2048, device="cuda")
    expected = mm.matmul(x, group)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            (y,) = mm.matmul(x, group)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


def test_a_group_gives_each_weight_its_own_product():
    shapes = (("Q4_K", 320), ("Q6_K", 64), ("Q4_K", 48), ("Q4_K", 48))
    raws = [random_raw(t, n, 1024, seed=k) for k, (t, n) in enumerate(shapes)]
    group = mm.fuse([mm.pack(r, t, (n, 1024), "cuda") for r, (t, n) in zip(raws, shapes)])
    x = torch.randn(5, 1024, device="cuda")
    for y, raw, weight, (t, n) in zip(mm.matmul(x, group), raws, group.weights, shapes):
        expected = x.double() @ decode(raw, t).cuda().double().T
        assert y.shape == (5, n)
        assert float((y - expected).norm() / expected.norm()) < 1e-3
        assert torch.equal(mm.unpack(weight), raw)


def test_large_and_small_activations_keep_their_precision():
    raw = random_raw("Q4_K", 64, 512)
    group = mm.fuse([mm.pack(raw, "Q4_K", (64, 512), "cuda")])
    w = decode(raw, "Q4_K").cuda().double()
    for size in (1e-20, 1e-4, 1e5, 1e20):
        x = torch.randn(3, 512, device="cuda") * size
        (y,) = mm.matmul(x, group)
        expected = x.double() @ w.T
        assert float((y - expected).norm() / expected.norm()) < 1e-3, size
    assert not mm.matmul(torch.zeros(1, 512, device="cuda"), group)[0].any()


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q8_0", "F16"])
def test_many_rows_are_as_precise_at_every_usual_size(type_name):
    shapes = (320, 48)  # two weights of one launch, padded
    raws = [random_raw(type_name, n, 1024, seed=k) for k, n in enumerate(shapes)]
    group = mm.fuse([mm.pack(r, type_name, (n, 1024), "cuda") for r, n in zip(raws, shapes)])
    for size in (1e-2, 1.0, 1e4):
        x = torch.randn(300, 1024, device="cuda") * size
        poison()
        for y, raw in zip(mm.matmul(x, group), raws):
            expected = x.double() @ decode(raw, type_name).cuda().double().T
            assert float((y - expected).norm() / expected.norm()) < 6e-4, size


def test_many_rows_prepared_one_by_one():
    """Rows that were prepared for the narrow kernel, each with a scale, may meet the wide product too."""
    from ggufspec.kernels.matmul import triton

    raw = random_raw("Q4_K", 128, 512)
    group = mm.fuse([mm.pack(raw, "Q4_K", (128, 512), "cuda")])
    x = torch.randn(200, 512, device="cuda") * torch.logspace(-6, 6, 200, device="cuda")[:, None]
    (y,) = mm.matmul(triton.prepare(x), group)
    expected = x.double() @ decode(raw, "Q4_K").cuda().double().T
    assert float(((y - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 1e-3


def test_a_graph_keeps_the_buffer_of_unpacked_weights_that_it_writes_to():
    """A larger product takes a larger buffer: what the graph had recorded stays its own, and its results right."""
    small, large = (mm.pack(random_raw("Q4_K", n, 2048), "Q4_K", (n, 2048), "cuda") for n in (512, 4096))
    x = torch.randn(500, 2048, device="cuda")
    wide.scratch_of.pop(x.device, None)
    expected = mm.matmul(x, mm.fuse([small]))[0].clone()
    graph = torch.cuda.CUDAGraph()
    group = mm.fuse([small])
    with torch.cuda.graph(graph):
        (y,) = mm.matmul(x, group)
    address = wide.scratch_of[x.device].data_ptr()
    mm.matmul(x, mm.fuse([large]))
    assert wide.scratch_of[x.device].data_ptr() != address
    poison()
    taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(y, expected)
    assert all(t.isnan().all() for t in taken)
