"""The type of every tensor against plans made by llama-quantize --dry-run, and the rules' order."""

import json
import re
from pathlib import Path

import pytest

from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.gguf_header import TensorInfo
from ggufspec.quant import layouts
from ggufspec.quant.policy import (
    COPY,
    Choices,
    Facts,
    decide,
    display_name,
    file_type,
    keeps_type,
    needs_imatrix,
    tensor_type,
    visiting_order,
    with_fallback,
)

GOLDEN = json.loads(Path(__file__).with_name("golden_plans.json").read_text())
CASES = [(model, kind) for model, entry in GOLDEN["models"].items() for kind in entry["plans"]]


def info(name: str, *shape: int, kind: str = "F16") -> TensorInfo:
    return TensorInfo(name, shape, layouts.BY_NAME[kind].id, 0, 0)


def layer(i: int, *names: str) -> list[TensorInfo]:
    return [info(f"blk.{i}.{name}.weight", 512, 512) for name in sorted(names)]


EIGHT_BLOCKS = Facts(n_blocks=8)


def types(tensors: list[TensorInfo], kind: str = "Q4_K_M", facts: Facts = EIGHT_BLOCKS, **choices) -> dict:
    decisions = decide(tensors, facts, Choices(file_type(kind), **choices))
    return {d.name: d.type_name for d in decisions}


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_plans_equal_llama_quantize(model, kind):
    golden = GOLDEN["models"][model]
    tensors = [info(name, *reversed(ne), kind=t.upper()) for name, ne, t in golden["tensors"]]
    assert visiting_order(t.name for t in tensors) == [t.name for t in tensors]
    size_mib, bits, letters = golden["plans"][kind]
    decisions = decide(tensors, Facts(**golden["facts"]), Choices(file_type(kind)))
    expected = [GOLDEN["types"][letter].upper() for letter in letters]
    assert [d.type_name for d in decisions] == expected
    n_bytes = sum(
        t.rows * layouts.BY_NAME[d.type_name].row_bytes(t.columns) for t, d in zip(tensors, decisions)
    )
    assert round(n_bytes / 2**20, 2) == size_mib
    assert round(8 * n_bytes / sum(t.n_elements for t in tensors), 2) == bits


def test_precedence():
    tensors = [info("output.weight", 64, 512), info("token_embd.weight", 64, 512), *layer(0, "ffn_down", "attn_q")]
    everything = ((re.compile("weight"), "Q5_0"),)
    assert set(types(tensors, patterns=everything).values()) == {"Q5_0"}
    chosen = types(tensors, patterns=everything, output_type="Q8_0", embedding_type="F16")
    assert (chosen["output.weight"], chosen["token_embd.weight"]) == ("Q8_0", "F16")
    assert set(types(tensors, pure=True).values()) == {"Q4_K"}
    assert types(tensors, leave_output=True)["output.weight"] == "F16"
    assert types(tensors, patterns=((re.compile("ffn"), "Q8_0"), (re.compile("ffn_down"), "Q2_K"))) == {
        "output.weight": "Q6_K", "token_embd.weight": "Q4_K", "blk.0.ffn_down.weight": "Q8_0",
        "blk.0.attn_q.weight": "Q4_K",
    }  # fmt: skip


def test_plain_file_types_ignore_patterns_but_not_the_two_types():
    tensors = [info("output.weight", 64, 512), info("token_embd.weight", 64, 512), *layer(0, "ffn_down")]
    chosen = types(tensors, "BF16", patterns=((re.compile("."), "Q8_0"),), embedding_type="Q8_0")
    assert chosen == {
        "output.weight": "BF16", "token_embd.weight": "Q8_0", "blk.0.ffn_down.weight": "BF16"
    }  # fmt: skip


def test_patterns_do_not_advance_the_counters():
    tensors = [t for i in range(16) for t in layer(i, "ffn_down")]
    facts = Facts(n_blocks=16)
    plain = types(tensors, facts=facts)
    first_two = types(tensors, facts=facts, patterns=((re.compile(r"blk\.[01]\."), "Q8_0"),))
    assert [i for i in range(16) if plain[f"blk.{i}.ffn_down.weight"] == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]
    # Two fewer are counted: block 2 is now number 0.
    assert [i for i in range(16) if first_two[f"blk.{i}.ffn_down.weight"] == "Q6_K"] == [2, 3, 6, 9, 12, 15]


def test_tied_embeddings_are_the_output():
    tied = [info("token_embd.weight", 64, 512)]
    assert types(tied)["token_embd.weight"] == "Q6_K"
    assert types(tied, output_type="Q8_0")["token_embd.weight"] == "Q8_0"
    assert types(tied, output_type="Q8_0", pure=True)["token_embd.weight"] == "Q4_K"
    assert types(tied, output_type="Q8_0", embedding_type="Q5_K")["token_embd.weight"] == "Q5_K"
    assert types([info("token_embd.weight", 64, 96)])["token_embd.weight"] == "Q8_0"


def test_experts():
    tensors = layer(3, "attn_v", "attn_k", "attn_output", "ffn_down_exps") + [info("blk.3.ffn_gate_inp.weight", 8, 512)]
    eight = types(tensors, "Q4_K_M", Facts(n_blocks=8, n_experts=8))
    assert eight == {
        "blk.3.attn_v.weight": "Q8_0", "blk.3.attn_k.weight": "Q8_0", "blk.3.attn_output.weight": "Q5_K",
        "blk.3.ffn_down_exps.weight": "Q6_K", "blk.3.ffn_gate_inp.weight": "F16",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="block number below 2"):
        types(tensors, "Q4_K_M", Facts(n_blocks=2, n_experts=4))


def test_seventy_billion():
    tensors = [t for i in range(80) for t in layer(i, "attn_v")]
    facts = Facts("llama", 80, 8, has_gqa=True)
    assert set(types(tensors, facts=facts).values()) == {"Q6_K", "Q5_K"}
    assert set(types(tensors, facts=Facts("llama", 80, 1)).values()) == {"Q6_K", "Q4_K"}


@pytest.mark.parametrize(
    ("name", "shape", "kept"),
    [
        ("blk.0.attn_q.weight", (4, 32), False),
        ("blk.0.attn_q.bias", (4, 32), True),
        ("blk.0.attn_norm.weight", (32,), True),
        ("conf_proj.weight", (1, 32), True),
        ("blk.0.ffn_down_exps.weight", (4, 1, 32), False),
        ("blk.0.ssm_conv1d.weight", (64, 4), True),
        ("blk.0.attn_conv_base", (2, 2, 32), True),
        ("d2t", (4096,), True),
        ("token_types.weight", (2, 32), True),
        ("blk.8.nextn.eh_proj.weight", (32, 64), False),
        ("markov_w1.weight", (64, 32), False),
    ],
)
def test_tensors_that_keep_their_type(name, shape, kept):
    assert keeps_type(info(name, *shape), Choices(file_type("Q4_K_M"))) is kept
    assert keeps_type(info(name, *shape), Choices(COPY))


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [("Q4_K", 512, "Q4_K"), ("Q4_K", 96, "Q5_0"), ("Q5_K", 96, "Q5_1"), ("Q6_K", 96, "Q8_0"), ("Q2_K", 96, "Q4_0"),
     ("Q3_K", 96, "Q4_0"), ("IQ4_XS", 96, "IQ4_NL"), ("Q4_K", 100, "F16"), ("Q8_0", 100, "F16"), ("F16", 7, "F16")],
)  # fmt: skip
def test_fallback(kind, columns, expected):
    assert with_fallback(kind, columns) == expected


def test_fallback_applies_to_pure_and_patterns_but_not_to_asked_types():
    odd = [info("output.weight", 64, 96), info("blk.0.attn_q.weight", 64, 96)]
    assert types(odd, pure=True) == {"output.weight": "Q5_0", "blk.0.attn_q.weight": "Q5_0"}
    assert types(odd, patterns=((re.compile("attn_q"), "Q6_K"),))["blk.0.attn_q.weight"] == "Q8_0"
    assert types(odd, output_type="Q6_K")["output.weight"] == "Q6_K"


def test_file_type_names():
    assert file_type("q4_k_m").id == 15 and file_type("15").name == "Q4_K_M" and file_type("Q5_K").name == "Q5_K_M"
    assert display_name("q4_k") == "Q4_K" and display_name("7") == "Q8_0"
    assert file_type("copy") is COPY
    with pytest.raises(ConfigError, match="invalid ftype 'Q9'"):
        file_type("Q9")
    with pytest.raises(UnsupportedError, match="IQ2_XXS is not written here"):
        file_type("19")
    assert tensor_type("q6_K") == "Q6_K"
    with pytest.raises(ConfigError, match="unknown tensor type 'q8_k'"):
        tensor_type("q8_k")


def test_which_tensors_need_an_imatrix():
    choices = Choices(file_type("Q2_K_S"))
    assert needs_imatrix("blk.0.attn_q.weight", "Q2_K", choices)
    assert not needs_imatrix("token_embd.weight", "Q2_K", choices)
    assert not needs_imatrix("blk.0.attn_q.weight", "Q2_K", Choices(file_type("Q2_K")))


def test_falcon_is_refused():
    with pytest.raises(UnsupportedError, match="falcon"):
        types([info("output.weight", 64, 512)], facts=Facts("falcon", 8))
