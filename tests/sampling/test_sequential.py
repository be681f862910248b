"""mirostat and adaptive_p: their state runs along the sequence, drafts or not."""

import math

import pytest
import torch

from ggufspec.sampling import DEFAULT_CHAIN, SamplerState, SamplingParams, sample_rows

from . import reference

N_VOCAB = 97
ADAPTIVE = (*DEFAULT_CHAIN, "adaptive_p")

SEQUENTIAL = [
    SamplingParams(seed=3, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.2),
    SamplingParams(seed=3, mirostat=2, mirostat_tau=2.0, temperature=1.3),
    SamplingParams(seed=3, mirostat=2, temperature=0.0),
    SamplingParams(seed=3, samplers=ADAPTIVE, adaptive_target=0.3, adaptive_decay=0.8, top_k=0),
    SamplingParams(seed=3, samplers=ADAPTIVE, adaptive_target=-1.0),
]


def logits_of(n):
    return torch.randn(n, N_VOCAB, generator=torch.Generator().manual_seed(n)) * 3


def one_by_one(logits, p, first=50):
    """Tokens and states of a sequence that is sampled a token at a time."""
    tokens, states, state = [], [], None
    for i, row in enumerate(logits):
        out = sample_rows(row[None], p, torch.tensor([first + i]), states=[state])
        state = out.states[0]
        tokens.append(out.tokens.item())
        states.append(state)
    return tokens, states


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_mirostat_equals_the_reference(version, temperature):
    logits = logits_of(60)
    p = SamplingParams(seed=8, mirostat=version, mirostat_tau=2.5, mirostat_eta=0.3, temperature=temperature)
    tokens, states = one_by_one(logits, p)
    mu = 2 * p.mirostat_tau
    for i, row in enumerate(logits.tolist()):
        token, mu = reference.mirostat(row, p, mu, reference.uniform(8, 50 + i, 0))
        assert tokens[i] == token
        assert states[i].mu == pytest.approx(mu, abs=1e-6)
    assert len({round(s.mu, 6) for s in states}) > 50


@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(mirostat_tau=1e5), dict(mirostat_tau=-1e5)])
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_at_its_ends(version, params):
    """A lone candidate and a bound that no float holds give a token, not an arithmetic error."""
    p = SamplingParams(seed=8, mirostat=version, **params)
    logits = logits_of(5)
    tokens, _ = one_by_one(logits, p)
    assert len(tokens) == 5
    if "mirostat_tau" not in params or params["mirostat_tau"] < 0:
        assert tokens == logits.argmax(1).tolist()


def test_adaptive_equals_its_formula():
    p = SEQUENTIAL[3]
    logits = logits_of(60)
    tokens, states = one_by_one(logits, p)
    weight = 1 / (1 - p.adaptive_decay)
    total = p.adaptive_target * weight
    for i, row in enumerate(logits.tolist()):
        cands = reference.chain(row, SamplingParams(seed=3, top_k=0), (), 1.0)
        probs = reference.softmax(cands)
        wanted = min(max(2 * p.adaptive_target - total / weight, 0), 1)
        xs = [abs(q - wanted) / 0.3 for q in probs]
        moved = reference.descending([(t, 5 - 10 * x * x / (1 + x)) for (t, _), x in zip(cands, xs)])
        assert tokens[i] == reference.choose(moved, reference.uniform(3, 50 + i, 0))
        chosen = dict(zip((t for t, _ in cands), probs))[tokens[i]]
        total, weight = chosen + p.adaptive_decay * total, 1 + p.adaptive_decay * weight
        assert states[i].weighted_sum == pytest.approx(total)
        assert states[i].total_weight == pytest.approx(weight)


@pytest.mark.parametrize("p", SEQUENTIAL)
@pytest.mark.parametrize("n_right", [0, 1, 3, 5])
def test_verification_batches_carry_the_state(p, n_right):
    """Six rows of which `n_right` drafts are right: the accepted tokens and the state after them are the
    plain ones.
    """
    logits = logits_of(12)
    plain, states = one_by_one(logits, p)
    if p.temperature > 0:
        assert len(set(plain)) > 3
    start = 4  # tokens committed before this step
    before = states[start - 1]
    out = sample_rows(
        logits[start : start + 6],
        p,
        torch.arange(50 + start, 56 + start),
        states=[before] + [None] * 5,
        first_rows=[True] + [False] * 5,
    )
    accepted = n_right + 1
    assert out.tokens[:accepted].tolist() == plain[start : start + accepted]
    assert out.states[accepted - 1] == states[start + accepted - 1]
    assert before == states[start - 1]


def test_two_sequences_in_one_batch_stay_apart():
    p = SEQUENTIAL[1]
    logits = logits_of(6)
    a, states_a = one_by_one(logits[:3], p, first=10)
    b, states_b = one_by_one(logits[3:], p, first=200)
    out = sample_rows(
        logits,
        p,
        torch.tensor([10, 11, 12, 200, 201, 202]),
        first_rows=[True, False, False] * 2,
    )
    assert out.tokens.tolist() == a + b
    assert out.states == states_a + states_b


def test_start_state():
    state = SamplerState.start(SamplingParams(mirostat_tau=4.0, adaptive_target=0.5, adaptive_decay=0.75))
    assert state == SamplerState(mu=8.0, weighted_sum=2.0, total_weight=4.0)
    assert math.isfinite(SamplerState.start(SamplingParams(adaptive_decay=1.0)).total_weight)
