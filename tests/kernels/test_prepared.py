"""On the CPU the fused functions are their parts, bit for bit."""

import torch

from ggufspec.kernels import norm, prepared
from ggufspec.kernels.matmul import prepare

EPS = 1e-6


def test_equal_their_parts():
    x, y, w = torch.randn(2, 3, 96), torch.randn(2, 3, 96), torch.randn(96)
    total, a = prepared.add_rms_norm(x, y, w, EPS)
    expected_total, normed = norm.add_rms_norm(x, y, w, EPS)
    assert torch.equal(total, expected_total)
    assert a.n_columns == 96 and torch.equal(a.rows, prepare(normed.view(6, 96)).rows)
    same, a = prepared.add_rms_norm(x, None, w, EPS)
    assert same is x and torch.equal(a.rows, prepare(norm.rms_norm(x, w, EPS).view(6, 96)).rows)
    assert torch.equal(prepared.swiglu(x, y).rows, prepare(norm.swiglu(x, y).view(6, 96)).rows)
    assert torch.equal(prepared.geglu(x, y).rows, prepare(norm.geglu(x, y).view(6, 96)).rows)
    o, z = x.view(2, 3, 4, 24), y.view(2, 3, 4, 24)
    gated = norm.gated_norm(o, z, w[:24], EPS)
    assert torch.equal(prepared.gated_norm(o, z, w[:24], EPS).rows, prepare(gated.view(6, 96)).rows)


def test_kept_norms_and_pairs():
    x, y, w = torch.randn(2, 3, 96), torch.randn(2, 3, 96), torch.randn(96)
    for delta, expected in ((y, x + y), (None, x)):
        total, normed, a = prepared.add_rms_norm_kept(x, delta, w, EPS)
        assert torch.equal(total, expected) and torch.equal(normed, norm.rms_norm(expected, w, EPS))
        assert a.n_columns == 96 and torch.equal(a.rows, prepare(normed.view(6, 96)).rows)
    both = torch.cat((norm.rms_norm(x, w, EPS), norm.rms_norm(y, 2 * w, EPS)), -1)
    a = prepared.rms_norm_pair(x, y, w, 2 * w, EPS)
    assert a.n_columns == 192 and torch.equal(a.rows, prepare(both.view(6, 192)).rows)


def test_columns_of_gate_and_up_in_turn():
    x, y = torch.randn(3, 96), torch.randn(3, 96)
    columns = torch.stack((x.unflatten(1, (-1, 8)), y.unflatten(1, (-1, 8))), 2).flatten(1)
    columns = torch.cat((columns, torch.randn(3, 7)), 1)
    assert torch.equal(prepared.gated_columns(columns, 96, 8).rows, prepared.swiglu(x, y).rows)
    assert torch.equal(prepared.gated_columns(columns, 96, 8, gelu=True).rows, prepared.geglu(x, y).rows)
