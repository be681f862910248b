"""The layout of fill-in-the-middle prompts, with a vocabulary of bytes and made-up marks."""

from types import SimpleNamespace

import pytest
from fake_engine import ByteTokenizer, FakeEngine
from serving import fake_loaded

from ggufspec.tools.server.errors import ApiError
from ggufspec.tools.server.infill import infill_prompt

PRE, SUF, MID, REP, SEP = 1000, 1001, 1002, 1003, 1004


def state(spm=False, n_batch=64, n_ctx=512, **missing):
    tokenizer = ByteTokenizer()
    marks = {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID, "fim_rep": REP, "fim_sep": SEP, "bos": None} | missing
    tokenizer.ids = SimpleNamespace(**marks)
    loaded = fake_loaded(FakeEngine(n_ctx=n_ctx))
    loaded.tokenizer, loaded.n_batch = tokenizer, n_batch
    return SimpleNamespace(model=loaded, config=SimpleNamespace(spm_infill=spm))


def shown(ids):
    names = {PRE: "<PRE>", SUF: "<SUF>", MID: "<MID>", REP: "<REP>", SEP: "<SEP>"}
    return "".join(names.get(i) or chr(i) for i in ids)


def test_layout():
    body = {"input_prefix": "a = ", "input_suffix": ";", "prompt": "(", "input_extra": [{"filename": "f", "text": "F"}]}
    extra = "<REP>myproject\n<SEP>f\nF<SEP>filename\n"
    assert shown(infill_prompt(state(), body)) == extra + "<PRE>a = (<SUF>;<MID>"
    assert shown(infill_prompt(state(spm=True), body)) == extra + "<SUF>;<PRE>a = (<MID>"
    bare = infill_prompt(state(fim_rep=None, fim_sep=None), body)
    assert shown(bare) == "\n\n--- snippet ---\n\nF<PRE>a = (<SUF>;<MID>"


def test_budget():
    body = {"input_prefix": "p" * 100 + "P", "input_suffix": "S" + "s" * 100, "input_extra": [{"text": "x" * 900}]}
    text = shown(infill_prompt(state(), body))
    prefix, suffix = text.split("<PRE>")[1].split("<SUF>")
    assert prefix == "p" * 47 + "P"  # the last 3 * (64 / 4) tokens
    assert suffix == "S" + "s" * 13 + "<MID>"  # the first 64 / 4 - 2
    assert len(text.split("<PRE>")[0].replace("<SEP>", "!")) == 512 - 64  # extras fill what is left


@pytest.mark.parametrize("extra", [3, [3], [{}], [{"text": 3}], [{"text": "a", "filename": 3}]])
def test_bad_extras(extra):
    with pytest.raises(ApiError):
        infill_prompt(state(), {"input_prefix": "", "input_suffix": "", "input_extra": extra})
