"""Token selection, and the two drafting heads against plain Python loops."""

import pytest
import torch
from random_blocks import random_raw

from ggufspec.kernels import select
from ggufspec.kernels.conv import add_conv_norm, dynamic_conv, prepared_conv
from ggufspec.kernels.matmul import fuse, pack
from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.norm import rms_norm


def test_argmax_takes_the_first_maximum():
    x = torch.zeros(3, 5000)
    x[0, [7, 4000]] = 1.0
    x[1, 4999] = 1.0
    assert select.argmax(x).tolist() == [7, 4999, 0]


@pytest.mark.parametrize("k", [1, 10, 40])
def test_top_k_orders_ties_by_id(k):
    x = torch.randint(0, 60, (2, 3, 4096), generator=torch.Generator().manual_seed(0)).float()
    values, ids = select.top_k(x, k)
    for row, v, i in zip(x.view(6, -1), values.view(6, -1), ids.view(6, -1)):
        expected = sorted(range(4096), key=lambda j: (-row[j].item(), j))[:k]
        assert i.tolist() == expected and torch.equal(v, row[expected])


def test_top_k_with_fewer_finite_logits():
    x = torch.full((1, 50), -torch.inf)
    x[0, 30] = 1.0
    assert select.top_k(x, 3)[1].tolist() == [[30, 0, 1]]


def test_probabilities():
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.tensor([[3, 7], [299, 0]])
    expected = x.double().log_softmax(-1)
    assert torch.allclose(select.log_softmax(x).double(), expected, atol=1e-5)
    assert torch.allclose(select.log_probability(x, ids).double(), expected.gather(-1, ids), atol=1e-5)


def test_n_passing_counts_the_leading_ones():
    scores = torch.tensor([[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.6, 0.7, 0.8]])
    assert select.n_passing(scores, 0.55).tolist() == [1, 0, 3]
    assert select.n_passing(scores, 0.0).tolist() == [3, 3, 3]


@pytest.mark.parametrize("reduced", [False, True])
def test_markov_chain(reduced):
    g = torch.Generator().manual_seed(1)
    B, n, V, Vd, r, D = 2, 6, 50, 20, 8, 10
    logits, hidden = torch.randn(B, n, V, generator=g), torch.randn(B, n, D, generator=g)
    d2t = torch.randperm(V, generator=g)[:Vd] if reduced else None
    w1, w2 = torch.randn(V, r, generator=g), torch.randn(Vd if reduced else V, r, generator=g)
    weight, bias, last = torch.randn(D + r, generator=g) * 0.3, torch.tensor([0.1]), torch.tensor([4, 9])
    tokens, scores = select.markov_chain(
        logits, last, lambda ids: w1[ids], lambda e: e @ w2.T, hidden, (weight, bias), d2t
    )
    for b in range(B):
        previous = int(last[b])
        for i in range(n):
            column = logits[b, i].clone()
            for j, value in enumerate(w2 @ w1[previous]):
                column[int(d2t[j]) if reduced else j] += value
            confidence = torch.sigmoid(weight @ torch.cat((hidden[b, i], w1[previous])) + 0.1)
            previous = int(column.argmax())
            assert tokens[b, i] == previous
            assert scores[b, i].item() == pytest.approx(confidence.item(), abs=1e-5)


def test_markov_tokens_are_the_chain_of_quantized_weights():
    g = torch.Generator().manual_seed(1)
    B, n, V, r, D = 2, 5, 60, 32, 10
    raws = [random_raw("Q8_0", V, r, seed=seed) for seed in (1, 2)]
    table, project = (pack(raw, "Q8_0", (V, r)) for raw in raws)
    w1, w2 = (decode(raw, "Q8_0") for raw in raws)
    logits, hidden, last = torch.randn(B, n, V, generator=g), torch.randn(B, n, D, generator=g), torch.tensor([4, 9])
    head = torch.randn(D + r, generator=g) * 0.3, torch.tensor([0.1])
    tokens, embedded = select.markov_tokens(logits, last, table, fuse([project]))
    expected, scores = select.markov_chain(logits, last, lambda i: w1[i], lambda e: e @ w2.T, hidden, head)
    assert torch.equal(tokens, expected)
    assert torch.equal(embedded, w1[torch.cat((last[:, None], tokens[:, :-1]), 1)])
    assert torch.allclose(select.confidences(hidden, embedded, *head), scores, atol=1e-6)


def test_selector_walk():
    g = torch.Generator().manual_seed(2)
    B, n, k, V, R = 2, 7, 5, 60, 32
    ids = torch.stack([torch.randperm(V, generator=g)[:k] for _ in range(B * n)]).view(B, n, k)
    values, gate = torch.randn(B, n, k, generator=g), torch.randn(B, n, R, generator=g)
    raws, last = [random_raw("Q8_0", V, R, seed=seed) for seed in (1, 2)], torch.tensor([1, 2])
    pred, succ = (decode(raw, "Q8_0") for raw in raws)
    values *= (pred @ succ.T).std() * 4
    tokens, shares = select.selector_walk(ids, values, gate, last, *(pack(raw, "Q8_0", (V, R)) for raw in raws))
    for b in range(B):
        previous = int(last[b])
        for i in range(n):
            scores = values[b, i] + (pred[previous] * gate[b, i] * succ[ids[b, i]]).sum(-1)
            best = int(scores.argmax())
            previous = int(ids[b, i, best])
            assert tokens[b, i] == previous
            assert shares[b, i].item() == pytest.approx(scores.softmax(-1)[best].item(), abs=1e-5)


@pytest.mark.parametrize("T", [1, 2, 6])
@pytest.mark.parametrize("side", [0, 1])
def test_dynamic_conv(T, side):
    g = torch.Generator().manual_seed(3)
    B, D, K, G = 2, 32, 3, 4
    h, dyn = torch.randn(B, T, D, generator=g), torch.randn(B, T, 2, K, G, generator=g)
    base = torch.randn(2, K, D, generator=g)
    expected = torch.zeros(B, T, D, dtype=torch.float64)
    for t in range(T):
        for tap in range(min(K, t + 1)):
            for c in range(D):
                weight = base[side, tap, c].double() + dyn[:, t, side, tap, c // (D // G)].double()
                expected[:, t, c] += weight * h[:, t - tap, c].double()
    out = dynamic_conv(h, dyn, base, side)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.equal(prepared_conv(h, dyn, base, side).rows, out.view(B * T, D))
    x, weight = torch.randn(B, T, D, generator=g), torch.randn(D, generator=g)
    total, normed, a = add_conv_norm(x, h, dyn, base, side, weight, 1e-6)
    assert torch.equal(total, x + out) and torch.equal(normed, rms_norm(total, weight, 1e-6))
    assert torch.equal(a.rows, normed.view(B * T, D))
