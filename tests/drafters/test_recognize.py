"""What a file is, and every way in which a drafter and a target can disagree: one line that names both values."""

import pytest
from families import Draft, make_dflash, make_qwen2, make_qwen3, make_qwen35
from loop import load_target, make_drafter
from small_vocabulary import byte_bpe

from ggufspec.drafters.recognize import (
    check_pair,
    check_type,
    check_types,
    infer_types,
    parse_types,
)
from ggufspec.errors import ConfigError, FileError, UnsupportedError
from ggufspec.gguf_file import open_gguf

SMALL = dict(n_embd=64, n_ff=64, head_dim=32, type="F16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def target(folder):
    return open_gguf(make_qwen3(folder / "target.gguf", **SMALL))


def dflash(folder, **options):
    return open_gguf(make_dflash(folder / "draft.gguf", **{**SMALL, **options}))


def test_types_are_inferred_from_the_file(folder, target):
    assert infer_types(None) == ()
    assert infer_types(target) == ()
    assert infer_types(dflash(folder)) == ("draft-dflash",)
    assert infer_types(dflash(folder, kind="dflash2")) == ("draft-dflash",)
    assert infer_types(dflash(folder, kind="dspark")) == ("draft-dspark",)
    assert infer_types(open_gguf(make_qwen35(folder / "m.gguf", mtp_only=True, **SMALL))) == ("draft-mtp",)


def test_a_file_of_an_unknown_architecture_is_refused(tmp_path):
    """Also where no type is asked for: it was given to draft, and nothing here can."""
    path = make_qwen3(tmp_path / "e.gguf", **SMALL)
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"eagle"))
    with pytest.raises(UnsupportedError, match="e.gguf: architecture 'eagle' is not a drafter that this program knows"):
        infer_types(open_gguf(path))


def test_lists_of_types():
    assert parse_types(["none"]) == ()
    assert parse_types(["draft-dspark,ngram-mod", "ngram-simple"]) == (
        "draft-dspark", "ngram-mod", "ngram-simple",
    )  # fmt: skip
    assert parse_types(["draft-mtp,none", "ngram-mod"]) == ("ngram-mod",)
    with pytest.raises(ConfigError, match="unknown speculative type: draft-dflash2"):
        parse_types(["draft-dflash2"])
    with pytest.raises(UnsupportedError, match="draft-eagle3 is not supported"):
        parse_types(["draft-eagle3"])


def test_type_and_file_disagree(folder, target):
    dspark, plain = dflash(folder, kind="dspark"), target
    for kind, draft, message in [
        ("draft-dflash", dspark, "is a DSpark drafter, but --spec-type is draft-dflash; expected --spec-type draft-d"),
        ("draft-simple", dspark, "is a DSpark drafter, but --spec-type is draft-simple"),
        ("draft-dspark", plain, "has architecture 'qwen3', but --spec-type draft-dspark needs 'dflash'"),
        ("draft-dspark", None, "--spec-type draft-dspark needs a draft model; give one with --model-draft"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_type(kind, draft, target)


def test_a_file_that_no_type_would_use(folder):
    """`draft-mtp` means the target's own block beside a `dflash` file: alone it would leave the file unused."""
    target = open_gguf(make_qwen35(folder / "q35.gguf", n_layers=4, **SMALL))
    dspark = dflash(folder, kind="dspark")
    with pytest.raises(ConfigError, match="a DSpark drafter, but --spec-type is draft-mtp; expected --spec-type dr"):
        check_types(("ngram-mod", "draft-mtp"), dspark, target)
    for types in (("draft-mtp", "draft-dspark"), ("draft-dspark",), ("ngram-mod",)):
        check_types(types, dspark, target)
    check_types(("draft-mtp",), None, target)
    check_types(("draft-mtp",), target, target)


def test_mtp_needs_a_whole_block(folder, target):
    with pytest.raises(UnsupportedError, match="draft-mtp is supported for architecture 'qwen35'"):
        check_type("draft-mtp", None, target)
    without = open_gguf(make_qwen35(folder / "none.gguf", mtp=False, **SMALL))
    with pytest.raises(ConfigError, match=r"has no MTP block \(qwen35.nextn_predict_layers is 0\)"):
        check_type("draft-mtp", None, without)
    promised = open_gguf(
        make_qwen35(folder / "promise.gguf", n_layers=5, mtp=False, full_interval=5,
                    keys={"qwen35.nextn_predict_layers": ("u32", 1)}, **SMALL)
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"is 1, but tensor blk.4.nextn.eh_proj.weight is missing"):
        check_type("draft-mtp", None, promised)


MTP_BLOCK = (
    "nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


@pytest.mark.parametrize("at", range(len(MTP_BLOCK)))
def test_the_first_missing_tensor_of_a_promised_mtp_block_is_named(folder, monkeypatch, at):
    """Whichever it is, and every one after it is missing too. The target alone still runs."""
    add, left_out = Draft.add, {f"blk.4.{name}.weight" for name in MTP_BLOCK[at:]}
    monkeypatch.setattr(
        Draft, "add", lambda draft, name, *shape, **how: name in left_out or add(draft, name, *shape, **how)
    )
    file, target = load_target(make_qwen35(folder / "partial.gguf", n_layers=4, **SMALL))
    message = rf"nextn_predict_layers is 1, but tensor blk.4.{MTP_BLOCK[at]}.weight is missing; --spec-type draft-mtp"
    with pytest.raises(ConfigError, match=message):
        make_drafter(file, target, None, ["draft-mtp"])


def test_an_mtp_block_of_another_kind_is_refused(folder, monkeypatch):
    write = Draft.write

    def with_another(draft, *arguments):
        draft.add("blk.4.nextn.gate.weight", 64, 64)
        return write(draft, *arguments)

    monkeypatch.setattr(Draft, "write", with_another)
    file, target = load_target(make_qwen35(folder / "gated.gguf", n_layers=4, **SMALL))
    with pytest.raises(UnsupportedError, match="tensor blk.4.nextn.gate.weight is not part of an MTP block"):
        make_drafter(file, target, None, ["draft-mtp"])


@pytest.mark.parametrize("kind, other", [("v1", "blk.0.attn_gate"), ("v1", "markov_w2"), ("dspark", "markov_gate"),
                                         ("dspark", "blk.0.attn_conv_proj"), ("dflash2", "conf_proj")])  # fmt: skip
def test_a_drafter_with_tensors_of_another_kind_is_refused(folder, target, monkeypatch, kind, other):
    write = Draft.write

    def with_another(draft, *arguments):
        draft.add(f"{other}.weight", 64, 64)
        return write(draft, *arguments)

    monkeypatch.setattr(Draft, "write", with_another)
    with pytest.raises(UnsupportedError, match=f"tensor {other}.weight is not part of a D.* this kind of drafter is"):
        check_pair(dflash(folder, kind=kind), target)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_embd=128), "dflash.embedding_length is 128, but the target .* has 64"),
        (dict(taps=(1, 4)), r"target_layers names layer 4, but the target .* has 4 layers \(0 to 3\)"),
        (dict(n_vocab=352), "has 352 tokens, but the target .* has 320"),
        (dict(keys={"tokenizer.ggml.mask_token_id": ("u32", 9999)}), "mask_token_id is 9999, but .* has 320 tokens"),
        (dict(keys={"tokenizer.ggml.mask_token_id": ("u32", 7)}), "mask_token_id is 7, but the target .* has 293"),
        (dict(keys={"tokenizer.ggml.eos_token_id": ("u32", 7)}), "eos_token_id is 7, but the target .* has 290"),
        (dict(keys={"tokenizer.ggml.add_bos_token": ("bool", True)}), "add_bos_token is True, but .* has False"),
        (dict(d2t=[1, 2, 500]), "d2t names token 500, but the vocabulary has 320 tokens"),
        (dict(kind="dflash2", conv_group=7), "embedding_length 64 is not a multiple of dflash.conv_group_size 7"),
        (dict(kind="dflash2", top_k=8), "selector_top_k is 8, which needs an embedding_length of 72, but that is 64"),
        (dict(kind="dflash2", keys={"dflash.selector_rank": ("u32", 0)}), "dflash.selector_rank is 0; expected 1"),
        (dict(block_size=1), "dflash.block_size is 1; expected 2 or more"),
        (dict(keys={"dflash.selector_top_k": ("u32", 4)}), "says DFlash2, but tensor selector_hidden.weight is miss"),
        (dict(keys={"dflash.sample_from_anchor": ("bool", True)}), "says DSpark, but tensor markov_w1.weight is mi"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit(folder, target, options, message):
    with pytest.raises(ConfigError, match=message):
        check_pair(dflash(folder, **options), target)


def test_first_different_token_is_shown(folder, target):
    vocabulary = byte_bpe(320, "qwen2")
    for key in vocabulary:
        if key.name == "tokenizer.ggml.tokens":
            key.value[300] = "other"
    with pytest.raises(ConfigError, match=r"token 300 is 'other', but in the target .* it is '<\|unused_6\|>'"):
        check_pair(dflash(folder, vocabulary=vocabulary), target)


@pytest.mark.parametrize("key", ["dflash.target_layers", "tokenizer.ggml.mask_token_id"])
def test_keys_that_must_be_there(folder, target, key):
    with pytest.raises(FileError, match=key):
        check_pair(dflash(folder, keys={key: None}), target)


def test_unknown_variants_are_refused(folder, target):
    with pytest.raises(UnsupportedError, match="hyper connections"):
        check_pair(dflash(folder, keys={"dflash.hyper_connection.count": ("u32", 2)}), target)
    with pytest.raises(UnsupportedError, match="dflash.hidden_activation is 'relu'; expected one of silu"):
        check_pair(dflash(folder, keys={"dflash.hidden_activation": ("str", "relu")}), target)
    # One block more in the file than the keys say: tensors of an unknown kind of drafter.
    with pytest.raises(UnsupportedError, match="tensor blk.1.attn_norm.weight is not part of a DFlash drafter of 1"):
        check_pair(dflash(folder, keys={"dflash.block_count": ("u32", 1)}), target)


def test_a_target_without_taps(folder):
    qwen2 = make_qwen2(folder / "qwen2.gguf", n_embd=128, n_head=4, head_dim=32, n_ff=64)
    file, target = load_target(qwen2)
    make_dflash(folder / "d.gguf", **{**SMALL, "n_embd": 128})
    with pytest.raises(UnsupportedError, match="reads layers of the target, which architecture 'qwen2' does not"):
        make_drafter(file, target, folder / "d.gguf", ["draft-dflash"])


def test_confidence_needs_a_head(folder, target):
    make_dflash(folder / "d.gguf", kind="dspark", confidence=False, **SMALL)
    file, model = load_target(target.path)
    with pytest.raises(ConfigError, match=r"has no confidence head .* --spec-draft-p-min 0.5 needs"):
        make_drafter(file, model, folder / "d.gguf", ["draft-dspark"], p_min=0.5)


def test_clamping_says_so_once(folder, target, caplog):
    make_dflash(folder / "d.gguf", kind="dspark", block_size=6, **SMALL)
    file, model = load_target(target.path)
    for anchor, limit in ((True, 6), (False, 5)):
        make_dflash(folder / "d.gguf", kind="dspark", block_size=6, sample_from_anchor=anchor, **SMALL)
        caplog.clear()
        drafter = make_drafter(file, model, folder / "d.gguf", ["draft-dspark"], n_max=9, n_min=8)
        assert (drafter.n_max, drafter.n_min) == (limit, limit)
        assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
            f"requested draft size (n_max=9, n_min=8) exceeds the trained block size 6 -- clamping to {limit}"
        ]


def test_a_plain_model_does_not_draft_by_inference(folder, target, caplog):
    file, model = load_target(target.path)
    assert make_drafter(file, model, target.path, []) is None
    assert "drafts only with --spec-type draft-simple" in caplog.text


@pytest.mark.parametrize("n_max, says", [(3, "speculation is on: draft-dspark, up to 3 tokens a step"),
                                         (20, "speculation is on: draft-dspark, up to 8 tokens a step"),
                                         (0, "--spec-draft-n-max is 0: draft-dspark is off")])  # fmt: skip
def test_whether_and_how_far_it_drafts_is_said(folder, target, caplog, n_max, says):
    """Of a given drafter never nothing: the width after clamping, or a warning."""
    make_dflash(folder / "d.gguf", kind="dspark", **SMALL)
    file, model = load_target(target.path)
    with caplog.at_level("INFO", "ggufspec"):
        drafter = make_drafter(file, model, folder / "d.gguf", ["draft-dspark"], n_max=n_max)
    (record,) = [r for r in caplog.records if r.getMessage() == says]
    assert (drafter is None) == (record.levelname == "WARNING") == (n_max == 0)


@pytest.mark.parametrize("key, other, message", [
    ("attention.head_count", 4, r"blk.0.attn_q.weight has shape \[160, 64\]; .* ask for \[128, 64\]"),
    ("attention.head_count_kv", 5, r"blk.0.attn_k.weight has shape \[32, 64\]; .* ask for \[160, 64\]"),
    ("feed_forward_length", 96, r"blk.0.ffn_gate.weight has shape \[64, 64\]; .* ask for \[96, 64\]"),
    ("attention.key_length", 16, r"blk.0.attn_k.weight has shape \[32, 64\]; .* ask for \[16, 64\]"),
    ("target_layers", [1], r"fc.weight has shape \[64, 128\]; .* ask for \[64, 64\]"),
    (None, None, ""),
])  # fmt: skip
def test_keys_of_another_shape_are_refused_with_both_numbers(folder, target, key, other, message):
    """Drafters of one name may differ in heads, feed-forward width and taps: each has its own."""
    value = ("arr[u32]", other) if isinstance(other, list) else ("u32", other)
    path = make_dflash(folder / "d.gguf", kind="dspark", n_head=5, n_head_kv=1, confidence=False, **SMALL,
                       keys={f"dflash.{key}": value} if key else None)  # fmt: skip
    file, model = load_target(target.path)
    if key is None:
        assert make_drafter(file, model, path, ["draft-dspark"]).backbone.config.common.head_count == (5, 5)
        return
    with pytest.raises(FileError, match=f"d.gguf: tensor {message}"):
        make_drafter(file, model, path, ["draft-dspark"])
