"""Triton kernels against their twins, on any device: run by the CPU interpreter at small sizes (`test_triton.py`)
and by a card at real ones (`tests/gpu/test_kernels.py`).

A case takes the device and whether sizes are real; it raises AssertionError on a difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from random_blocks import random_raw
from torch import Tensor

from ggufspec.kernels import gdn
from ggufspec.kernels import kv as kvs
from ggufspec.kernels.attention import AttentionSpec, narrow
from ggufspec.kernels.attention import plain as attention_plain
from ggufspec.kernels.attention import triton as attention_triton
from ggufspec.kernels.carry import plain as carry_plain
from ggufspec.kernels.carry import triton as carry_triton
from ggufspec.kernels.conv import plain as conv_plain
from ggufspec.kernels.conv import triton as conv_triton
from ggufspec.kernels.gdn import GdnSpec, GdnWeights, chunked
from ggufspec.kernels.gdn import plain as gdn_plain
from ggufspec.kernels.gdn import prefill as gdn_prefill
from ggufspec.kernels.gdn import prompt as gdn_prompts
from ggufspec.kernels.gdn import scan as gdn_scan
from ggufspec.kernels.gdn import step as gdn_kernel
from ggufspec.kernels.kv import plain as kv_plain
from ggufspec.kernels.kv import triton as kv_triton
from ggufspec.kernels.matmul import Activation, fuse, pack, repack
from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.matmul.triton import multiply, prepare
from ggufspec.kernels.matmul.weight import PackedWeight, WeightGroup
from ggufspec.kernels.norm import plain as norm_plain
from ggufspec.kernels.norm import triton as norm_triton
from ggufspec.kernels.prepared import triton as prepared_triton
from ggufspec.kernels.rope import RopeSpec
from ggufspec.kernels.rope import plain as rope_plain
from ggufspec.kernels.rope import triton as rope_triton
from ggufspec.kernels.rows import plain as rows_plain
from ggufspec.kernels.rows import triton as rows_triton
from ggufspec.kernels.select import plain as select_plain
from ggufspec.kernels.select import triton as select_triton

CASES: dict[str, Callable[[str, bool], None]] = {}
EPS = 1e-6


def case(function: Callable[[str, bool], None]) -> Callable[[str, bool], None]:
    CASES[function.__name__] = function
    return function


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(got: Tensor, expected: Tensor, limit: float, what: str = "") -> None:
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    error = (got.cpu().double() - expected.double()).abs().max().item()
    assert error <= limit, f"{what}: off by {error}, limit {limit}"


def same(got: Tensor, expected: Tensor, what: str = "") -> None:
    different = int((got.cpu() != expected.cpu()).sum())
    assert got.shape == expected.shape and different == 0, f"{what}: {different} of {got.numel()} differ"


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)


# ---- norm, rope


@case
def norms(device: str, real: bool) -> None:
    for T, D in ((1, 5120), (7, 5120), (48 * 8, 128)) if real else ((3, 100), (9, 64)):
        x, y, w = random(T, D), random(T, D, seed=1), random(D)
        dx, dy, dw = on(device, x, y, w)
        close(norm_triton.rms_norm(dx, dw, EPS), norm_plain.rms_norm(x, w, EPS), 1e-5, "rms_norm")
        total, normed = norm_triton.add_rms_norm(dx, dy, dw, EPS)
        same(total, x + y, "sum")
        close(normed, norm_plain.rms_norm(x + y, w, EPS), 1e-5, "add_rms_norm")
        close(norm_triton.gated_norm(dx, dy, dw, EPS), norm_plain.gated_norm(x, y, w, EPS), 2e-5, "gated_norm")
        for name in ("swiglu", "geglu", "sigmoid_gate"):
            close(getattr(norm_triton, name)(dx, dy), getattr(norm_plain, name)(x, y), 1e-5, name)
        for start, n in ((0, 1), (T // 2, max(1, T // 3))):
            part = norm_triton.add_rms_norm(dx[start : start + n], dy[start : start + n], dw, EPS)[1]
            same(part, normed[start : start + n], "rows alone")


@case
def rope(device: str, real: bool) -> None:
    W, H, hd = (16, 24, 256) if real else (3, 2, 24)
    for n_rot, pairing in ((64 if real else 16, "neox"), (hd, "norm")):
        spec = RopeSpec(n_rot, pairing=pairing)
        positions = torch.arange(2 * W).view(2, W) * 1001
        x = random(2, W, H, hd)
        cos, sin = rope_plain.tables(positions, spec)
        got = rope_triton.tables(positions.to(device), spec)
        close(got[0], cos, 1e-6, "cos"), close(got[1], sin, 1e-6, "sin")
        close(rope_triton.rotate(x.to(device), *on(device, cos, sin), spec), rope_plain.rotate(x, cos, sin, spec),
              1e-5, "rotate")  # fmt: skip


# ---- cache


def caches(device: str, type_k: str, type_v: str, *shape: int, ring: bool = False) -> tuple[kvs.KV, kvs.KV]:
    return (kvs.allocate(type_k, type_v, *shape, "cpu", ring=ring),
            kvs.allocate(type_k, type_v, *shape, device, ring=ring))  # fmt: skip


@case
def store(device: str, real: bool) -> None:
    W, n_kv, hd = (16, 4, 256) if real else (3, 2, 128)
    slots = torch.tensor([2, 0])
    for type_name in kvs.TYPES:
        for ring in (False, True):
            mine, theirs = caches(device, type_name, type_name, 3, 256, n_kv, hd, 64, ring=ring)
            k, v = random(2, W, n_kv, hd) * 2, random(2, W, n_kv, 64)
            k[0, 0, 0, :32] = 0.0
            positions = torch.stack((torch.arange(W) + (1000 if ring else 100), torch.arange(W)))
            positions[1, 2:] = -1
            kv_plain.store(mine, k, v, slots, positions)
            kv_triton.store(theirs, *on(device, k, v, slots, positions))
            if type_name == "bf16" and device == "cpu":  # the interpreter cuts off where a card rounds
                close(theirs.k.float(), mine.k.float(), 0.04, type_name)
                continue
            allowed = 2 if type_name == "iq4_nl" else 0  # its scale is a sum, taken in another order
            for a, b in ((mine.k, theirs.k), (mine.v, theirs.v)):
                different = int((a != b.cpu()).sum())
                assert different <= allowed * a.numel() // 1000, f"{type_name}: {different} bytes differ"


@case
def norm_rope_store(device: str, real: bool) -> None:
    B, W, H, n_kv, hd = (2, 8, 24, 4, 256) if real else (2, 2, 4, 2, 64)
    spec = RopeSpec(64 if real else 16)
    q_gate, k, v = random(B, W, H, 2, hd), random(B, W, n_kv, hd), random(B, W, n_kv, hd, seed=1)
    weights = random(hd), random(hd, seed=1)
    slots, positions = torch.tensor([1, 0]), torch.arange(B * W).view(B, W)
    tables = rope_plain.tables(positions, spec)
    for type_name in ("f32", "f16", "q8_0"):
        for norms in (None, (*weights, EPS)):
            mine, theirs = caches(device, type_name, type_name, 2, 256, n_kv, hd, hd)
            expected = kv_plain.norm_rope_store(mine, q_gate[..., 0, :], k, v, slots, positions, norms,
                                                (*tables, spec))  # fmt: skip
            dnorms = None if norms is None else (*on(device, *weights), EPS)
            dq, dk, dv, ds, dp, cos, sin = on(device, q_gate, k, v, slots, positions, *tables)
            got = kv_triton.norm_rope_store(theirs, dq[..., 0, :], dk, dv, ds, dp, dnorms, (cos, sin, spec))
            close(got, expected, 2e-5, f"q {type_name}")
            alone = kvs.allocate(type_name, type_name, 2, 256, n_kv, hd, hd, device)
            kv_triton.store_raw(alone, dk, dv, ds, dp, None if dnorms is None else dnorms[1:], (cos, sin, spec))
            same(alone.k, theirs.k.cpu(), "keys without queries"), same(alone.v, theirs.v.cpu(), "values alone")
            for slot, entry in ((1, 0), (0, 1)):
                first = int(positions[entry, 0])
                for a, b in zip(kv_plain.decode_cells(mine, slot, first, first + W),
                                kv_plain.decode_cells(theirs, slot, first, first + W)):  # fmt: skip
                    close(b, a, {"f32": 2e-5, "f16": 5e-3, "q8_0": 0.06}[type_name], f"cache {type_name}")


# ---- attention


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


def one(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor([value], device=device)


@case
def attention_types(device: str, real: bool) -> None:
    n_kv, G, hd, hd_v, n, W = (4, 6, 256, 256, 3000, 8) if real else (2, 3, 64, 32, 300, 3)
    q = random(1, W, n_kv * G, hd)
    pairs = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_1"), ("q5_0", "q5_1"),
             ("iq4_nl", "f16")]  # fmt: skip
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
        (True, 0, True, False, 255, 20, 20),
        (True, 40, False, False, 300, 40, 50),
        (False, 200, True, True, n - 30, 30, 30),
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
    n_kv, G, hd = (4, 6, 256) if real else (2, 3, 64)
    widths = range(1, 17) if real else (2, 3)
    for type_name in ("f16", "q8_0", "bf16", "f32") if real else ("q8_0",):
        for window in (0, 100):
            n = 3000 if real else 515
            _, kv = filled(device, type_name, type_name, n, n, n_kv, hd, hd)
            kv.k[0], kv.v[0] = kv.k[1], kv.v[1]
            spec = AttentionSpec(hd**-0.5, window=window)
            start = 510 if not real else 2555
            q = random(1, 16, n_kv * G, hd).to(device)

            def run(first: int, W: int, q=q, kv=kv, spec=spec, start=start) -> Tensor:
                rows = q[:, first : first + W]
                counts = one(start + first, device), one(W, device)
                return attention_triton.attend(rows, kv, one(1, device), *counts, spec)

            alone = torch.cat([run(i, 1) for i in range(max(widths))], 1)
            for W in widths:
                same(run(0, W), alone[:, :W], f"{type_name} window {window} width {W}")
            W = max(widths)
            both = attention_triton.attend(
                torch.cat((q[:, :W].flip(1), q[:, :W])), kv, torch.tensor([0, 1], device=device),
                torch.tensor([7, start], device=device), torch.tensor([1, W], device=device), spec,
            )  # fmt: skip
            same(both[1:], alone[:, :W], f"{type_name} window {window} beside another slot")


@triton.jit
def splits_kernel(cell_ptr, split_ptr, start_ptr, next_ptr):
    i = tl.program_id(0)
    split = narrow.split_of(tl.load(cell_ptr + i))
    tl.store(split_ptr + i, split)
    tl.store(start_ptr + i, narrow.split_start(split))
    tl.store(next_ptr + i, narrow.split_start(split + 1))


@case
def attention_splits(device: str, real: bool) -> None:
    """Splits hold every cell once; their number, and how many a program takes, change no bit."""
    cells = torch.tensor([0, 63, 64, 4095, 4096, 4223, 4224, 12287, 12288, 28671, 28672, 61439, 61440, 1 << 20])
    out = torch.zeros(3, len(cells), dtype=torch.int32, device=device)
    splits_kernel[(len(cells),)](cells.int().to(device), *out, enable_fp_fusion=True)
    split, start, stop = out.cpu().long()
    assert bool(((start <= cells) & (cells < stop)).all()), (start, stop)
    same(split, torch.tensor([narrow.count_splits(int(cell) + 1) - 1 for cell in cells]), "splits")
    same(stop - start, torch.tensor([64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 512, 512, 1024, 16384]), "sizes")
    n_kv, G, hd, n, W = (4, 6, 256, 20000, 16) if real else (1, 3, 32, 4300, 2)
    mine, kv = filled(device, "q8_0", "f16", n, n, n_kv, hd, hd)
    q, spec = random(1, W, n_kv * G, hd), AttentionSpec(hd**-0.5)
    expected = attention_plain.attend(q, mine, one(1), one(n - W), one(W), spec)
    all_programs = narrow.PROGRAMS
    outs = []
    for programs in (all_programs, 3, 7):
        narrow.PROGRAMS = programs * n_kv
        outs.append(attention_triton.attend(q.to(device), kv, *on(device, one(1), one(n - W), one(W)), spec))
    narrow.PROGRAMS = all_programs
    close(outs[0], expected, 2e-3, "many splits")
    same(outs[1], outs[0], "programs of several splits"), same(outs[2], outs[0], "programs of several splits")


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


# ---- gated DeltaNet


def gdn_setup(real: bool) -> tuple[GdnSpec, GdnWeights]:
    spec = GdnSpec(16, 48, 128, 4, EPS) if real else GdnSpec(2, 4, 16, 4, EPS)
    return spec, gdn_weights(spec)


def gdn_weights(spec: GdnSpec) -> GdnWeights:
    conv = random(spec.conv_dim, spec.conv_kernel) * 0.5
    return GdnWeights(conv, random(spec.n_v), -random(spec.n_v, seed=1).abs() - 0.01)


def gdn_rows(spec: GdnSpec, T: int) -> tuple[Tensor, Tensor, Tensor]:
    alpha = random(2, T, spec.n_v) * 2
    alpha[:, ::5, 0] = 25.0
    return random(2, T, spec.conv_dim), alpha, random(2, T, spec.n_v, seed=1)


def columns_of(a: Activation) -> Tensor:
    """The values [T, K] of an activation, from the matmul's order of columns; all past them are zero."""
    if a.scale is None:
        return a.rows
    e = torch.arange(a.rows.shape[1])
    inside = e % 256
    place = 32 * (inside // 4 % 8) + 8 * (inside // 32 % 4) + 2 * (inside % 4) + inside // 128
    values = a.rows.cpu().float()[:, e // 256 * 256 + place] * a.scale.cpu().unsqueeze(1)
    assert bool((values[:, a.n_columns :] == 0).all()), "columns past the last are not zero"
    return values[:, : a.n_columns]


def gdn_run(
    room, device: str, spec: GdnSpec, accepted: list[tuple[int, int]], width: int, **options: int
) -> tuple[Tensor, gdn.GdnState]:
    """Steps of `width` rows in slots 2 and 0, of which so many are right: those of each slot, and the state."""
    weights = gdn_weights(spec)
    weights, norm = GdnWeights(*on(device, weights.conv, weights.dt, weights.a)), random(spec.d).to(device)
    u, alpha, beta = gdn_rows(spec, 40)
    z = random(2, 40, spec.n_v * spec.d, seed=2)
    state = gdn.allocate(spec, 3, device)
    state.window_u.copy_(random(*state.window_u.shape)[:1])  # a past: the first rows of a window precede it
    slots, n_rows = torch.tensor([2, 0], device=device), torch.tensor([width, width], device=device)
    outs: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for n in accepted:
        part = []
        for x in (u, z, alpha, beta):
            rows = torch.full((2, width, x.shape[2]), 3.0)  # rejected rows are something else
            for b in range(2):
                rows[b, : n[b]] = x[b, starts[b] : starts[b] + n[b]]
            part.append(rows)
        a = room.step_prepared(*on(device, *part), weights, norm, EPS, state, slots, n_rows, spec, **options)
        got = columns_of(a).view(2, width, -1)
        for b in range(2):
            outs[b].append(got[b, : n[b]])
            starts[b] += n[b]
        room.accept(state, slots, torch.tensor(n, device=device), n_rows)
    room.replay(state, slots)
    state.half[slots], state.n_replay[slots] = 1 - state.half[slots], 0
    return torch.stack([torch.cat(x) for x in outs]), state


GDN_GROUPS: list[tuple[list[tuple[int, int]], int]] = [
    ([(3, 0), (0, 4), (2, 1), (1, 1)], 4), ([(6, 1), (0, 5)], 7), ([(0, 6), (6, 0)], 9), ([(6, 6)], 6)
]  # fmt: skip


@case
def gdn_steps(device: str, real: bool) -> None:
    """Near the twin; the same bits however rows are grouped into steps and heads split over programs."""
    small = [GdnSpec(2, 4, 16, 4, EPS), GdnSpec(1, 3, 64, 3, EPS), GdnSpec(1, 1, 40, 4, EPS)]
    for spec in [GdnSpec(16, 48, 128, 4, EPS), *small] if real else small:
        slots = torch.tensor([2, 0])
        expected, mine = gdn_run(gdn_plain, "cpu", spec, [(1, 1)] * 6, 1)
        alone, state = gdn_run(gdn_kernel, device, spec, [(1, 1)] * 6, 1)
        close(alone, expected, 2e-3 * expected.abs().max().item(), "output")
        close(state.state, mine.state, 1e-5, "state")
        same(gdn.tails(state, slots.to(device)), gdn.tails(mine, slots), "tail")
        groups = GDN_GROUPS if real or spec is small[0] else GDN_GROUPS[:1]
        groups = [*groups, *([([(6, 6)], W) for W in range(10, 18)] if real else [])]
        for accepted, width in groups:
            for parts in (1, 2) if spec.d >= 64 else (1,):
                got, grouped = gdn_run(gdn_kernel, device, spec, accepted, width, parts=parts)
                what = f"{spec}, {parts} parts, grouped as {accepted}"
                same(got, alone, what)
                same(grouped.state, state.state, f"state of {what}")
                same(gdn.tails(grouped, slots.to(device)), gdn.tails(state, slots.to(device)).cpu(), f"tail of {what}")
                assert not grouped.arrived.any()


@case
def gdn_padding(device: str, real: bool) -> None:
    """An entry without rows between two with rows: nothing of its slot changes, the others' bits do not either."""
    for spec, W in ((GdnSpec(16, 48, 128, 4, EPS), 8), (GdnSpec(16, 48, 128, 4, EPS), 1)) if real else (
        (GdnSpec(2, 4, 16, 4, EPS), 3), (GdnSpec(1, 3, 64, 3, EPS), 9), (GdnSpec(1, 1, 40, 4, EPS), 1)
    ):  # fmt: skip
        weights = gdn_weights(spec)
        weights, norm = GdnWeights(*on(device, weights.conv, weights.dt, weights.a)), random(spec.d).to(device)
        u, alpha, beta = random(3, W, spec.conv_dim), random(3, W, spec.n_v), random(3, W, spec.n_v, seed=1)
        u[1], alpha[1] = torch.nan, torch.nan
        rows = on(device, u, random(3, W, spec.n_v * spec.d, seed=2), alpha, beta)
        slots, real_ones = torch.tensor([2, 0, 3], device=device), torch.tensor([0, 2], device=device)
        n_rows = torch.tensor([W, 0, 1], device=device)
        n = torch.tensor([1, 7, W], device=device)
        states = []
        for _ in range(2):
            state = gdn.allocate(spec, 4, device)
            for name in ("state", "window_u", "window_k", "window_v", "window_g", "window_beta"):
                held = getattr(state, name)
                held.copy_(random(*held.shape) * (-1 if name == "window_g" else 1))
            state.window_g.abs_().neg_()
            state.counts[0].copy_(torch.tensor([3, 1, 2, 0])), state.counts[1].copy_(torch.tensor([1, 1, 0, 1]))
            states.append(state)
        with_it, without = states
        for parts in (1, 2) if spec.d >= 64 else (1,):
            a = gdn_kernel.step_prepared(*rows, weights, norm, EPS, with_it, slots, n_rows, spec, parts=parts)
            gdn_kernel.accept(with_it, slots, n, n_rows)
            b = gdn_kernel.step_prepared(
                *(x[real_ones].contiguous() for x in rows), weights, norm, EPS, without, slots[real_ones],
                n_rows[real_ones], spec, parts=parts,
            )  # fmt: skip
            gdn_kernel.accept(without, slots[real_ones], n[real_ones], n_rows[real_ones])
            got = columns_of(a).view(3, W, -1)
            same(got[real_ones.cpu()], columns_of(b).view(2, W, -1), "rows beside padding")
            assert not bool(got[1].any()), "padding has results"
            for name in ("state", "window_u", "window_k", "window_v", "window_g", "window_beta", "counts", "arrived"):
                same(getattr(with_it, name), getattr(without, name), f"{name} beside padding")


@case
def gdn_prompt(device: str, real: bool) -> None:
    """Two prompt chunks of two slots, one padded, from random states."""
    spec, weights = gdn_setup(real)
    dweights = GdnWeights(*on(device, weights.conv, weights.dt, weights.a))
    T = 300 if real else 70
    rows = gdn_rows(spec, T)
    slots, n_rows = torch.tensor([2, 0]), torch.tensor([T, 65])
    mine, theirs = gdn.allocate(spec, 3, "cpu"), gdn.allocate(spec, 3, device)
    for name in ("state", "window_u"):
        held = getattr(mine, name)
        getattr(theirs, name).copy_(held.copy_(random(*held.shape)))
    mine.half[2], theirs.half[2] = 1, 1
    for part in range(2 if real else 1):
        expected = gdn_prefill.chunk(*rows, weights, mine, slots, n_rows, spec)
        got = gdn_prompts.chunk(*on(device, *rows), dweights, theirs, *on(device, slots, n_rows), spec)
        for b, n in enumerate(n_rows.tolist()):
            close(got[b, :n], expected[b, :n], 2e-5, f"chunk {part} entry {b}")
        close(theirs.state, mine.state, 5e-5, f"state after chunk {part}")
        same(gdn.tails(theirs, slots.to(device)), gdn.tails(mine, slots), "tail")
        n_rows = torch.tensor([2, T])


@case
def gdn_repeated_keys(device: str, real: bool) -> None:
    """Equal keys with beta 1 and hardly any decay: the triangular system at its worst."""
    spec, _ = gdn_setup(real)
    T = 200 if real else 64
    k = torch.nn.functional.normalize(random(1, 1, 1, spec.d), dim=-1).expand(1, T, spec.n_k, spec.d)
    q, v = random(1, T, spec.n_k, spec.d) * spec.d**-0.5, random(1, T, spec.n_v, spec.d)
    g, beta = torch.full((1, T, spec.n_v), -1e-4), torch.full((1, T, spec.n_v), 0.999)
    state = gdn.allocate(spec, 1, device)
    state.state.copy_(random(*state.state.shape))
    before = state.state[0].cpu().double()

    def pair(x: Tensor) -> Tensor:
        return torch.stack((x.half(), (x - x.half().float()).half())).to(device)

    def by_chunk(x: Tensor) -> Tensor:
        return chunked.padded(x, -(-T // 64) * 64).transpose(1, 2).contiguous()

    G = by_chunk(g).unflatten(2, (-1, 64)).cumsum(3).flatten(2)
    out = gdn_scan.scan(pair(q), pair(k), pair(v), *on(device, G, by_chunk(beta)), state, one(0, device), spec)
    expected, after = gdn_plain.naive(*(x[0].double() for x in (q, k, v, g, beta)), before)
    close(out[0], expected, 2e-5, "output"), close(state.state[0], after, 2e-5, "state")


# ---- selection, convolution


@case
def selection(device: str, real: bool) -> None:
    V = 248320 if real else 1500
    B = 2 if real else 1
    x = (random(B, 3, V) * 8).round()  # many ties
    x[0, 0, 3] = -0.0
    bias = random(3 * B, V)
    same(select_triton.argmax(x.to(device)), select_plain.argmax(x), "argmax")
    got = select_triton.argmax(x.view(3 * B, V).to(device), bias.to(device))
    same(got, select_plain.argmax(x.view(3 * B, V), bias), "argmax with bias")
    for k in (1, 10, 16, 40, 100, 300) if real else (1, 10, 70):
        values, ids = select_plain.top_k(x, k)
        got = select_triton.top_k(x.to(device), k)
        same(got[0], values, f"top {k}"), same(got[1], ids, f"ids of top {k}")
    for V, k in ((9, 9), (37, 16), (1025, 5), (2000, 16)):  # fewer runs than k, ends of runs, equal and infinite logits
        x = (random(2, V) * 2).round()
        x[1, V // 3 :] = -torch.inf
        for got, expected in zip(select_triton.top_k(x.to(device), k), select_plain.top_k(x, k)):
            same(got, expected, f"top {k} of {V}")
    few = torch.full((1, 1100), -torch.inf)
    few[0, 1000] = 1.0
    same(select_triton.top_k(few.to(device), 3)[1], torch.tensor([[1000, 0, 1]]), "few finite")


@case
def selector_walk(device: str, real: bool) -> None:
    B, n, k, R = (4, 7, 16, 256) if real else (2, 4, 5, 12)
    ids = torch.randint(0, 1000, (B, n, k), generator=torch.Generator().manual_seed(0))
    rest = random(B, n, k), random(B, n, R), random(B, 1 + (n - 1) * k, R), random(B, n, k, R)
    tokens, shares = select_plain.walk(ids, *rest)
    got = select_triton.walk(*on(device, ids, *rest))
    same(got[0], tokens, "tokens"), close(got[1], shares, 1e-5, "shares")


def packed(device: str, type_name: str, raw: Tensor, rows: int, columns: int) -> PackedWeight:
    """A weight as the kernels take it, on the CPU too."""
    if device != "cpu":
        return pack(raw, type_name, (rows, columns), device)
    shift = repack.shift_for(float(repack.largest_scale(raw, type_name)), type_name)
    parts = {name: part.contiguous() for name, part in repack.repack(raw, type_name, shift).items()}
    return PackedWeight(type_name, (rows, columns), torch.device("cpu"), parts=parts, shift=shift)


@case
def selector_rows(device: str, real: bool) -> None:
    V, R, n, k, B = (248320, 256, 7, 16, 2) if real else (300, 96, 3, 4, 2)
    types = ("Q8_0", "Q8_0"), ("Q8_0", "F16")  # one launch, and a launch a form
    ids = torch.randint(0, V, (B, n, k), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([3, V - 1])
    for pair in types:
        raws = [random_raw(type_name, V, R, seed=seed) for seed, type_name in enumerate(pair)]
        theirs = (packed(device, type_name, raw, V, R) for type_name, raw in zip(pair, raws))
        mine = (pack(raw, type_name, (V, R)) for type_name, raw in zip(pair, raws))
        for got, expected in zip(select_triton.selector_rows(*on(device, ids, last), *theirs),
                                 select_plain.selector_rows(ids, last, *mine)):  # fmt: skip
            same(got, expected, f"rows of {pair}")


@case
def markov_tokens(device: str, real: bool) -> None:
    """Each token is the best after the one before, up to the rounding of float16 products; its rows are exact."""
    V, r, n, B = (248320, 256, 7, 2) if real else (300, 96, 3, 2)
    type_name = "Q4_K" if real else "Q8_0"
    raws = [random_raw(type_name, V, r, seed=seed) for seed in (1, 2)]
    dense_table, dense_out = (decode(raw, type_name) for raw in raws)
    table, out = (packed(device, type_name, raw, V, r) for raw in raws)
    project = WeightGroup((out,)) if device == "cpu" else fuse([out])
    if device == "cpu":  # the product's kernel that runs anywhere
        select_triton.matmul = lambda a, group: (multiply(a, group.weights[0]),)
    last = torch.tensor([3, V - 1])
    biases = dense_table[last].double() @ dense_out.double().T
    logits = random(B, n + 1, V) * biases.abs().max().item()
    tokens, embedded = (t.cpu() for t in select_triton.markov_tokens(
        logits.to(device)[:, 1:], last.to(device), table, project
    ))
    before = torch.cat((last[:, None], tokens[:, :-1]), 1)
    same(embedded, dense_table[before], "rows of the table")
    scores = logits[:, 1:].double() + dense_table[before].double() @ dense_out.double().T
    missed = scores.max(-1).values - scores.gather(-1, tokens[..., None])[..., 0]
    assert missed.max() <= 2e-3 * scores.abs().max(), missed


@case
def dynamic_conv(device: str, real: bool) -> None:
    B, T, D, K, G = (2, 8, 5120, 2, 320) if real else (2, 5, 32, 3, 4)
    h, dyn, base = random(B, T, D), random(B, T, 2, K, G), random(2, K, D)
    for side in (0, 1):
        close(conv_triton.dynamic_conv(*on(device, h, dyn, base), side), conv_plain.dynamic_conv(h, dyn, base, side),
              1e-5, f"side {side}")  # fmt: skip
        x, weight = random(B, T, D, seed=1), random(D)
        dx, dweight, *d = on(device, x, weight, h, dyn, base)
        a, expected = conv_triton.prepared_conv(*d, side), prepare(conv_triton.dynamic_conv(*d, side).flatten(0, 1))
        values, close_values = (r.rows.float() * r.scale[:, None] for r in (a, expected))
        close(values, close_values.cpu(), 1.2e-3 * close_values.abs().max().item(), f"prepared, side {side}")
        total, normed, a = conv_triton.add_conv_norm(dx, *d, side, dweight, EPS)
        expected_total, expected_normed, _ = conv_plain.add_conv_norm(x, h, dyn, base, side, weight, EPS)
        close(total, expected_total, 1e-5, "sum"), close(normed, expected_normed, 1e-5, "norm")
        expected = prepare(normed.flatten(0, 1))
        close(a.rows.float() * a.scale[:, None], (expected.rows.float() * expected.scale[:, None]).cpu(), 4e-3, "norm")


# ---- a step's bookkeeping


@case
def rows(device: str, real: bool) -> None:
    g = torch.Generator().manual_seed(0)
    B, V = (5, 300) if real else (4, 20)
    for W in (1, 2, 5, 16):
        n_past, last, n_draft = (torch.randint(0, W, (B,), generator=g) for _ in range(3))
        sampled, wide = (torch.randint(0, V, (B, W + 2), generator=g) for _ in range(2))
        for a, b in zip(rows_triton.positions(*on(device, n_past, n_draft + 1), W),
                        rows_plain.positions(n_past, n_draft + 1, W)):  # fmt: skip
            same(a, b, "positions")
        n_past[1], n_draft[1] = -1, -1  # padding
        for a, b in zip(rows_triton.masked_block(*on(device, last), 7, W, n_past.to(device)),
                        rows_plain.masked_block(last, 7, W, n_past)):  # fmt: skip
            same(a, b, "masked block")
        wide[:, W // 2 :] -= V // 4  # ids outside on both sides
        dlast, dwide, dn = on(device, last, wide * 2, n_draft)
        tokens, n_rows = rows_plain.lay_out(last, wide[:, : W - 1] * 2, n_draft, V)
        for a, b in zip(rows_triton.lay_out(dlast, dwide[:, : W - 1], dn, V), (tokens, n_rows)):
            same(a, b, "lay out")
        sampled[:, : W // 2 + 1] = torch.cat((tokens[:, 1:], sampled), 1)[:, : W // 2 + 1]
        is_eog = torch.rand(V, generator=g) < 0.1
        expected = rows_plain.accepted_prefix(tokens, sampled[:, :W], n_rows, is_eog)
        dtokens, dsampled, dn, deog = on(device, tokens, sampled, n_rows, is_eog)
        same(rows_triton.accepted_prefix(dtokens, dsampled[:, :W], dn, deog), expected, "accepted")


@case
def carry(device: str, real: bool) -> None:
    D, most, B, W = (5120, 16, 3, 5) if real else (1100, 4, 2, 3)
    slots, n_past, n_rows = torch.tensor([2, 0, 3])[:B], torch.tensor([0, 9, 4])[:B], torch.tensor([W, 1, 2])[:B]
    mine = random(4, D), random(4, most, D), torch.ones(4, dtype=torch.int64)
    theirs = tuple(t.clone() for t in on(device, *mine))
    hidden, dslots, dpast, drows = random(B, W, D), *on(device, slots, n_past, n_rows)
    for h in (None, hidden):
        dh = None if h is None else h.to(device)
        same(carry_triton.before(theirs[0], dslots, dpast, dh), carry_plain.before(mine[0], slots, n_past, h), "before")
    for tentative in (False, True):
        carry_plain.keep(*mine, hidden, slots, n_rows, tentative)
        carry_triton.keep(*theirs, hidden.to(device), dslots, drows, tentative)
        for a, b in zip(theirs, mine):
            same(a, b, "kept")
    for accepted in (0, 1, W):
        carry_plain.take(*mine, slots, torch.full_like(slots, accepted))
        carry_triton.take(*theirs, dslots, torch.full_like(dslots, accepted))
        same(theirs[0], mine[0], "taken")
    n_past[1], n_rows[1] = -1, 0  # padding
    padded = carry_plain.before(mine[0], slots, n_past)
    same(carry_triton.before(theirs[0], dslots, n_past.to(device)), padded, "padded")
    hidden, drows = hidden + 1, n_rows.to(device)
    for room, held, moved in ((carry_plain, mine, (hidden, slots, n_rows)),
                              (carry_triton, theirs, (hidden.to(device), dslots, drows))):  # fmt: skip
        before = [t[slots[1]].clone() for t in held]
        room.keep(*held, *moved, True)
        room.take(*held, moved[1], moved[2] - 1)
        for a, b in zip(held, before):
            same(a[slots[1]], b, "padding")
    for a, b in zip(theirs, mine):
        same(a, b, "kept beside padding")


# ---- norms and activations into a matmul's input


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
