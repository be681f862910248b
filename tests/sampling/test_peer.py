"""The chain against llama.cpp: the candidates that are left and their probabilities, sampler by sampler."""

import math

import families
import pytest
import torch
from peer import Peer

from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec, GrammarState
from ggufspec.models import load_model
from ggufspec.rows import prompt_rows
from ggufspec.sampling import SamplingParams, bind, sample_rows
from ggufspec.tokenizer import Tokenizer

PROMPT = "one two three: one two three: one two th"

CASES = {
    "defaults": {},
    "all off": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "cold": {"temperature": 0.2},
    "zero": {"temperature": 0.0},
    "top_k": {"top_k": 7, "top_p": 1.0, "min_p": 0.0, "temperature": 1.5},
    "top_p": {"top_k": 0, "top_p": 0.6, "min_p": 0.0},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    "min_keep": {"top_p": 0.01, "min_p": 0.9, "min_keep": 5},
    "top_n_sigma": {"top_n_sigma": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "typical": {"typical_p": 0.5, "top_p": 1.0, "min_p": 0.0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 0, "min_p": 0.0, "top_p": 1.0},
    "dynatemp": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.3, "top_p": 1.0},
    "penalties": {
        "repeat_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "repeat_last_n": 20,
        "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "dry": {"dry_multiplier": 0.8, "dry_penalty_last_n": 64, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "dry, own breakers": {
        "dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ("wo",), "top_k": 0, "top_p": 1.0,
        "min_p": 0.0},
    "bias": {"logit_bias": ((100, 3.0), (101, -2.0)), "top_p": 1.0},
    "ignore_eos": {"ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "order": {"samplers": ("temperature", "min_p", "top_k", "typ_p"), "temperature": 2.0, "typical_p": 0.7},
    "infill": {"samplers": ("top_k", "infill"), "top_k": 50},
    "adaptive": {"samplers": ("min_p", "adaptive_p"), "adaptive_target": 0.1, "min_p": 0.1},
    "everything": {
        "repeat_penalty": 1.1, "dry_multiplier": 0.5, "top_n_sigma": 3.0, "typical_p": 0.9, "dynatemp_range": 0.2},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """llama.cpp on a small random model, its tokenizer, and the logits after PROMPT from our model."""
    path = families.make_qwen3(tmp_path_factory.mktemp("peer") / "m.gguf", seed=5, type="F32")
    file = open_gguf(path)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    model = load_model(file)
    ids = tokenizer.encode(PROMPT, add_special=True, parse_special=True)
    cache = model.new_cache(1, 256, "f32", "f32")
    with torch.inference_mode():
        logits = model.forward(prompt_rows(torch.tensor(ids), 0, 0), cache, logits="last").logits[0, 0]
    with Peer(path, n_ctx=256, type_k="f32", type_v="f32", flash_attention="off") as peer:
        yield peer, tokenizer, logits, ids


def request_of(p):
    body = {name: getattr(p, name) for name in SamplingParams.__dataclass_fields__ if name != "ignore_eos"}
    body["logit_bias"] = [[t, b if math.isfinite(b) else False] for t, b in p.logit_bias]
    return {**body, "samplers": list(p.samplers), "dry_sequence_breakers": list(p.dry_sequence_breakers)}


@pytest.mark.peer
@pytest.mark.parametrize("case", CASES)
def test_probabilities_after_the_chain(pair, case):
    peer, tokenizer, logits, ids = pair
    # random weights give flat logits: biases, the same on both sides, spread them
    spread = tuple((t, 6.0 * math.sin(7.0 * t)) for t in range(64, 128))
    own = CASES[case]
    both = spread + own.get("logit_bias", ())
    total = {t: sum(b for u, b in both if u == t) for t, _ in both}
    p = SamplingParams(seed=3, n_probs=400, post_sampling_probs=True, **{**own, "logit_bias": tuple(total.items())})
    body = {"prompt": ids, "n_predict": 1, "ignore_eos": p.ignore_eos, "cache_prompt": False, **request_of(p)}
    raw = peer.post("/completion", body)
    theirs = {entry["id"]: entry["prob"] for entry in raw["completion_probabilities"][0]["top_probs"]}
    out = sample_rows(logits[None], bind(p, tokenizer), torch.tensor([len(ids)]), histories=[ids])
    ours = {token: math.exp(x) for token, x in out.logprobs[0][1:]}
    assert set(ours) ^ set(theirs) <= {t for side in (ours, theirs) for t, q in side.items() if q < 1e-6}
    for token in set(ours) & set(theirs):
        assert ours[token] == pytest.approx(theirs[token], rel=2e-3, abs=2e-6)
    assert sum(ours.values()) == pytest.approx(1.0, abs=1e-6)


GRAMMARS = [
    'root ::= "yes" | "no"',
    'root ::= [a-f]+ ("-" [0-9]{2,3})* "."',
    'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | "\\"" [^"\\n]* "\\""',
]


@pytest.mark.peer
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_what_llama_writes_fits_the_grammar_here(pair, grammar):
    """Sampled texts of llama.cpp under a grammar are accepted token by token, and end where it ends."""
    peer, tokenizer, _, ids = pair
    ended = 0
    for seed in range(6):
        answer = peer.complete(
            ids, 40, grammar=grammar, temperature=2.0, seed=seed, top_k=0, min_p=0.0, top_p=1.0, top=1
        )
        state = GrammarState.start(GrammarSpec("gbnf", grammar), tokenizer)
        for token in answer.tokens:
            assert state.allows(token)
            if token in tokenizer.eog:
                assert state.accepting
                break
            assert state.advance(token)
        ended += answer.raw["stop_type"] == "eos"
    assert ended > 0
