"""Attention over the packed cache: a float64 reference for every mask, and rows that do not see their width."""

import oracles
import pytest
import torch

from ggufspec.kernels import kv as kvs
from ggufspec.kernels.attention import AttentionSpec, attend, shape

H, N_KV, HD, HD_V = 6, 2, 64, 32


def filled(type_k: str, type_v: str, n: int, n_cells: int, ring: bool = False) -> tuple[kvs.KV, torch.Tensor]:
    """A cache with n random positions in slot 1, and queries [1, n, H, HD] for all of them."""
    generator = torch.Generator().manual_seed(n)
    kv = kvs.allocate(type_k, type_v, 2, n_cells, N_KV, HD, HD_V, "cpu", ring=ring)
    k, v = torch.randn(1, n, N_KV, HD, generator=generator), torch.randn(1, n, N_KV, HD_V, generator=generator)
    kvs.store(kv, k, v, torch.tensor([1]), torch.arange(n)[None])
    return kv, torch.randn(1, n, H, HD, generator=generator) * 2


def run(q, kv, n_past: int, n_rows: int, spec: AttentionSpec) -> torch.Tensor:
    return attend(q, kv, torch.tensor([1]), torch.tensor([n_past]), torch.tensor([n_rows]), spec)[0]


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "bf16"), ("q8_0", "q4_0"), ("iq4_nl", "f16")])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_float64(types, causal, window, sinks):
    kv, q = filled(*types, 300, 300)
    spec = AttentionSpec(HD**-0.5, causal, window, torch.linspace(-2, 3, H) if sinks else None)
    k, v = kvs.load(kv, 1, 300)
    for n_past, W in ((0, 3), (250, 10), (220, 80)):
        seen = n_past + W
        expected = oracles.attend(q[0, n_past:seen], k[:seen], v[:seen], n_past, spec)
        got = run(q[:, n_past:seen], kv, n_past, W, spec)
        assert torch.allclose(got.double(), expected, atol=3e-6), (n_past, W)


@pytest.mark.parametrize("window", [39, 40, 41])
def test_a_window_holds_the_row_and_those_before_it(window):
    kv, q = filled("f32", "f32", 60, 60)
    spec = AttentionSpec(0.01, window=window)
    before = run(q[:, 50:51], kv, 50, 1, spec)
    for position in range(51):
        saved = kv.v[1, position].clone()
        kv.v[1, position] += 100.0
        changed = not torch.equal(run(q[:, 50:51], kv, 50, 1, spec), before)
        kv.v[1, position] = saved
        assert changed == (50 - position < window), position


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q5_1")])
@pytest.mark.parametrize("window", [0, 100])
def test_width_does_not_change_a_bit(types, window):
    kv, q = filled(*types, 530, 600)
    spec = AttentionSpec(HD**-0.5, window=window)
    for start in (0, 250, 505):
        alone = torch.cat([run(q[:, start + i : start + i + 1], kv, start + i, 1, spec) for i in range(16)])
        for W in (2, 7, 16):
            assert torch.equal(run(q[:, start : start + W], kv, start, W, spec), alone[:W]), (start, W)


def test_batch_and_padding_do_not_change_a_bit():
    kv, q = filled("f16", "f16", 300, 300)
    other = torch.randn(1, 40, N_KV, HD)
    kvs.store(kv, other, other[..., :HD_V], torch.tensor([0]), torch.arange(40)[None])
    spec = AttentionSpec(HD**-0.5)
    alone = run(q[:, 290:294], kv, 290, 4, spec)
    both = attend(torch.cat((q[:, :6], q[:, 290:296])), kv, torch.tensor([0, 1]), torch.tensor([34, 290]),
                  torch.tensor([6, 4]), spec)  # fmt: skip
    assert torch.equal(both[1, :4], alone)
    assert torch.isfinite(both).all()


def test_stale_cells_are_invisible():
    kv, q = filled("f16", "f16", 300, 300)
    spec = AttentionSpec(HD**-0.5)
    before = run(q[:, 100:104], kv, 100, 4, spec)
    kv.k[1, 104:], kv.v[1, 104:] = 1e4, -1e4
    assert torch.equal(run(q[:, 100:104], kv, 100, 4, spec), before)


def test_prompt_and_steps_agree():
    kv, q = filled("f16", "f16", 300, 300)
    spec = AttentionSpec(HD**-0.5)
    wide = run(q, kv, 0, 300, spec)
    narrow = torch.cat([run(q[:, i : i + 20], kv, i, 20, spec) for i in range(0, 300, 20)])
    assert torch.allclose(wide, narrow, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_equals_the_whole_cache(causal):
    """A sliding-window drafter keeps window + block cells; blocks are stored, read and partly rejected."""
    n, block, window = 700, 8, 200
    whole, q = filled("f32", "f32", n, n)
    k, v = kvs.load(whole, 1, n)
    ring = kvs.allocate("f32", "f32", 2, window + block, N_KV, HD, HD_V, "cpu", ring=True)
    spec = AttentionSpec(HD**-0.5, causal, window)
    past, slots, accepted = 0, torch.tensor([1]), [8, 1, 0, 5, 8, 3]
    for step in range(1000):
        if past + block > n:
            break
        positions = torch.arange(past, past + block)[None]
        kvs.store(ring, k[None, past : past + block], v[None, past : past + block], slots, positions)
        a, b = (run(q[:, past : past + block], cache, past, block, spec) for cache in (whole, ring))
        assert torch.allclose(a, b, atol=2e-6), past
        past += accepted[step % len(accepted)]
    assert past > 2 * ring.n_cells


def test_a_slot_without_rows_gives_zeros():
    kv, q = filled("f32", "f32", 10, 10)
    out = attend(q[:, :2], kv, torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), AttentionSpec(1.0))
    assert (out == 0).all()


@pytest.mark.parametrize("card, cells", [((8, 0), 32), ((9, 0), 32), ((8, 6), 16), ((8, 9), 16), ((12, 0), 16)])
def test_tiles_of_looked_up_cells_fit_the_card(card, cells, monkeypatch):
    """Keys and values of IQ4_NL go by way of shared memory, of which cards for consumers have 99 KB."""
    monkeypatch.setattr(shape, "capability", lambda device: card)
    both = kvs.allocate("iq4_nl", "iq4_nl", 1, 256, 4, 256, 256, "cpu")
    assert shape.cells_at_once(both) == cells
    assert shape.cells_at_once(kvs.allocate("iq4_nl", "f16", 1, 256, 4, 256, 256, "cpu")) == 32
