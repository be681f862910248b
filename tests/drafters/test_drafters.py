"""What holds for drafters with a model: independence of slot, batch and history; windows; saving; chains."""

import pytest
import torch
from families import make_dflash, make_qwen3, make_qwen35
from loop import generate, load_target, make_drafter, one
from small_vocabulary import twelve_letters

from ggufspec.drafters import dflash
from ggufspec.drafters.chain import Chain
from ggufspec.drafters.load import NgramSizes, SpecOptions, load_drafter
from ggufspec.errors import ConfigError
from ggufspec.kernels.attention import plain as attention
from ggufspec.rows import Rows, prompt_rows

SMALL = dict(type="F32", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12)
PROMPT = [5, 6, 7, 8, 9, 10, 1, 3, 4, 2, 3, 2, 2, 5, 1, 7]
OTHER = [9, 9, 1, 4, 4, 4, 2, 10, 3, 8, 6, 7, 7, 5, 5, 1, 2, 3]
KINDS = {
    "mtp": ("draft-mtp", None),
    "dflash": ("draft-dflash", dict()),
    "dspark": ("draft-dspark", dict(kind="dspark")),
    "dflash2": ("draft-dflash", dict(kind="dflash2", window=9)),
    "small": ("draft-simple", "qwen3"),
    "small hybrid": ("draft-simple", "qwen35"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_qwen3(folder / "qwen3.gguf", seed=3, vocabulary=twelve_letters(), **SMALL)
    make_qwen35(folder / "qwen35.gguf", seed=3, state_size=16, vocabulary=twelve_letters(mask=True), **SMALL)
    for name, (_, options) in KINDS.items():
        if isinstance(options, dict):
            make_dflash(
                folder / f"{name}.gguf", seed=5, vocabulary=twelve_letters(mask=True), **options, **SMALL
            )
    return folder


@pytest.fixture(scope="module")
def hybrid(folder):
    return load_target(folder / "qwen35.gguf")


def make(folder, target, name, **options):
    kind, file = KINDS[name]
    path = None if file is None else folder / f"{file if isinstance(file, str) else name}.gguf"
    options = {"n_max": 4, "type_k": "f32", "type_v": "f32", **options}
    return make_drafter(*target, path, [kind], **options)


@pytest.mark.parametrize("name", KINDS)
def test_every_slot_drafts_the_same(folder, hybrid, name):
    """A drafter on slots 0..3, one after the other, and twice on the same slot after another text."""
    drafter = make(folder, hybrid, name, n_slots=4)
    cache = hybrid[1].new_cache(4, 512, "f32", "f32")
    runs = [
        generate(hybrid[1], drafter, PROMPT, 24, slot=slot, banned=(0,), cache=cache) for slot in range(4)
    ]
    generate(hybrid[1], drafter, OTHER, 16, slot=2, banned=(0,), cache=cache)
    runs.append(generate(hybrid[1], drafter, PROMPT, 24, slot=2, banned=(0,), cache=cache))
    assert runs[0].n_drafted > 20 and all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_batch_drafts_what_each_slot_drafts_alone(folder, hybrid, name):
    texts = [PROMPT, OTHER, PROMPT[:7], OTHER[:3]]

    def prepared(n_slots, chosen):
        drafter = make(folder, hybrid, name, n_slots=n_slots)
        cache = hybrid[1].new_cache(n_slots, 512, "f32", "f32")
        for slot, text in enumerate(chosen):
            rows = prompt_rows(torch.tensor(text), slot, 0)
            output = hybrid[1].forward(rows, cache, taps=drafter.taps, logits="none")
            drafter.observe(rows, output)
        return drafter

    together = prepared(4, texts)
    n_past = torch.tensor([len(text) for text in texts])
    last = torch.tensor([1, 2, 3, 4])
    order = torch.tensor([2, 0, 3, 1])  # entries need not stand in the order of their slots
    batch = together.propose(order, last[order], n_past[order], 4)
    for entry, slot in enumerate(order.tolist()):
        alone = prepared(1, [texts[slot]]).propose(one(0), last[slot : slot + 1], n_past[slot : slot + 1], 4)
        assert torch.equal(batch.tokens[entry], alone.tokens[0])
        assert torch.equal(batch.n_tokens[entry], alone.n_tokens[0])


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_fewer_tokens_are_those_of_a_drafter_set_to_fewer(folder, hybrid, name):
    """A block's width changes its drafts: that of a step that asks for n tokens follows n."""
    cache = hybrid[1].new_cache(1, 512, "f32", "f32")
    rows = prompt_rows(torch.tensor(PROMPT), 0, 0)
    place = one(0), one(3), one(len(PROMPT))

    def drafted(n_max, n):
        drafter = make(folder, hybrid, name, n_max=n_max)
        cache.reset(0)
        drafter.observe(rows, hybrid[1].forward(rows, cache, taps=drafter.taps, logits="none"))
        return drafter.propose(*place, n)

    for n in (1, 2, 3, 4):
        few, own = drafted(4, n), drafted(n, n)
        assert few.tokens.shape == (1, n) and torch.equal(few.tokens, own.tokens)
        assert torch.equal(few.n_tokens, own.n_tokens)


@pytest.mark.parametrize("name", KINDS)
def test_the_last_positions_of_the_context(folder, hybrid, name):
    """Blocks reach past the context's end there; nothing is written outside the cache and the text is the plain one."""
    n_ctx = 48
    drafter = make(folder, hybrid, name, n_ctx=n_ctx)
    run = generate(hybrid[1], drafter, PROMPT, n_ctx - len(PROMPT), n_ctx=n_ctx, banned=(0,))
    plain = generate(hybrid[1], None, PROMPT, n_ctx - len(PROMPT), n_ctx=n_ctx, banned=(0,))
    assert run.tokens == plain.tokens
    drafter.propose(one(0), one(3), one(n_ctx - 1), drafter.n_max)


@pytest.mark.parametrize("target", ["qwen3", "qwen35"])
def test_a_small_model_that_is_the_target_is_always_right(folder, target):
    pair = load_target(folder / f"{target}.gguf")
    drafter = make_drafter(
        *pair, folder / f"{target}.gguf", ["draft-simple"], n_max=4, type_k="f32", type_v="f32"
    )
    run = generate(pair[1], drafter, PROMPT, 41, banned=())
    assert run.n_drafted == run.n_accepted == 32


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_saved_and_rewound_states_draft_the_same(folder, hybrid, name):
    target = hybrid[1]
    drafter = make(folder, hybrid, name, n_slots=3)
    cache = target.new_cache(3, 512, "f32", "f32")

    def feed(slot, text, n_past):
        rows = prompt_rows(torch.tensor(text), slot, n_past)
        drafter.observe(rows, target.forward(rows, cache, taps=drafter.taps, logits="none"))

    feed(0, PROMPT, 0)
    place = one(3), one(len(PROMPT))
    expected = drafter.propose(one(0), *place, 4).tokens
    saved, checkpoint = drafter.save(0, len(PROMPT)), drafter.checkpoint(0, len(PROMPT))
    feed(0, OTHER, len(PROMPT))
    drafter.rewind(0, checkpoint)
    assert torch.equal(drafter.propose(one(0), *place, 4).tokens, expected)
    feed(2, OTHER, 0)
    drafter.check(saved)
    drafter.restore(2, saved)
    assert torch.equal(drafter.propose(one(2), *place, 4).tokens, expected)


def test_states_of_other_caches_are_refused(folder, hybrid):
    states = {}
    for kv in ("f32", "q8_0"):
        for name in KINDS:
            drafter = make(folder, hybrid, name, type_k=kv, type_v=kv)
            states[name, kv] = drafter.save(0, 4)
            if kv == "q8_0":
                with pytest.raises(ConfigError, match="saved slot's .* cache has other types"):
                    drafter.check(states[name, "f32"])
    ngram = make_drafter(*hybrid, None, ["ngram-simple"], n_ctx=8)
    with pytest.raises(ConfigError, match="text has 9 tokens, a slot here holds 8"):
        ngram.check(torch.zeros(9, dtype=torch.int64))


@pytest.mark.parametrize("type_k, type_v", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q5_1"), ("bf16", "iq4_nl")])
def test_draft_cache_types_only_change_the_drafts(folder, hybrid, type_k, type_v):
    for name in ("mtp", "dspark", "dflash2"):
        drafter = make(folder, hybrid, name, type_k=type_k, type_v=type_v)
        run = generate(hybrid[1], drafter, PROMPT, 40, banned=(0,))
        assert run.tokens[:40] == generate(hybrid[1], None, PROMPT, 40, banned=(0,)).tokens


# -- sliding windows -----------------------------------------------------------------------------------------


def long_prompt(n):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 11, (n,), generator=generator).tolist()


@pytest.mark.parametrize("n_prompt", [240, 700])
def test_a_ring_drafts_what_a_full_cache_drafts(folder, hybrid, n_prompt, monkeypatch):
    """Past the window, past the ring's end, and with a prompt chunk longer than the whole ring."""
    prompt = long_prompt(n_prompt)
    ring = make(folder, hybrid, "dflash2", n_ctx=1024)
    monkeypatch.setattr(dflash, "is_ring", lambda config, layer, n_ctx: False)
    full = make(folder, hybrid, "dflash2", n_ctx=1024)
    assert [kv.ring for kv in ring.kvs] == [True, False] and not any(kv.ring for kv in full.kvs)
    assert ring.kvs[0].n_cells == 256 and full.kvs[0].n_cells >= 1024
    runs = [
        generate(hybrid[1], drafter, prompt, 60, n_ctx=1024, banned=(0,), n_chunk=600)
        for drafter in (ring, full)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("n_past", [20, 250, 256, 700])
@torch.inference_mode()
def test_what_a_saved_ring_leaves_out_is_never_read(folder, hybrid, n_past):
    """Drafts after a restore are those of the slot in place, whatever the cells that are not saved hold there."""
    drafter = make(folder, hybrid, "dflash2", n_slots=2, n_ctx=1024)
    rows = prompt_rows(torch.tensor(long_prompt(n_past)), 0, 0)
    features = torch.randn(1, n_past, 128, generator=torch.Generator().manual_seed(1))
    drafter.backbone.inject(features, rows, drafter.kvs)

    def block(slot):
        rows = Rows(torch.tensor([[3, 11, 11, 11, 11]]), one(slot), one(n_past), one(5), True)
        return drafter.backbone.hidden(drafter.backbone.block(rows, drafter.kvs))

    own = drafter.kvs[0]
    assert own.ring and own.n_cells == 256
    want = block(0)
    saved, kept = drafter.save(0, n_past), drafter.checkpoint(0, n_past)
    assert all(torch.equal(a, b) for a, b in zip(saved[0], kept[0])) and kept[1] is None
    drafter.restore(1, saved)
    assert torch.equal(block(1), want)
    left_out = (saved[0][0] == 0).all(-1).all(-1)
    assert int(left_out.sum()) == max(256 - n_past, drafter.n_beside)
    own.k[0, left_out], own.v[0, left_out] = 50.0, -50.0
    assert torch.equal(block(0), want)
    drafter.rewind(0, kept)
    assert torch.equal(block(0), want)


@pytest.mark.parametrize("causal", [False, True])
@torch.inference_mode()
def test_a_row_sees_exactly_its_window(tmp_path, hybrid, causal):
    """Changing the features of position p changes row i of the block if and only if n + i - p < window."""
    window, n_past = 9, 30
    path = make_dflash(
        tmp_path / "w.gguf", seed=5, n_layers=1, window=window, causal=causal,
        vocabulary=twelve_letters(mask=True), **SMALL,
    )  # fmt: skip
    drafter = make_drafter(*hybrid, path, ["draft-dflash"], n_max=4, type_k="f32", type_v="f32")
    rows = prompt_rows(torch.arange(n_past) % 10 + 1, 0, 0)
    features = torch.randn(1, n_past, 128, generator=torch.Generator().manual_seed(1))
    block = Rows(torch.tensor([[3, 11, 11, 11, 11]]), one(0), one(n_past), one(5), True)

    def hidden(changed):
        other = features.clone()
        if changed is not None:
            other[0, changed] += 1.0
        drafter.backbone.inject(other, rows, drafter.kvs)
        return drafter.backbone.hidden(drafter.backbone.block(block, drafter.kvs))[0]

    reference = hidden(None)
    for p in range(n_past - window - 2, n_past):
        seen = [not torch.equal(a, b) for a, b in zip(hidden(p), reference)]
        assert seen == [n_past + i - p < window for i in range(5)]


def test_a_block_costs_no_more_far_behind_the_window(tmp_path, hybrid, monkeypatch):
    """Cells that a block's attention reads: as many at any position, and of a layer without a window more and more."""
    read = []
    decode = attention.decode_cells
    monkeypatch.setattr(
        attention, "decode_cells", lambda kv, slot, a, b: (read.append(b - a), decode(kv, slot, a, b))[1]
    )

    def cells(window_layers, n_past):
        path = make_dflash(tmp_path / "w.gguf", seed=5, window=40, window_layers=window_layers,
                           vocabulary=twelve_letters(mask=True), **SMALL)  # fmt: skip
        drafter = make_drafter(*hybrid, path, ["draft-dflash"], n_max=4, n_ctx=4096)
        read.clear()
        drafter.propose(one(0), one(3), one(n_past), 4)
        return sum(read), sum(kv.n_cells for kv in drafter.kvs)

    sliding = [cells([True, True], n_past) for n_past in (300, 1500, 4000)]
    assert len(set(sliding)) == 1 and sliding[0] == (2 * 256, 2 * 256)
    assert [cells([False, False], n_past)[0] > sliding[0][0] for n_past in (300, 1500, 4000)] == [True] * 3


# -- chains --------------------------------------------------------------------------------------------------


def test_a_chain_uses_the_first_that_drafts(folder, hybrid):
    chain = make_drafter(
        *hybrid, folder / "dspark.gguf", ["draft-dspark", "ngram-simple"], n_max=4, type_k="f32", type_v="f32",
        ngram_simple=NgramSizes(3, 5),
    )  # fmt: skip
    assert isinstance(chain, Chain) and [d.name for d in chain.members] == ["ngram-simple", "draft-dspark"]
    assert chain.n_max == 5 and chain.taps == (1, 3)
    run = generate(hybrid[1], chain, PROMPT, 100, banned=(0,))
    assert run.tokens[:100] == generate(hybrid[1], None, PROMPT, 100, banned=(0,)).tokens
    ngram, dspark = (d.stats for d in chain.members)
    assert ngram.n_drafts > 0 and dspark.n_drafts > 0
    assert ngram.draft_n + dspark.draft_n == chain.stats.draft_n == run.n_drafted
    assert ngram.draft_n_accepted + dspark.draft_n_accepted == run.n_accepted
    assert {len(draft) for draft, _ in run.steps[:-6]} >= {4, 5}


def test_a_chain_gives_every_model_its_own_taps(folder, hybrid):
    """Each member drafts in the chain what it drafts alone."""
    chain = Chain([make(folder, hybrid, name) for name in ("dspark", "dflash", "mtp")])
    generate(hybrid[1], chain, PROMPT, 1, banned=(0,))
    place = one(0), one(3), one(len(PROMPT))
    for member, name in zip(chain.members, ("mtp", "dflash", "dspark")):
        alone = make(folder, hybrid, name)
        generate(hybrid[1], alone, PROMPT, 1, banned=(0,))
        assert torch.equal(member.propose(*place, 4).tokens, alone.propose(*place, 4).tokens)


def test_wide_ngrams_are_held_to_what_a_step_can_take_back(folder, hybrid, caplog):
    """Nobody is told of sizes that nobody chose."""
    target_file, target = hybrid
    for sizes, n_lines in ((NgramSizes(), 0), (NgramSizes(size_m=40), 1)):
        spec = SpecOptions(types=("ngram-simple",), ngram_simple=sizes)
        drafter = load_drafter(spec, target_file, target, None, n_slots=1, n_ctx=64)
        assert drafter.n_max == 16
        assert sum(r.levelname == "WARNING" for r in caplog.records) == n_lines
    assert "ngram-simple: drafts of up to 40 tokens were asked for; a step here verifies at most 16" in caplog.text
