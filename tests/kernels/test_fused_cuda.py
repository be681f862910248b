"""Chained products on CUDA: against float64, alone and among neighbours."""

import pytest
import torch
from random_blocks import random_raw

from ggufspec.kernels import fused
from ggufspec.kernels import matmul as mm
from ggufspec.kernels.matmul.decode import decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS = 1e-6


def weight(type_name: str, rows: int, columns: int, seed: int):
    raw = random_raw(type_name, rows, columns, seed)
    return mm.pack(raw, type_name, (rows, columns), "cuda"), decode(raw, type_name).cuda().double()


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()


def far(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("Q5_1", "IQ4_XS"), ("F16", "BF16")])
@pytest.mark.parametrize("D, F", [(1024, 2816), (768, 1280)])
def test_a_layer_of_chained_products_equals_float64(types, D, F):
    first, last = types
    (gate, g), (up, u) = weight(first, F, D, 1), weight(first, F, D, 2)
    (out, o), (down, d) = weight(first, D, 512, 3), weight(last, D, F, 4)
    pair, out, down = fused.join(gate, up), mm.fuse([out]), mm.fuse([down])
    assert pair.launch is not None
    w1, w2, w3 = ((torch.rand(D, device="cuda") + 0.5) * size for size in (1.0, 0.05, 1.0))
    x = torch.randn(130, D, device="cuda") * torch.logspace(-2, 3, 130, device="cuda")[:, None]
    a = torch.randn(130, out.n_columns, device="cuda")

    def layer(x: torch.Tensor, a: torch.Tensor):
        n = fused.enter(x, w1, EPS)
        mm.matmul(n, head)  # as a layer's first product does, which says what the stream is divided by
        x1, n1 = fused.added(x, mm.prepare(a), out, w2, EPS, n)
        x2, n2 = fused.added(x1, fused.gated(n1, pair), down, w3, EPS, n1)
        (logits,) = mm.matmul(n2, head)
        return x1, x2, logits

    packed, h = weight(last, 300, D, 5)
    head = mm.fuse([packed])
    x1 = x.double() + a.double() @ o.T
    n1 = normed(x1, w2)
    z = n1 @ g.T
    x2 = x1 + (z * torch.sigmoid(z) * (n1 @ u.T)) @ d.T
    expected = x1, x2, normed(x2, w3) @ h.T
    whole = layer(x, a)
    for name, y, e in zip(("attention", "stream", "logits"), whole, expected):
        assert y.isfinite().all(), name
        assert far(y, e) < 2e-3, (name, far(y, e))
    for n in (1, 2, 7, 8, 9, 16, 17, 33, 65, 129):  # any width, the same bits
        torch.full((1 << 20,), float("nan"), device="cuda")
        for y, part in zip(whole, layer(x[:n], a[:n])):
            assert torch.equal(y[:n], part), n


def test_geglu_and_splitting_a_pair():
    (gate, g), (up, u) = weight("Q4_K", 512, 512, 1), weight("Q4_K", 512, 512, 2)
    pair = fused.join(gate, up)
    x = torch.randn(300, 512, device="cuda")
    (id_, _) = weight("F16", 512, 512, 3)
    group = mm.fuse([id_])
    z = x.double() @ g.T
    expected = torch.nn.functional.gelu(z, approximate="tanh") * (x.double() @ u.T)
    want = expected @ decode(random_raw("F16", 512, 512, 3), "F16").cuda().double().T
    for n in (5, 300):
        (y,) = mm.matmul(fused.gated(mm.prepare(x[:n]), pair, gelu=True), group)
        assert far(y, want[:n]) < 2e-3, n
        split_gate, split_up = fused.split(mm.prepare(x[:n]), pair)
        assert far(split_gate, z[:n]) < 1e-3 and far(split_up, (x[:n].double() @ u.T)) < 1e-3, n


def test_rows_beyond_float16_keep_their_norm():
    D = 512
    (out, o), w = weight("Q8_0", D, D, 1), torch.ones(D, device="cuda")
    group = mm.fuse([out])
    for size in (1e-3, 1.0, 1e5, 1e9):
        x = torch.randn(3, D, device="cuda") * size
        n = fused.enter(x, w, 1e-30)
        (y,) = mm.matmul(n, group)
        assert far(y, (x.double() * x.double().square().mean(-1, keepdim=True).rsqrt()) @ o.T) < 1e-3, size
        a = torch.randn(3, D, device="cuda")
        total, n2 = fused.added(x, mm.prepare(a), group, w, 1e-30, n)
        want = x.double() + a.double() @ o.T
        (y,) = mm.matmul(n2, group)
        assert far(y, (want * want.square().mean(-1, keepdim=True).rsqrt()) @ o.T) < 2e-3, size
