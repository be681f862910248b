"""Gated DeltaNet: steps grouped and padded in every way, prompts, and the triangular system at its worst."""

from __future__ import annotations

import torch
from torch import Tensor

from ggufspec.kernels import gdn
from ggufspec.kernels.gdn import GdnSpec, GdnWeights, chunked
from ggufspec.kernels.gdn import plain as gdn_plain
from ggufspec.kernels.gdn import prefill as gdn_prefill
from ggufspec.kernels.gdn import prompt as gdn_prompts
from ggufspec.kernels.gdn import scan as gdn_scan
from ggufspec.kernels.gdn import step as gdn_kernel
from ggufspec.kernels.matmul import Activation

from .comparing import EPS, case, close, on, one, random, same

DIVISIONS = (gdn_kernel.Division(1), *(gdn_kernel.Division(parts, warps) for parts in (2, 4) for warps in (8, 4)))


def divisions(spec: GdnSpec) -> list[gdn_kernel.Division]:
    """What may be chosen for a spec: programs keep 32 values or more."""
    return [division for division in DIVISIONS if division.parts == 1 or spec.d // division.parts >= gdn_kernel.PIECE]


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
    room, device: str, spec: GdnSpec, accepted: list[tuple[int, int]], width: int, **options: gdn_kernel.Division
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
            for division in divisions(spec):
                got, grouped = gdn_run(gdn_kernel, device, spec, accepted, width, division=division)
                what = f"{spec}, {division}, grouped as {accepted}"
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
        for division in divisions(spec):
            a = gdn_kernel.step_prepared(*rows, weights, norm, EPS, with_it, slots, n_rows, spec, division=division)
            gdn_kernel.accept(with_it, slots, n, n_rows)
            b = gdn_kernel.step_prepared(
                *(x[real_ones].contiguous() for x in rows), weights, norm, EPS, without, slots[real_ones],
                n_rows[real_ones], spec, division=division,
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
def gdn_prompt_padding(device: str, real: bool) -> None:
    """Rows past a prompt's own change no bit of its results, of its state and of what is kept of its end."""
    spec, weights = gdn_setup(real)
    weights = GdnWeights(*on(device, weights.conv, weights.dt, weights.a))
    lengths = ((3, (16,)), (20, (32, 64)), (64, (96,)), (65, (96, 160))) if real else ((3, (16,)), (20, (70,)))
    for n, widths in lengths:
        outs = []
        for W in (n, *widths):
            rows = [x[:1, :W].clone() for x in gdn_rows(spec, max(160, W))]
            for x in rows:
                x[:, n:] *= -3.0  # something else in every width
            state = gdn.allocate(spec, 2, device)
            state.state.copy_(random(*state.state.shape)), state.window_u.copy_(random(*state.window_u.shape))
            out = gdn_prompts.chunk(*on(device, *rows), weights, state, one(1, device), one(n, device), spec)
            assert bool(torch.isfinite(out).all())
            outs.append((out[:, :n].clone(), state.state, state.window_u))
        for got in outs[1:]:
            for a, b, name in zip(got, outs[0], ("results", "state", "window")):
                same(a, b, f"{name} of {n} rows")


@case
def gdn_committed(device: str, real: bool) -> None:
    """Counts after rows were replayed: one layer's and all layers', of some slots."""
    for n_layers, slots in ((1, [2]), (3, [0, 2])):
        bank = gdn.allocate_bank(gdn_setup(False)[0], n_layers, 3, device)
        bank.counts.copy_(torch.tensor([[5, 6, 7], [0, 1, 1]])[:, None])
        gdn_kernel.committed(bank.counts, torch.tensor(slots, device=device))
        gdn_kernel.committed(bank.layers[-1].counts, one(1, device))
        kept = torch.tensor([5, 6, 7])
        kept[slots] = 0
        half = torch.tensor([0, 1, 1])
        half[slots] = 1 - half[slots]
        expected = torch.stack((kept, half))[:, None].repeat(1, n_layers, 1)
        expected[:, -1, 1] = 0
        same(bank.counts, expected, "counts")


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
