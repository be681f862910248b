"""Drafting changes nothing: 3 drafters, draft lengths 1..8, greedy and sampled, KV caches f16, q8_0, q4_0."""

import pytest
from families import make_dflash, make_qwen35
from golden.check_parity import KV_TYPES, Pair, check
from small_vocabulary import twelve_letters

from ggufspec.gguf_file import open_gguf

# Twelve tokens, so that even random drafters are right now and then.
SIZES = dict(type="F16", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12)
PROMPT = [5, 6, 7, 8, 9, 10, 1, 3, 4, 2, 3, 2, 2, 5, 1, 7]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    letters = twelve_letters(mask=True)
    pair = Pair(make_qwen35(folder / "target.gguf", seed=3, state_size=16, vocabulary=letters, **SIZES))
    drafts = {"mtp": None}
    for kind, options in (("dspark", dict(block_size=8)), ("dflash2", dict(block_size=9, window=16))):
        drafts[kind] = open_gguf(
            make_dflash(folder / f"{kind}.gguf", kind=kind, seed=5, vocabulary=letters, **options, **SIZES)
        )
    return pair, drafts


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("kind", ["mtp", "dspark", "dflash2"])
def test_streams_are_the_plain_ones(family, kind, kv):
    pair, drafts = family
    cases = list(check(pair, PROMPT, [drafts[kind]], range(1, 9), 12, [kv]))
    assert len(cases) == 16 and sum(n_accepted for _, _, n_accepted in cases) > 0
    assert [wrong for _, wrong, _ in cases if wrong] == []
