"""Chained products without a card: the steps one by one on the CPU, endings compiled, the small kernels interpreted."""

import pytest
import torch
from compiling import compiling
from processes import python
from random_blocks import for_kernels, random_raw

from ggufspec.kernels import fused
from ggufspec.kernels import matmul as mm
from ggufspec.kernels.matmul import cuda, narrow, repack
from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.matmul.weight import Activation, Normed, PackedWeight

D, F, EPS = 512, 768, 1e-6


def packed(type_name: str, rows: int, columns: int) -> PackedWeight:
    """A random weight in the kernels' arrays, on the CPU."""
    return for_kernels(random_raw(type_name, rows, columns, seed=rows), type_name, rows, columns)


def test_a_chain_is_its_steps():
    def weight(rows, columns, seed):
        raw = random_raw("Q8_0", rows, columns, seed)
        return mm.pack(raw, "Q8_0", (rows, columns)), decode(raw, "Q8_0").double()

    (gate, g), (up, u), (down, d) = weight(F, D, 1), weight(F, D, 2), weight(D, F, 3)
    x, a, w = torch.randn(3, D), torch.randn(3, F), torch.rand(D)
    pair, group = fused.join(gate, up), mm.fuse([down])
    n = fused.enter(x, w, EPS)
    total, n2 = fused.added(x, mm.prepare(a), group, w, EPS, n)
    want = x.double() + a.double() @ d.T
    assert (total - want).norm() < 1e-5 * want.norm()
    normed = want * (want.square().mean(-1, keepdim=True) + EPS).rsqrt() * w
    z = normed @ g.T
    (y,) = mm.matmul(fused.gated(n2, pair), group)
    expected = (z * torch.sigmoid(z) * (normed @ u.T)) @ d.T
    assert (y - expected).norm() < 1e-4 * expected.norm()
    halves = fused.split(n2, pair)
    assert (halves[0] - z).norm() < 1e-4 * z.norm() and (halves[1] - normed @ u.T).norm() < 1e-4 * z.norm()


def test_interleaved_rows_are_eight_of_each_in_turn(monkeypatch):
    monkeypatch.setattr(cuda, "capability", lambda index: (9, 0))
    first, second = packed("Q6_K", 24, D), packed("Q6_K", 24, D)
    second.parts["low"].add_(1)
    launch = cuda.interleave(first, second, 8)
    assert launch.n_rows == (48,) and launch.padded_rows == 128
    rows = launch.parts["low"][:, :48].unflatten(1, (3, 2, 8))
    for k, weight in enumerate((first, second)):
        assert torch.equal(rows[:, :, k].flatten(1, 2), cuda._with_shift(weight, launch.shift)["low"])


@pytest.mark.parametrize("n_tokens", [2, 12, 70])
@pytest.mark.parametrize("gate", ["Q6_K", "Q4_K"])
@pytest.mark.parametrize("capability", [80, 90])
def test_endings_compile(capability, gate, n_tokens, monkeypatch):
    from ggufspec.kernels.matmul import triton

    card = {80: (108, 164 << 10, 163 << 10), 90: (132, 228 << 10, 227 << 10)}[capability]
    monkeypatch.setattr(narrow, "card", lambda index: card)
    monkeypatch.setattr(narrow, "plan", narrow.plan.__wrapped__)  # kept plans are of one card
    for module in (cuda, narrow):
        monkeypatch.setattr(module, "capability", lambda index: divmod(capability, 10))
    monkeypatch.setattr(cuda, "config_for", lambda *of: cuda.Config(WM=8, MT=1, per_sm=2))
    out = cuda.fuse((packed("Q4_K", D, F),)).launches[0]
    pair = cuda.interleave(packed(gate, 40, D), packed(gate, 40, D), 8)
    power = torch.ones(n_tokens)
    with compiling(capability) as names:
        a = triton.prepare(torch.zeros(n_tokens, F), pdl=False)
        total, n = narrow.run_added(out, a, torch.zeros(n_tokens, D), torch.ones(D), EPS, power)
        assert total.shape == (n_tokens, D) and n.norm is not None and n.rows.shape == (n_tokens, D)
        for gelu in (False, True):
            assert narrow.run_gated(pair, n, gelu).rows.shape == (n_tokens, 256)
        triton.finished(n)
    n_gated = 4 if (capability, gate, n_tokens) == (90, "Q4_K", 70) else 2  # two launches each: 64 tokens, and 6
    assert names == ["prepare_rows", "narrow", *["narrow"] * n_gated, "finish_kernel"]


def small_kernels() -> None:
    """`enter` and `finished` in the interpreter: together they are the norm."""
    from ggufspec.kernels.fused import cuda as fused_cuda
    from ggufspec.kernels.matmul import triton

    w = torch.rand(300) + 0.5
    x = torch.randn(4, 300) * torch.tensor([1e-3, 1.0, 1e4, 1e8])[:, None]
    n = fused_cuda.enter(x, w, EPS)
    assert torch.equal(torch.log2(n.scale), torch.log2(n.scale).round())
    done = triton.finished(n)
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w
    got = repack.disorder(done.rows.double())[:, :300] * done.scale[:, None]
    assert ((got - want).norm(dim=1) < 1e-3 * want.norm(dim=1)).all()
    assert not repack.disorder(done.rows.double())[:, 300:].any()
    assert torch.equal(n.norm.next_power, n.scale)

    parts = torch.rand(80, 4)  # partial sums in several rows
    whole = triton.finished(Activation(n.rows, 300, n.scale, Normed(parts, torch.empty(4), EPS)))
    expected = n.scale * (parts.double().sum(0) / 300 + EPS).rsqrt()
    assert torch.allclose(whole.scale.double(), expected, rtol=1e-6)


def test_small_kernels_in_the_interpreter():
    python("-c", "import interpreter, test_fused; test_fused.small_kernels()")


def test_products_that_sum_over_ranks_compile():
    python("compiled_joint.py")
