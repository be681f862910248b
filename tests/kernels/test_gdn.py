"""Gated DeltaNet: float64 reference, chunked against stepwise, and steps whose grouping must not change a bit."""

import oracles
import pytest
import torch

from ggufspec.cache import Cache, RecurrentLayer
from ggufspec.kernels import gdn
from ggufspec.kernels.gdn import GdnSpec, GdnState, GdnWeights, plain
from ggufspec.kernels.gdn.chunked import chunked
from ggufspec.kernels.norm import gated_norm

SPEC = GdnSpec(n_k=2, n_v=4, d=16, conv_kernel=4, eps=1e-6)


def weights(spec: GdnSpec = SPEC) -> GdnWeights:
    g = torch.Generator().manual_seed(7)
    return GdnWeights(
        torch.randn(spec.conv_dim, spec.conv_kernel, generator=g) * 0.5,
        torch.randn(spec.n_v, generator=g),
        -torch.rand(spec.n_v, generator=g) * 2 - 0.01,
    )


def sequence(T: int, seed: int = 0, spec: GdnSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u [1, T, conv_dim], alpha, beta [1, T, n_v]; a few alphas beyond the softplus cut."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(1, T, spec.conv_dim, generator=g)
    alpha, beta = torch.randn(2, 1, T, spec.n_v, generator=g) * 2
    alpha[:, ::9, 0] = 25.0
    return u, alpha, beta


def one(value: int) -> torch.Tensor:
    return torch.tensor([value])


def tail(state: GdnState, slot: int = 1) -> torch.Tensor:
    return gdn.tails(state, one(slot))


def prompt(state: GdnState, rows, start: int, stop: int, slot: int = 1) -> torch.Tensor:
    part = (x[:, start:stop] for x in rows)
    return gdn.chunk(*part, weights(), state, one(slot), one(stop - start), SPEC)[0]


def decode(state: GdnState, rows, start: int, accepted: list[int], widths: list[int], slot: int = 1) -> torch.Tensor:
    """Steps of the given widths of which only so many rows are right; the outputs of the right rows."""
    outs = []
    for n, W in zip(accepted, widths):
        u, alpha, beta = (x[:, start : start + W].clone() for x in rows)
        u[:, n:], alpha[:, n:], beta[:, n:] = 9.0, -3.0, 3.0  # wrong rows are something else
        outs.append(plain.step(u, alpha, beta, weights(), state, one(slot), one(W), SPEC)[0, :n])
        gdn.accept(state, one(slot), one(n))
        start += n
    return torch.cat(outs)


@pytest.mark.parametrize("T", [1, 5, 64, 65, 200])
def test_prompts_equal_float64(T):
    rows = sequence(T)
    state = gdn.allocate(SPEC, 2, "cpu")
    out = prompt(state, rows, 0, T)
    expected, A = oracles.gdn(*(x[0] for x in rows), weights(), SPEC)
    assert torch.allclose(out.double(), expected, atol=2e-6)
    assert torch.allclose(state.state[1].double(), A, atol=5e-6)
    assert (state.state[0] == 0).all()


def test_repeated_keys_stay_stable():
    """Equal keys with beta 1 and hardly any decay: the triangular system at its worst."""
    T = 256
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16), dim=-1).expand(1, T, 2, 16).contiguous()
    q, v = torch.randn(1, T, 2, 16), torch.randn(1, T, 4, 16)
    g, beta = torch.full((1, T, 4), -1e-4), torch.full((1, T, 4), 0.999)
    state = torch.randn(1, 4, 16, 16)
    out, new = chunked(q, k, v, g, beta, state)
    expected, A = gdn.naive(*(x[0].double() for x in (q, k, v, g, beta)), state[0].double())
    assert torch.allclose(out[0].double(), expected, atol=2e-5)
    assert torch.allclose(new[0].double(), A, atol=2e-5)


def test_prompt_chunks_and_steps_agree():
    rows = sequence(150)
    whole, parts, steps = (gdn.allocate(SPEC, 2, "cpu") for _ in range(3))
    a = prompt(whole, rows, 0, 150)
    b = torch.cat([prompt(parts, rows, s, e) for s, e in ((0, 64), (64, 67), (67, 140), (140, 150))])
    c = decode(steps, rows, 0, [1] * 150, [1] * 150)
    gdn.commit(steps, one(1))
    assert torch.allclose(a, b, atol=2e-6) and torch.allclose(a, c, atol=2e-6)
    assert torch.allclose(whole.state, parts.state, atol=2e-6) and torch.allclose(whole.state, steps.state, atol=2e-6)
    assert torch.equal(tail(whole), tail(parts)) and torch.equal(tail(whole), tail(steps))


@pytest.mark.parametrize("accepted", [[1] * 24, [8, 8, 8], [7, 0, 3, 0, 0, 7, 1, 6], [0, 0, 12, 0, 12, 0]])
def test_grouping_does_not_change_a_bit(accepted):
    rows = sequence(90)
    alone, grouped = (gdn.allocate(SPEC, 2, "cpu") for _ in range(2))
    prompt(alone, rows, 0, 30), prompt(grouped, rows, 0, 30)
    a = decode(alone, rows, 30, [1] * 24, [1] * 24)
    b = decode(grouped, rows, 30, accepted, [max(n, 1 + i % 13) for i, n in enumerate(accepted)])
    assert torch.equal(a, b)
    gdn.commit(alone, one(1)), gdn.commit(grouped, one(1))
    assert torch.equal(alone.state, grouped.state) and torch.equal(tail(alone), tail(grouped))


def test_a_prompt_after_steps_replays_them_first():
    rows = sequence(60)
    a, b = (gdn.allocate(SPEC, 2, "cpu") for _ in range(2))
    prompt(a, rows, 0, 20), prompt(b, rows, 0, 20)
    decode(a, rows, 20, [3, 4], [8, 8])
    decode(b, rows, 20, [1] * 7, [1] * 7)
    assert torch.equal(prompt(a, rows, 27, 60), prompt(b, rows, 27, 60))
    assert torch.equal(a.state, b.state)
    assert (a.n_replay == 0).all()


def test_slots_do_not_see_each_other():
    mine, other = sequence(40), sequence(40, seed=1)
    alone, shared = gdn.allocate(SPEC, 3, "cpu"), gdn.allocate(SPEC, 3, "cpu")
    a = torch.cat((prompt(alone, mine, 0, 30), decode(alone, mine, 30, [2, 0, 3], [4, 4, 4])))
    slots = torch.tensor([2, 1])
    both = [torch.cat((x, y)) for x, y in zip(other, mine)]
    outs = [gdn.chunk(*(x[:, :30] for x in both), weights(), shared, slots, torch.tensor([17, 30]), SPEC)[1]]
    start = 30
    for n in (2, 0, 3):
        part = (x[:, start : start + 4] for x in both)
        outs.append(plain.step(*part, weights(), shared, slots, torch.tensor([4, 4]), SPEC)[1, :n])
        gdn.accept(shared, slots, torch.tensor([1, n]))
        start += n
    assert torch.allclose(a[:30], outs[0], atol=1e-6)
    assert torch.allclose(a[30:], torch.cat(outs[1:]), atol=1e-6)


@pytest.mark.parametrize("W", [6, 100])
def test_padding_rows_of_a_prompt_leave_no_trace(W):
    rows = sequence(W)
    exact, padded = (gdn.allocate(SPEC, 2, "cpu") for _ in range(2))
    prompt(exact, rows, 0, 4)
    gdn.chunk(*rows, weights(), padded, one(1), one(4), SPEC)
    assert torch.allclose(exact.state, padded.state, atol=1e-6) and torch.equal(tail(exact), tail(padded))


def test_entries_without_rows_leave_no_trace():
    """Whatever awaits its replay in their slots; their neighbours' bits stay the same."""
    rows, other = sequence(40), sequence(40, seed=1)
    alone, shared = gdn.allocate(SPEC, 3, "cpu"), gdn.allocate(SPEC, 3, "cpu")
    for state in (alone, shared):
        prompt(state, rows, 0, 20), prompt(state, other, 0, 20, slot=0)
        decode(state, other, 20, [3, 4], [8, 8], slot=0)
    start, slots, n_rows = 20, torch.tensor([0, 1]), torch.tensor([0, 4])
    z, norm = torch.randn(2, 4, SPEC.n_v * SPEC.d), torch.randn(SPEC.d)
    for n in (2, 4, 1):
        u, alpha, beta = (torch.cat((torch.full_like(x[:, :4], torch.nan), x[:, start : start + 4])) for x in rows)
        got = gdn.step_prepared(u, z, alpha, beta, weights(), norm, 1e-5, shared, slots, n_rows, SPEC).rows
        got = got.view(2, 4, -1)
        want = gdn.step_prepared(
            u[1:], z[1:], alpha[1:], beta[1:], weights(), norm, 1e-5, alone, one(1), one(4), SPEC
        ).rows
        assert torch.equal(got[1], want) and not got[0].any()
        gdn.accept(shared, slots, torch.tensor([5, n]), n_rows), gdn.accept(alone, one(1), one(n))
        start += n
    for mine, theirs in zip((*vars(shared).values(),), (*vars(alone).values(),)):
        assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)


def test_layers_of_a_bank_accept_together():
    states = gdn.allocate_bank(SPEC, 2, 3, "cpu").layers
    gdn.accept(states[0], torch.tensor([2, 0]), torch.tensor([5, 3]))
    assert states[1].n_replay.tolist() == [3, 0, 5] and states[1].half.tolist() == [1, 0, 1]
    states[0].window_g.fill_(-1.0)
    gdn.commit(states[0], torch.tensor([0, 1, 2]))
    assert states[0].n_replay.tolist() == [0, 0, 0] and states[1].n_replay.tolist() == [3, 0, 5]


@pytest.mark.parametrize("pending", [True, False])
def test_a_slot_of_a_bank_is_saved_and_restored_at_once(pending):
    """As layer by layer, in either half of the window, and nothing of the other slots changes."""
    rows, bank = sequence(60), gdn.allocate_bank(SPEC, 2, 3, "cpu")
    for k, layer in enumerate(bank.layers):
        prompt(layer, rows, 0, 20 + k, slot=1), prompt(layer, rows, 30, 40, slot=2)
    if pending:
        u, alpha, beta = (x[:, 40:44] for x in rows)
        z, norm = torch.randn(1, 4, SPEC.n_v * SPEC.d), torch.randn(SPEC.d)
        for layer in bank.layers:
            gdn.step_prepared(u, z, alpha, beta, weights(), norm, 1e-5, layer, one(1), one(4), SPEC)
        gdn.accept(bank.layers[0], one(1), one(3))
    saved = gdn.save_bank(bank, 1, is_committed=not pending)
    assert saved.shape[0] == 2 and all(torch.equal(a, gdn.save(b, 1)) for a, b in zip(saved, bank.layers))
    others = [gdn.save(layer, 2) for layer in bank.layers]
    for layer in bank.layers:
        prompt(layer, rows, 44, 60, slot=1)
    assert not torch.equal(saved[0], gdn.save(bank.layers[0], 1))
    gdn.restore_bank(bank, 1, saved)
    assert all(torch.equal(a, gdn.save(b, 1)) for a, b in zip(saved, bank.layers))
    gdn.reset_bank(bank, 1)
    assert not any(gdn.save(layer, 1).any() for layer in bank.layers)
    assert all(torch.equal(a, gdn.save(b, 2)) for a, b in zip(others, bank.layers))


def test_what_runs_in_vain_change_can_be_put_back():
    """Steps run before a graph is captured leave no trace, rows that await their replay included."""
    rows, vain = sequence(60), sequence(20, seed=1)
    cache = Cache.allocate([RecurrentLayer(SPEC, torch.device("cpu"))], 2, 64, "f32", "f32")
    state, alone = cache.recurrent[0], gdn.allocate(SPEC, 2, "cpu")
    prompt(state, rows, 0, 30), prompt(alone, rows, 0, 30)
    decode(state, rows, 30, [3, 4], [6, 6]), decode(alone, rows, 30, [3, 4], [6, 6])
    for n in (1, 2, 3):
        kept = [(t, t.clone()) for t in cache.mutable()]
        decode(state, vain, 0, [2] * n, [5] * n)
        for tensor, copy in kept:
            tensor.copy_(copy)
    assert torch.equal(decode(state, rows, 37, [5, 2], [5, 5]), decode(alone, rows, 37, [5, 2], [5, 5]))
    gdn.commit(state, one(1)), gdn.commit(alone, one(1))
    assert torch.equal(state.state[1], alone.state[1]) and torch.equal(tail(state), tail(alone))


def test_save_reset_restore():
    rows = sequence(60)
    state, other = (gdn.allocate(SPEC, 2, "cpu") for _ in range(2))
    prompt(state, rows, 0, 30)
    decode(state, rows, 30, [3, 4], [6, 6])
    saved = gdn.save(state, 1)
    expected = decode(state, rows, 37, [5], [5])
    gdn.restore(other, 0, saved)
    assert torch.equal(decode(other, rows, 37, [5], [5], slot=0), expected)
    gdn.reset(state, 1)
    fresh = prompt(gdn.allocate(SPEC, 2, "cpu"), rows, 0, 30)
    assert torch.equal(prompt(state, rows, 0, 30), fresh)


def test_a_saved_slot_is_its_state_and_the_last_inputs():
    rows = sequence(40)
    state = gdn.allocate(SPEC, 2, "cpu")
    prompt(state, rows, 0, 30), decode(state, rows, 30, [4, 2], [5, 5])
    saved = gdn.save(state, 1)
    assert torch.equal(saved, torch.cat((state.state[1].flatten(), rows[0][0, 33:36].flatten())))
    assert gdn.fits(state, saved) and not gdn.fits(state, saved[1:])


def test_a_prepared_step_is_a_step_and_a_gated_norm():
    u, alpha, beta = sequence(5)
    z, norm = torch.randn(1, 5, SPEC.n_v * SPEC.d), torch.randn(SPEC.d)
    a, b = (gdn.allocate(SPEC, 2, "cpu") for _ in range(2))
    got = gdn.step_prepared(u, z, alpha, beta, weights(), norm, 1e-5, a, one(1), one(5), SPEC)
    o = plain.step(u, alpha, beta, weights(), b, one(1), one(5), SPEC)
    expected = gated_norm(o, z.view(o.shape), norm, 1e-5).view(5, -1)
    assert torch.equal(got.rows, expected) and got.n_columns == SPEC.n_v * SPEC.d


def test_too_many_rows_are_refused():
    state = gdn.allocate(SPEC, 1, "cpu", max_window=4)
    with pytest.raises(ValueError, match="5 tentative rows.*window of 4"):
        u, alpha, beta = sequence(5)
        z, norm = torch.zeros(1, 5, SPEC.n_v * SPEC.d), torch.ones(SPEC.d)
        gdn.step_prepared(u, z, alpha, beta, weights(), norm, 1e-6, state, one(0), one(5), SPEC)


def test_convolution_sees_the_tail():
    u, tail, conv = torch.randn(5, 6), torch.randn(3, 6), torch.randn(6, 4)
    joined = torch.cat((tail, u)).T.double().unsqueeze(0)
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(joined, conv.double().unsqueeze(1), groups=6))
    assert torch.allclose(plain.convolve(u, tail, conv).double(), expected[0].T, atol=1e-6)
