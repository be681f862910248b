"""Norms and activations into a matmul's input."""

from __future__ import annotations

import torch
from torch import Tensor

from ggufspec.kernels.matmul.triton import prepare
from ggufspec.kernels.norm import triton as norm_triton
from ggufspec.kernels.prepared import triton as prepared_triton

from .comparing import EPS, case, close, on, random, same


@case
def prepared(device: str, real: bool) -> None:
    """The fused kernels against the norm kernels followed by `prepare`: the same order, scale and nearly values."""

    def check(got, rows: Tensor, what: str) -> None:
        expected = prepare(rows.contiguous())
        assert got.n_columns == expected.n_columns and got.rows.shape == expected.rows.shape
        a, b = (x.rows.float() * x.scale[:, None] for x in (got, expected))
        limit = 1.2e-3 * rows.abs().max().item()
        close(a.cpu(), b.cpu(), limit, what)
        assert not (a - b)[b == 0].any(), f"{what}: not zero where it should be"

    T, K, n, d = (9, 5120, 48, 128) if real else (2, 300, 3, 100)
    x, y, w = on(device, random(T, K), random(T, K, seed=1) * 100, random(K))
    total, a = prepared_triton.add_rms_norm(x, y, w, EPS)
    same(total, x + y, "sum")
    check(a, norm_triton.rms_norm(x + y, w, EPS), "add_rms_norm")
    check(prepared_triton.add_rms_norm(x, None, w, EPS)[1], norm_triton.rms_norm(x, w, EPS), "rms_norm")
    alone = prepared_triton.add_rms_norm(x[1:2], y[1:2], w, EPS)[1]
    same(alone.rows, a.rows[1:2], "rows alone")
    for delta, expected in ((y, x + y), (None, x)):
        total, normed, kept = prepared_triton.add_rms_norm_kept(x, delta, w, EPS)
        same(total, expected.cpu(), "sum, norm kept")
        close(normed, norm_triton.rms_norm(expected, w, EPS).cpu(), 1e-5, "norm kept")
        check(kept, normed, "prepared beside a kept norm")
    pair = torch.cat((norm_triton.rms_norm(x, w, EPS), norm_triton.rms_norm(y, 3 * w, EPS)), 1)
    check(prepared_triton.rms_norm_pair(x, y, w, 3 * w, EPS), pair, "rms_norm_pair")
    joined = torch.cat((x, y), 1)
    check(prepared_triton.swiglu(joined[:, :K], joined[:, K:]), norm_triton.swiglu(x, y), "swiglu")
    check(prepared_triton.geglu(x, y), norm_triton.geglu(x, y), "geglu")
    o, z, g = on(device, random(T, n, d), random(T, n, d, seed=1), random(d))
    gated = norm_triton.gated_norm(o, z, g, EPS).flatten(1)
    check(prepared_triton.gated_norm(o, z, g, EPS), gated, "gated_norm")
    K = 1024 if real else 304
    halves = on(device, random(T, K), random(T, K, seed=1))
    columns = torch.stack([half.unflatten(1, (-1, 8)) for half in halves], 2).flatten(1)
    columns = torch.cat((columns, columns[:, :5] + torch.nan), 1)  # a launch's padding rows come last
    check(prepared_triton.gated_columns(columns, K, 8, False), norm_triton.swiglu(*halves), "swiglu in turn")
    check(prepared_triton.gated_columns(columns, K, 8, True), norm_triton.geglu(*halves), "geglu in turn")


@case
def prepared_wide(device: str, real: bool) -> None:
    """Rows of batches wider than the narrow kernel takes have one scale, and the values of narrow ones."""
    T, K = 193, 5120 if real else 256
    x, w = on(device, random(T, K), random(K))
    a = prepared_triton.add_rms_norm(x, None, w, EPS)[1]
    expected = prepared_triton.add_rms_norm(x[:2], None, w, EPS)[1]
    assert a.fixed == 16.0 and expected.fixed is None
    close(a.rows[:2].float().cpu() * a.fixed, (expected.rows.float() * expected.scale[:, None]).cpu(), 6e-3)
    assert prepared_triton.swiglu(x, x).fixed == 16.0
