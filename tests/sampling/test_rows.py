"""sample_rows against the independent reference, across batch compositions, and as a distribution."""

import math
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ggufspec.errors import ConfigError, RequestError
from ggufspec.sampling import DEFAULT_CHAIN, BoundParams, SamplingParams, bind, sample_rows
from ggufspec.sampling.bind import MAX_KEPT, _read
from ggufspec.sampling.dry import Breakers
from ggufspec.sampling.uniform import CHOICE, CHOICE_MASKED, XTC, XTC_MASKED

from . import reference

N_VOCAB = 211

# every sampler alone and in company; each row of tests runs all of them
CASES = {
    "default": {},
    "greedy": {"temperature": 0.0},
    "greedy, negative": {"temperature": -1.0, "top_k": 0},
    "hot": {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top_k only": {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    "top_k above the vocabulary": {"top_k": 1000},
    "top_p only": {"top_k": 0, "top_p": 0.7, "min_p": 0.0},
    "top_p 0": {"top_k": 0, "top_p": 0.0, "min_p": 0.0},
    "min_p only": {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "min_keep": {"top_p": 0.1, "min_p": 0.9, "min_keep": 4, "temperature": 2.0},
    "penalties": {
        "repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repeat_last_n": 17},  # fmt: skip
    "penalties, greedy": {"repeat_penalty": 1.9, "temperature": 0.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((3, 2.5), (5, -math.inf), (3, 1.0))},
    "bias, greedy": {"logit_bias": ((3, 50.0), (5, -math.inf)), "temperature": 0.0},
    "top_n_sigma": {"top_n_sigma": 1.2, "temperature": 1.5},
    "typical": {"typical_p": 0.6},
    "typical, cold": {"typical_p": 0.2, "temperature": 0.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.08},
    "xtc always": {"xtc_probability": 1.0, "xtc_threshold": 0.03, "top_k": 0},
    "xtc off by threshold": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "dynatemp": {"dynatemp_range": 0.6, "dynatemp_exponent": 1.4},
    "dynatemp from zero": {"dynatemp_range": 0.6, "temperature": 0.0},
    "dry": {"dry_multiplier": 1.1, "dry_penalty_last_n": 100},
    "dry, greedy": {"dry_multiplier": 4.0, "temperature": 0.0, "dry_allowed_length": 1},
    "everything": {
        "dry_multiplier": 0.8, "repeat_penalty": 1.1, "top_n_sigma": 2.5, "typical_p": 0.95,
        "xtc_probability": 0.4, "xtc_threshold": 0.05, "dynatemp_range": 0.3},
    "reversed order": {"samplers": tuple(reversed(DEFAULT_CHAIN)), "top_p": 0.8, "xtc_probability": 0.5},
    "temperature first": {"samplers": ("temperature", "top_k", "top_p", "min_p"), "temperature": 1.8},
    "no samplers": {"samplers": ()},
    "penalties last": {"samplers": ("top_k", "temperature", "penalties"), "presence_penalty": 1.5},
}  # fmt: skip


def params_of(case, seed=1234):
    p = SamplingParams(seed=seed, **CASES[case])
    if "dry" in case or case == "everything":
        values = {name: getattr(p, name) for name in SamplingParams.__dataclass_fields__}
        p = BoundParams(**values, breakers=Breakers({1: ((),), 2: ((3, 4), (5,))}))
    return p


def history_of(rng):
    """Small alphabet with repeats, so that penalties and DRY have work to do."""
    words = [[rng.randrange(12) for _ in range(rng.randint(1, 5))] for _ in range(4)]
    return [token for _ in range(25) for token in rng.choice(words)]


def rows(n, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, N_VOCAB, generator=generator) * torch.rand(n, 1, generator=generator) * 6
    logits[:, :12] += 2  # the tokens of the histories are likely
    positions = torch.tensor([rng.randrange(100_000) for _ in range(n)])
    return logits, positions, [history_of(rng) for _ in range(n)]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case):
    logits, positions, histories = rows(60, seed=len(case))
    p = params_of(case)
    got = sample_rows(logits, p, positions, histories=histories).tokens.tolist()
    expected = [
        reference.sample(row.tolist(), merged(p), p.seed, n, h)
        for row, n, h in zip(logits, positions.tolist(), histories)
    ]
    assert got == expected


def merged(p):
    """Biases of one token added up, as the reference expects them."""
    total = {}
    for token, value in p.logit_bias:
        total[token] = total.get(token, 0.0) + value
    return replace(p, logit_bias=tuple(total.items()))


def test_batch_composition_does_not_matter():
    """All cases in one batch, each row alone, and a shuffled subset: the same tokens and log-probabilities."""
    logits, positions, histories = rows(3 * len(CASES), seed=5)
    all_params = [replace(params_of(case), n_probs=3) for case in CASES for _ in range(3)]
    seeds = [random.Random(i).randrange(2**32 - 1) for i in range(len(all_params))]
    together = sample_rows(logits, all_params, positions, seeds, histories)
    order = list(range(len(all_params)))
    random.Random(3).shuffle(order)
    for group in ([[i] for i in order], [order[:17]], [order[17:60]]):
        for part in group:
            some = sample_rows(
                logits[part],
                [all_params[i] for i in part],
                positions[part],
                [seeds[i] for i in part],
                [histories[i] for i in part],
            )
            assert some.tokens.tolist() == together.tokens[part].tolist()
            assert some.logprobs == [together.logprobs[i] for i in part]


@pytest.mark.parametrize(
    "case",
    ["default", "hot", "min_keep", "penalties", "typical", "xtc", "xtc always", "dynatemp", "everything"],
)
def test_distribution(case):
    """Over thousands of positions the tokens' frequencies are the chain's probabilities (chi-square, 1 in
    10,000).
    """
    logits, _, histories = rows(1, seed=11)
    p = params_of(case, seed=99)
    n = 20_000 if p.on_device else 6_000
    history = histories[0]
    fired, idle = (
        dict(zip((t for t, _ in c), reference.softmax(c)))
        for c in (reference.chain(logits[0].tolist(), p, history, u) for u in (0.0, 1.0))
    )
    on = p.xtc_probability if p.xtc_threshold <= 0.5 else 0.0
    expected = np.zeros(N_VOCAB)
    for share, probabilities in ((on, fired), (1 - on, idle)):
        for token, q in probabilities.items():
            expected[token] += share * q * n
    tokens = []
    for start in range(0, n, 2000):
        at = torch.arange(start, start + 2000)
        tokens += sample_rows(logits.expand(2000, -1), p, at, histories=[history] * 2000).tokens.tolist()
    seen = np.bincount(tokens, minlength=N_VOCAB)
    assert seen[expected == 0].sum() == 0
    big = expected >= 5
    rest = expected[~big].sum()
    cells = [*zip(seen[big], expected[big])] + ([(seen[~big].sum(), rest)] if rest > 5 else [])
    chi2, df = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    assert chi2 < df + 3.72 * math.sqrt(2 * df) + 10


def test_ties_go_to_the_lower_id():
    logits = torch.zeros(1, N_VOCAB)
    logits[0, [7, 50, 120]] = 3.0
    assert sample_rows(logits, SamplingParams(temperature=0), torch.tensor([4])).tokens.tolist() == [7]
    p = SamplingParams(seed=1, top_k=2, top_p=1.0, min_p=0.0)
    tokens = sample_rows(logits.expand(400, -1), p, torch.arange(400)).tokens
    assert set(tokens.tolist()) == {7, 50}
    minus_zero = torch.full((1, 8), -1.0)
    minus_zero[0, 2], minus_zero[0, 5] = -0.0, 0.0
    assert sample_rows(minus_zero, SamplingParams(temperature=0, n_probs=1, post_sampling_probs=True),
                       torch.tensor([0])).tokens.tolist() == [2]  # fmt: skip


@pytest.mark.parametrize("case", ["default", "greedy", "hot", "penalties", "typical", "xtc always", "top_p only"])
@pytest.mark.parametrize("packed", [False, True])
def test_masked_rows_follow_llama(case, packed):
    """A free choice that the mask allows stands; otherwise the masked chain decides with streams of its
    own.
    """
    logits, positions, histories = rows(80, seed=21)
    mask = torch.rand(80, N_VOCAB, generator=torch.Generator().manual_seed(2)) < 0.3
    p = params_of(case)
    given = pack(mask) if packed else mask
    got = sample_rows(logits, p, positions, histories=histories, masks=given).tokens.tolist()
    kept = 0
    for r, token in enumerate(got):
        row, n = logits[r].tolist(), int(positions[r])
        free = reference.sample(row, p, p.seed, n, histories[r], (CHOICE, XTC))
        if mask[r, free]:
            assert token == free
            kept += 1
        else:
            only = [x if ok else -math.inf for x, ok in zip(row, mask[r].tolist())]
            assert mask[r, token]
            assert token == reference.sample(only, p, p.seed, n, histories[r], (CHOICE_MASKED, XTC_MASKED))
    assert 5 < kept < 75


def pack(mask):
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).view(len(mask), -1, 32)
    words = (padded.to(torch.int64) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_logprobs_are_those_of_the_raw_logits():
    logits, positions, histories = rows(6, seed=31)
    p = SamplingParams(seed=5, n_probs=4, repeat_penalty=1.5, logit_bias=((1, 5.0),))
    out = sample_rows(logits, p, positions, histories=histories)
    reference_logprobs = torch.log_softmax(logits.double(), 1)
    for r, entries in enumerate(out.logprobs):
        token, of_token = entries[0]
        assert token == out.tokens[r]
        assert of_token == pytest.approx(float(reference_logprobs[r, token]), abs=1e-12)
        best = sorted(range(N_VOCAB), key=lambda t: (-float(logits[r, t]), t))[:4]
        assert [t for t, _ in entries[1:]] == best


@pytest.mark.parametrize("case", ["default", "greedy", "typical", "min_keep", "everything"])
def test_post_sampling_probabilities(case):
    logits, positions, histories = rows(5, seed=41)
    p = replace(params_of(case), n_probs=50, post_sampling_probs=True)
    out = sample_rows(logits, p, positions, histories=histories)
    for r, entries in enumerate(out.logprobs):
        u = reference.uniform(p.seed, int(positions[r]), 1)
        cands = reference.chain(logits[r].tolist(), p, histories[r], u)
        expected = dict(zip((t for t, _ in cands), reference.softmax(cands)))
        got = {t: math.exp(x) for t, x in entries[1:]}
        assert got == pytest.approx({t: q for t, q in expected.items() if t in got}, abs=1e-7)  # penalties are float32
        assert sum(got.values()) == pytest.approx(1.0) and entries[0][0] == out.tokens[r]


def test_masked_out_rows_and_extremes_stay_defined():
    dead = torch.full((1, 16), -math.inf)
    assert 0 <= sample_rows(dead, SamplingParams(seed=1), torch.tensor([0])).tokens.item() < 16
    spike = torch.full((1, 16), -1e30)
    spike[0, 9] = 1e30
    for t in (0.0, 1e-6, 0.8, 1e6):
        assert sample_rows(spike, SamplingParams(seed=1, temperature=t), torch.tensor([3])).tokens.item() == 9
    one = torch.zeros(1, 1)
    assert sample_rows(one, SamplingParams(seed=1, typical_p=0.5), torch.tensor([3])).tokens.item() == 0
    assert sample_rows(torch.zeros(0, 8), [], torch.zeros(0, dtype=torch.int64)).tokens.shape == (0,)


class Words:
    """A vocabulary of a few words."""

    n_vocab, eog, eot = 4, (3,), 3

    def piece(self, token):
        return [b"a", b"b\n", b"c", b"<end>"][token]

    def encode(self, text, add_special=True, parse_special=True):
        raise AssertionError("no breaker is longer than a piece here")


def test_bind_bans_every_end_token_and_checks_ids():
    bound = bind(SamplingParams(ignore_eos=True, temperature=0, dry_multiplier=1.0), Words())
    assert bound.breakers.tails == {1: ((),)}
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    assert sample_rows(logits, bound, torch.tensor([0]), histories=[[]]).tokens.tolist() == [2]
    with pytest.raises(RequestError, match="token 4 is outside"):
        bind(SamplingParams(logit_bias=((4, 1.0),)), Words())
    assert bind(SamplingParams(), Words()).seed != 0xFFFFFFFF


def test_a_vocabulary_is_read_once(monkeypatch):
    class Counted(Words):
        reads = 0

        def piece(self, token):
            Counted.reads += 1
            return super().piece(token)

        def encode(self, text, add_special=True, parse_special=True):
            return [0] * len(text)

    vocabulary = Counted()
    params = SamplingParams(dry_multiplier=1.0, samplers=("dry", "infill"))
    first = bind(params, vocabulary)
    assert Counted.reads == vocabulary.n_vocab
    monkeypatch.setattr(sys.modules["ggufspec.sampling.bind"], "find_breakers", None)  # no second search
    again = bind(params, vocabulary)
    assert again.breakers is first.breakers and Counted.reads == vocabulary.n_vocab
    monkeypatch.undo()
    kept = [bind(replace(params, dry_sequence_breakers=("a" * i,)), vocabulary).breakers for i in range(MAX_KEPT + 9)]
    assert kept[2].tails == {0: ((0,),)} and _read(vocabulary).breakers[("a" * (MAX_KEPT + 8),)] is kept[-1]
    assert len(_read(vocabulary).breakers) == MAX_KEPT


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repeat_last_n": -1}, "repeat-last-n = -1"),
        ({"repeat_penalty": 0.0}, "repeat-penalty = 0.0"),
        ({"frequency_penalty": math.inf}, "frequency-penalty = inf"),
        ({"mirostat": 3}, "mirostat = 3"),
        ({"samplers": ("top_q",)}, "unknown sampler 'top_q'"),
        ({"logit_bias": ((-1, 0.0),)}, "logit bias"),
    ],
)
def test_bad_parameters_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong)


def test_calls_that_lack_something_are_refused():
    logits, at = torch.zeros(1, 8), torch.tensor([0])
    with pytest.raises(ConfigError, match="seed is not drawn"):
        sample_rows(logits, SamplingParams(), at)
    with pytest.raises(ConfigError, match="need the histories"):
        sample_rows(logits, SamplingParams(seed=1, repeat_penalty=1.1), at)
    with pytest.raises(ConfigError, match="needs a vocabulary"):
        sample_rows(logits, SamplingParams(seed=1, ignore_eos=True), at)
    with pytest.raises(ConfigError, match="needs a vocabulary"):
        sample_rows(logits, SamplingParams(seed=1, dry_multiplier=1.0), at, histories=[[1, 2, 1, 2]])
    with pytest.raises(ConfigError, match="2 seeds for 1 rows"):
        sample_rows(logits, SamplingParams(seed=1), at, seeds=[1, 2])
