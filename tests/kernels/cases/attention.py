"""Attention over every storage type, mask and width, its splits, and its output as a matmul's input."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels import kv as kvs
from ggufspec.kernels.attention import AttentionSpec, narrow, shape
from ggufspec.kernels.attention import plain as attention_plain
from ggufspec.kernels.attention import triton as attention_triton
from ggufspec.kernels.kv import plain as kv_plain
from ggufspec.kernels.kv.blocks import TYPES
from ggufspec.kernels.matmul.triton import prepare

from .comparing import case, close, on, one, random, same
from .kv import caches


def filled(device: str, type_k: str, type_v: str, n: int, n_cells: int, n_kv: int, hd: int, hd_v: int,
           ring: bool = False) -> tuple[kvs.KV, kvs.KV]:  # fmt: skip
    """The same cache on the CPU and on the device, slot 1 holding n random positions."""
    mine, theirs = caches(device, type_k, type_v, 2, n_cells, n_kv, hd, hd_v, ring=ring)
    k, v = random(1, n, n_kv, hd), random(1, n, n_kv, hd_v, seed=1)
    for start in range(0, n, 200):
        stop = min(n, start + 200)
        kv_plain.store(mine, k[:, start:stop], v[:, start:stop], torch.tensor([1]), torch.arange(start, stop)[None])
    theirs.k.copy_(mine.k), theirs.v.copy_(mine.v)
    return mine, theirs


@case
def attention_types(device: str, real: bool) -> None:
    n_kv, G, hd, hd_v, n, W = (4, 6, 256, 256, 3000, 8) if real else (2, 3, 64, 32, 300, 3)
    q = random(1, W, n_kv * G, hd)
    pairs = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_1"), ("q5_0", "q5_1"),
             ("iq4_nl", "f16"), ("iq4_nl", "iq4_nl")]  # fmt: skip
    for type_k, type_v in pairs:
        mine, theirs = filled(device, type_k, type_v, n, n, n_kv, hd, hd_v)
        spec = AttentionSpec(hd**-0.5)
        expected = attention_plain.attend(q, mine, one(1), one(n - W), one(W), spec)
        got = attention_triton.attend(q.to(device), theirs, one(1, device), one(n - W, device), one(W, device), spec)
        close(got, expected, 5e-6 if type_k == "f32" else 2e-3, f"{type_k} {type_v}")


@case
def attention_masks(device: str, real: bool) -> None:
    n_kv, G, hd, hd_v = (4, 6, 128, 128) if real else (2, 3, 64, 32)
    n = 2000 if real else 530
    sinks = torch.linspace(-2, 3, n_kv * G)
    for causal, window, sink, ring, n_past, n_rows, W in (
        (True, 0, True, False, n - 8, 5, 8),
        (True, 40, False, False, n - 8, 8, 8),
        (False, 40, True, False, n - 8, 8, 8),
        (True, 200, True, True, n - 8, 8, 8),
        (False, 200, False, True, n - 8, 8, 8),
        (True, 0, True, False, 255, 18, 20),
        (True, 0, True, False, 255, 40, 40),
        (True, 40, False, False, 300, 40, 50),
        (False, 200, True, True, n - 40, 40, 40),
    ):
        mine, theirs = filled(device, "f32", "f32", n_past + n_rows, 256 if ring else n, n_kv, hd, hd_v, ring)
        q_gate = random(1, W, n_kv * G, 2, hd_v)
        q = random(1, W, n_kv * G, hd)
        spec = AttentionSpec(hd**-0.5, causal, window, sinks if sink else None)
        dspec = AttentionSpec(hd**-0.5, causal, window, sinks.to(device) if sink else None)
        expected = attention_plain.attend(q, mine, one(1), one(n_past), one(n_rows), spec, q_gate[..., 1, :])
        got = attention_triton.attend(q.to(device), theirs, one(1, device), one(n_past, device), one(n_rows, device),
                                      dspec, q_gate.to(device)[..., 1, :])  # fmt: skip
        close(got[:, :n_rows], expected[:, :n_rows], 1e-5, f"{causal, window, sink, ring, n_past, n_rows, W}")
        assert bool(torch.isfinite(got).all())


@case
def attention_width(device: str, real: bool) -> None:
    """A row's bits do not depend on the rows beside it, nor on other slots."""
    pairs = [(name, name) for name in TYPES] + [("q8_0", "f16"), ("q4_0", "q8_0")] if real else [("q8_0", "q8_0")]
    sizes = [(4, 6, 256, range(1, 17)), (2, 8, 128, (1, 2, 3, 8, 16)), (8, 4, 128, (1, 3, 5)), (2, 1, 64, (1, 9, 16)),
             (1, 3, 80, (1, 3, 6))] if real else [(2, 3, 64, (2, 3))]  # fmt: skip
    for type_k, type_v in pairs:
        for n_kv, G, hd, widths in sizes if type_k in ("f16", "q8_0", "q4_0") else sizes[:1]:
            if hd % 32 and type_k not in ("f16", "bf16", "f32"):
                continue
            for window in (0, 100):
                width_alone(device, (type_k, type_v), window, n_kv, G, hd, widths, 2555 if real else 510)


def width_alone(
    device: str, types: tuple[str, str], window: int, n_kv: int, G: int, hd: int, widths: Iterable[int], start: int
) -> None:
    n, most = start + 16, max(widths)
    _, kv = filled(device, *types, n, n, n_kv, hd, hd)
    kv.k[0], kv.v[0] = kv.k[1], kv.v[1]
    spec = AttentionSpec(hd**-0.5, window=window)
    q = random(1, 16, n_kv * G, hd).to(device)
    what = f"{types} {n_kv}x{G} heads of {hd}, window {window}"

    def run(first: int, W: int) -> Tensor:
        counts = one(start + first, device), one(W, device)
        return attention_triton.attend(q[:, first : first + W], kv, one(1, device), *counts, spec)

    alone = torch.cat([run(i, 1) for i in range(most)], 1)
    for W in widths:
        same(run(0, W), alone[:, :W], f"{what}, width {W}")
    both = attention_triton.attend(
        torch.cat((q[:, :most].flip(1), q[:, :most])), kv, torch.tensor([0, 1], device=device),
        torch.tensor([7, start], device=device), torch.tensor([1, most], device=device), spec,
    )  # fmt: skip
    same(both[1:], alone, f"{what}, beside another slot")


@case
def attention_padding(device: str, real: bool) -> None:
    """Rows past a chunk's own change no bit of its results, in narrow batches and in wide ones, whatever they hold."""
    n_kv, G, hd = (4, 6, 256) if real else (2, 3, 64)
    n, n_past = 900, 700 if real else 70
    for type_name, window in (("f16", 0), ("q8_0", 100)) if real else (("q8_0", 0),):
        _, kv = filled(device, type_name, type_name, n, n, n_kv, hd, hd)
        spec = AttentionSpec(hd**-0.5, window=window)
        for n_rows, widths in ((5, (16,)), (18, (32,)), (40, (64, 96)), (100, (192,))) if real else (
            (5, (16,)), (40, (64,)),
        ):  # fmt: skip
            outs = []
            for W in (n_rows, *widths):
                q = random(1, max(widths), n_kv * G, hd)[:, :W].clone()
                q[:, n_rows:] *= -2.0
                counts = one(n_past, device), one(n_rows, device)
                out = attention_triton.attend(q.to(device), kv, one(1, device), *counts, spec)
                assert bool(torch.isfinite(out).all())
                outs.append(out[:, :n_rows])
            for got in outs[1:]:
                same(got, outs[0], f"{type_name} window {window}, {n_rows} rows")


@triton.jit
def split_cells_kernel(position_ptr, size_ptr, n_cells, MOST: tl.constexpr):
    i = tl.program_id(0)
    tl.store(size_ptr + i, narrow.split_cells(tl.load(position_ptr + i), n_cells, MOST))


@case
def attention_splits(device: str, real: bool) -> None:
    """Splits are as short as their number allows. How many a program takes, and rows beside a row that have shorter
    or longer ones, change no bit."""
    positions, n_cells = torch.tensor([-1, 0, 1023, 1024, 2047, 2048, 32767, 32768, 65535, 1 << 20]), 1 << 16
    sizes = torch.zeros(len(positions), dtype=torch.int32, device=device)
    split_cells_kernel[(len(positions),)](positions.int().to(device), sizes, n_cells, 16, enable_fp_fusion=True)
    same(sizes, torch.tensor([64, 64, 64, 128, 128, 192, 2048, 2112, 4096, 4096]), "cells of a split")
    n_kv, G, hd = (4, 6, 256) if real else (2, 3, 32)
    most, programs = shape.most_splits, shape.PROGRAMS
    assert [most(n) for n in (1, 2, 4, 8, 16, 64)] == [127, 127, 66, 33, 16, 16]
    if not real:
        shape.most_splits = lambda n_kv: 2
    border = 64 * shape.most_splits(n_kv) * 2  # of splits of two chunks and of three
    for type_name, causal, window, ring, n_cells in (
        ("q8_0", True, 0, False, border + 300), ("f16", False, 0, False, border + 300),
        ("f16", True, 70, False, border + 300), ("q8_0", True, border - 50, True, border),
        ("f16", False, border - 50, True, border),
    ):  # fmt: skip
        for W, before in ((16, 9), (32, 5)) if real else ((6, 3),):
            what = f"{type_name} causal {causal} window {window} ring {ring} width {W}"
            n_past = border - before
            mine, kv = filled(device, type_name, type_name, n_past + W, n_cells, n_kv, hd, hd, ring)
            q, spec = random(1, W, n_kv * G, hd), AttentionSpec(hd**-0.5, causal, window)
            expected = attention_plain.attend(q, mine, one(1), one(n_past), one(W), spec)
            outs = []
            for at_once in (programs, 3 * n_kv, n_kv):
                shape.PROGRAMS = at_once
                counts = on(device, one(1), one(n_past), one(W))
                outs.append(attention_triton.attend(q.to(device), kv, *counts, spec))
            shape.PROGRAMS = programs
            close(outs[0], expected, 2e-3, what)
            same(outs[1], outs[0], f"{what}, several splits a program"), same(outs[2], outs[0], f"{what}, one program")
            if causal and not ring:  # a ring that is full has lost what the first rows alone would see
                for i in range(W):
                    counts = on(device, one(1), one(n_past + i), one(1))
                    alone = attention_triton.attend(q[:, i : i + 1].to(device), kv, *counts, spec)
                    same(alone, outs[0][:, i : i + 1], f"{what}, row {i} alone")
    shape.most_splits = most


@case
def attention_prepared(device: str, real: bool) -> None:
    """A matmul's input: the same values in the kernels' order, rounded once; zeros past the columns; rows alone."""
    n_kv, G, hd, hd_v, n = (4, 6, 256, 256, 700) if real else (2, 3, 64, 32, 150)
    for type_name, W in (("q8_0", 5), ("f16", 3), ("f16", 20)):
        _, kv = filled(device, type_name, type_name, n, n, n_kv, hd, hd_v)
        q, gate = on(device, random(1, W, n_kv * G, hd), random(1, W, n_kv * G, hd_v) * 3)
        spec = AttentionSpec(hd**-0.5)

        def run(room, first: int, W: int, q=q, gate=gate, kv=kv, spec=spec):
            rows, counts = slice(first, first + W), on(device, one(1), one(n - 30 + first), one(W))
            return room(q[:, rows], kv, *counts, spec, gate[:, rows])

        got, plain = run(attention_triton.attend_prepared, 0, W), run(attention_triton.attend, 0, W)
        expected = prepare(plain.flatten(2).flatten(0, 1))
        assert got.n_columns == n_kv * G * hd_v and got.rows.shape == expected.rows.shape
        a, b = (x.rows.float() * x.scale[:, None] for x in (got, expected))
        close(a, b.cpu(), 1e-3 * plain.abs().max().item(), f"prepared {type_name}")
        if W <= 16:
            assert bool((got.scale == 16.0).all())
            alone = [run(attention_triton.attend_prepared, i, 1).rows for i in range(W)]
            same(torch.cat(alone), got.rows, "rows alone")
