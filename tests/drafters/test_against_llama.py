"""Every step's draft length and accepted count against llama.cpp in process, on random models of twelve tokens.

With so few tokens a random drafter is right about once in twelve, so that the counts tell drafts apart.
"""

import re
import time

import pytest
from families import make_dflash, make_qwen3, make_qwen35
from loop import generate, load_target, make_drafter
from peer import Peer
from small_vocabulary import twelve_letters

from ggufspec.drafters.load import ModSizes, NgramSizes

pytestmark = pytest.mark.peer

SMALL = dict(type="F32", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12)
PROMPT = [5, 6, 7, 8, 9, 10, 1, 3, 4, 2, 3, 2, 2, 5, 1, 7]
N_PREDICT = 120
D2T = [1, 2, 4, 5, 7, 8, 10, 11]

# name: (target, kind of --spec-type, draft file, options of the run)
MODELS = {
    "v1": ("qwen3", "draft-dflash", dict(), dict(n_max=5)),
    "v1, n_max above the block": ("qwen3", "draft-dflash", dict(block_size=4), dict(n_max=9)),
    "v1, p_min": ("qwen3", "draft-dflash", dict(), dict(n_max=6, p_min=0.4)),
    "v1, p_min and n_min": ("qwen3", "draft-dflash", dict(), dict(n_max=6, p_min=0.3, n_min=2)),
    "v1, window": ("qwen3", "draft-dflash", dict(window=7, window_layers=[True, False]), dict(n_max=4)),
    "v1, window, causal": ("qwen3", "draft-dflash", dict(window=7, causal=True), dict(n_max=4)),
    "v1, sinks": ("qwen3", "draft-dflash", dict(sinks=True), dict(n_max=4)),
    "v1, own embedding and head": ("qwen3", "draft-dflash", dict(own_embedding=True, own_head=True), dict(n_max=4)),
    "v1, own embedding": ("qwen3", "draft-dflash", dict(own_embedding=True), dict(n_max=4)),
    "v1, sections": ("qwen35", "draft-dflash", dict(sections=[16, 0, 0, 0]), dict(n_max=4)),
    "v1, d2t": ("qwen3", "draft-dflash", dict(d2t=D2T), dict(n_max=5)),
    "dspark": ("qwen35", "draft-dspark", dict(kind="dspark"), dict(n_max=6)),
    "dspark, all of the block": ("qwen3", "draft-dspark", dict(kind="dspark"), dict(n_max=8)),
    "dspark, p_min": ("qwen3", "draft-dspark", dict(kind="dspark"), dict(n_max=6, p_min=0.2)),
    "dspark, bonus anchor": (
        "qwen3", "draft-dspark", dict(kind="dspark", sample_from_anchor=False), dict(n_max=9),
    ),
    "dspark, bonus anchor, p_min": (
        "qwen35", "draft-dspark", dict(kind="dspark", sample_from_anchor=False), dict(n_max=5, p_min=0.4),
    ),
    "dspark, d2t": ("qwen3", "draft-dspark", dict(kind="dspark", d2t=D2T), dict(n_max=5)),
    "dflash2": ("qwen3", "draft-dflash", dict(kind="dflash2"), dict(n_max=7)),
    "dflash2, hybrid target": ("qwen35", "draft-dflash", dict(kind="dflash2"), dict(n_max=3)),
    "dflash2, window": ("qwen3", "draft-dflash", dict(kind="dflash2", window=9), dict(n_max=5)),
    "dflash2, p_min": ("qwen3", "draft-dflash", dict(kind="dflash2"), dict(n_max=5, p_min=0.5)),
    "dflash2, scaled and capped": (
        "qwen3", "draft-dflash",
        dict(kind="dflash2", keys={
            "dflash.logit_scale": ("f32", 0.5), "dflash.final_logit_softcapping": ("f32", 2.0),
            "dflash.embedding_scale": ("f32", 3.0), "dflash.attention.value_scale": ("f32", 0.7),
            "dflash.attention.scale": ("f32", 0.3), "dflash.hidden_activation": ("str", "gelu"),
        }),
        dict(n_max=5),
    ),
    "mtp": ("qwen35", "draft-mtp", None, dict(n_max=3)),
    "mtp, p_min": ("qwen35", "draft-mtp", None, dict(n_max=5, p_min=0.4)),
}  # fmt: skip

NGRAMS = {
    "ngram-simple": NgramSizes(3, 5),
    "ngram-map-k": NgramSizes(3, 5),
    "ngram-map-k4v": NgramSizes(3, 5),
    "ngram-mod": ModSizes(3, 1, 6),
    "ngram-cache": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def make_target(folder, architecture):
    path = folder / f"{architecture}.gguf"
    if not path.exists():
        if architecture == "qwen3":
            make_qwen3(path, seed=3, vocabulary=twelve_letters(), **SMALL)
        else:
            make_qwen35(path, seed=3, state_size=16, vocabulary=twelve_letters(), **SMALL)
    return path


def steps_of(log: str) -> list[tuple[int, int]]:
    """(drafted, accepted) of every verification in llama.cpp's log."""
    found = re.findall(r"accepted +(\d+)/ *(\d+) draft tokens, new n_tokens", log)
    return [(int(k), int(a)) for a, k in found]


def llama(target, draft, kinds, prompt=PROMPT, **params):
    cache = dict(type_k="f32", type_v="f32", draft_type_k="f32", draft_type_v="f32", flash_attention="off")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    with Peer(target, draft=draft, kinds=kinds, verbosity=5, n_threads=1, **cache, **params) as peer:
        answer = peer.complete(prompt, N_PREDICT, ignore_eos=True)
        deadline = time.monotonic() + 20
        while "stop processing" not in (log := peer.log()) and time.monotonic() < deadline:  # it is written behind
            time.sleep(0.05)
        assert "stop processing" in log
        return answer, steps_of(log)


def compare(ours, answer, steps):
    assert ours.tokens[:N_PREDICT] == answer.tokens
    made = [(len(draft), a) for draft, a in ours.steps if draft]
    assert made[: len(steps)] == steps and len(made) - len(steps) <= 1  # a step that ends the text is not told
    assert (ours.n_drafted, ours.n_accepted) == (answer.n_drafted, answer.n_accepted)


@pytest.mark.parametrize("name", MODELS)
def test_model_drafters_step_by_step(folder, name):
    architecture, kind, file_options, options = MODELS[name]
    target_path = make_target(folder, architecture)
    draft = None
    if file_options is not None:
        draft = make_dflash(
            folder / f"{name}.gguf", seed=5, vocabulary=twelve_letters(mask=True), **file_options, **SMALL
        )
    file, target = load_target(target_path)
    drafter = make_drafter(file, target, draft, [kind], type_k="f32", type_v="f32", **options)
    ours = generate(target, drafter, PROMPT, N_PREDICT, banned=(0,))
    assert 0 < ours.n_accepted < ours.n_drafted
    compare(ours, *llama(target_path, draft, kind, **options))


@pytest.mark.parametrize("mtp_only", [False, True])
def test_mtp_from_a_file_of_its_own(folder, mtp_only):
    target_path = make_target(folder, "qwen35")
    draft = folder / f"mtp_{mtp_only}.gguf"
    make_qwen35(
        draft, seed=4, state_size=16, mtp_only=mtp_only, mtp_own_ends=not mtp_only,
        vocabulary=twelve_letters(), **SMALL,
    )  # fmt: skip
    file, target = load_target(target_path)
    drafter = make_drafter(file, target, draft, ["draft-mtp"], type_k="f32", type_v="f32", n_max=3)
    ours = generate(target, drafter, PROMPT, N_PREDICT, banned=(0,))
    assert ours.n_accepted > 0
    compare(ours, *llama(target_path, draft, "draft-mtp", n_max=3))


@pytest.mark.parametrize("p_min", [0.0, 0.4])
def test_small_model(folder, p_min):
    target_path = make_target(folder, "qwen3")
    draft = make_qwen3(folder / "small.gguf", seed=8, n_layers=2, vocabulary=twelve_letters(), **SMALL)
    file, target = load_target(target_path)
    drafter = make_drafter(
        file, target, draft, ["draft-simple"], type_k="f32", type_v="f32", n_max=4, p_min=p_min
    )
    ours = generate(target, drafter, PROMPT, N_PREDICT, banned=(0,))
    assert ours.n_accepted > 0
    compare(ours, *llama(target_path, draft, "draft-simple", n_max=4, p_min=p_min))


@pytest.mark.parametrize("kind", NGRAMS)
def test_ngram_drafters(folder, kind):
    target_path = make_target(folder, "qwen3")
    file, target = load_target(target_path)
    field, sizes = kind.replace("-", "_"), NGRAMS[kind]
    options = {} if sizes is None else {field: sizes}
    params = {} if sizes is None else {f"speculative.{field}.{k}": v for k, v in vars(sizes).items()}
    # A prompt that already holds what the model goes on with, so that all kinds find something.
    prompt = PROMPT + generate(target, None, PROMPT, 2 * N_PREDICT, banned=(0,)).tokens[:N_PREDICT]
    ours = generate(target, make_drafter(file, target, None, [kind], **options), prompt, N_PREDICT, banned=(0,))
    assert ours.n_accepted > 0
    compare(ours, *llama(target_path, None, kind, prompt, params=params))


def test_a_chain_of_ngram_and_model(folder):
    """For each step the n-gram's draft where it has one, else the model's."""
    target_path = make_target(folder, "qwen3")
    draft = make_dflash(
        folder / "chain.gguf", kind="dspark", seed=5, vocabulary=twelve_letters(mask=True), **SMALL
    )
    file, target = load_target(target_path)
    kinds, sizes = ["draft-dspark", "ngram-simple"], NGRAMS["ngram-simple"]
    drafter = make_drafter(
        file, target, draft, kinds, type_k="f32", type_v="f32", n_max=4, ngram_simple=sizes
    )
    ours = generate(target, drafter, PROMPT, N_PREDICT, banned=(0,))
    assert all(member.stats.draft_n_accepted > 0 for member in drafter.members)
    params = {f"speculative.ngram_simple.{k}": v for k, v in vars(sizes).items()}
    compare(ours, *llama(target_path, draft, kinds, n_max=4, params=params))


@pytest.mark.parametrize("seed, draft_seed, any_accepted", [(3, 5, True), (5, 6, False)])
def test_statistics_are_printed_alike(folder, seed, draft_seed, any_accepted):
    """Accept calls, drafts, tokens and the list of positions: with steps without a draft, and with nothing accepted."""
    target_path = make_qwen3(folder / f"q{seed}.gguf", seed=seed, vocabulary=twelve_letters(), **SMALL)
    draft = make_dflash(
        folder / f"s{seed}.gguf", kind="dspark", seed=draft_seed, vocabulary=twelve_letters(mask=True), **SMALL
    )
    file, target = load_target(target_path)
    options = dict(n_max=6, p_min=0.3)
    drafter = make_drafter(file, target, draft, ["draft-dspark"], type_k="f32", type_v="f32", **options)
    ours = generate(target, drafter, PROMPT, N_PREDICT, banned=(0,))
    assert any(not drafted for drafted, _ in ours.steps) and (ours.n_accepted > 0) == any_accepted
    cut = re.compile(r"statistics +draft-dspark: #calls.b,g,a. = +\d+ +\d+( +\d+, #gen drafts.*), dur")
    with Peer(target_path, draft=draft, kinds=["draft-dspark"], verbosity=4, type_k="f32", type_v="f32",
              draft_type_k="f32", draft_type_v="f32", flash_attention="off", **options) as peer:  # fmt: skip
        peer.complete(PROMPT, N_PREDICT, ignore_eos=True)
        deadline = time.monotonic() + 10  # its log is written behind
        while not (found := cut.findall(peer.log())) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert cut.findall(drafter.stats.line()) == found[-1:] != []
