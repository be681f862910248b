"""Keys that contradict each other or the tensors are refused by name, before anything is computed with them."""

import re
from pathlib import Path
from typing import Any

import families
import pytest

from ggufspec.errors import ConfigError, FileError, UnsupportedError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model, read_config
from ggufspec.placement import Placement

MAKERS = {"qwen35": families.make_qwen35, "qwen3": families.make_qwen3, "llama": families.make_llama}
BROKEN = {
    "no heads": ("attention.head_count", ("u32", 0), "head_count is 0"),
    "heads missing": ("attention.head_count", None, "head_count is 0"),
    "no key heads": ("attention.head_count_kv", ("u32", 0), "0 key heads"),
    "odd groups": ("attention.head_count_kv", ("u32", 3), "3 key heads"),
    "empty keys": ("attention.key_length", ("u32", 0), "key_length is 0"),
    "empty values": ("attention.value_length", ("u32", 0), "value_length is 0"),
    "wide rotation": ("rope.dimension_count", ("u32", 254), "dimension_count is 254"),
    "odd rotation": ("rope.dimension_count", ("u32", 7), "dimension_count is 7"),
}


@pytest.mark.parametrize("architecture", MAKERS)
@pytest.mark.parametrize("name", BROKEN)
def test_heads_and_rotations(architecture: str, name: str, tmp_path: Path) -> None:
    key, value, message = BROKEN[name]
    path = MAKERS[architecture](tmp_path / "m.gguf", seed=1, keys={f"{architecture}.{key}": value})
    file = open_gguf(path)
    with pytest.raises(FileError, match=message) as error:
        load_model(file, Placement.single("cpu", int(file.metadata[f"{architecture}.block_count"])))
    assert "m.gguf" in str(error.value) and "\n" not in str(error.value)


def test_value_heads_of_another_size(tmp_path: Path) -> None:
    path = families.make_qwen35(tmp_path / "m.gguf", seed=1, keys={"qwen35.attention.value_length": ("u32", 4)})
    file = open_gguf(path)
    with pytest.raises(FileError, match="value_length is 4, key_length is"):
        load_model(file, Placement.single("cpu", int(file.metadata["qwen35.block_count"])))


# Keys against the tensors' own shapes: (architecture, key, value, what the tensors say, what the keys say).
DISAGREEING = [
    ("qwen3", "embedding_length", 128, r"token_embd.weight has shape \[320, 256\]", r"ask for \[320, 128\]"),
    ("qwen3", "feed_forward_length", 256, r"blk.0.ffn_gate.weight has shape \[512, 256\]", r"ask for \[256, 256\]"),
    ("qwen3", "attention.head_count", 2, r"blk.0.attn_q.weight has shape \[256, 256\]", r"ask for \[128, 256\]"),
    ("qwen3", "attention.head_count_kv", 1, r"blk.0.attn_k.weight has shape \[128, 256\]", r"ask for \[64, 256\]"),
    ("qwen35", "ssm.conv_kernel", 3, r"blk.0.ssm_conv1d.weight has shape \[256, 4\]", r"ask for \[256, 3\]"),
    ("qwen35", "ssm.state_size", 16, "inner_size is 128", "is 64"),
    ("qwen3", "block_count", 2, "block_count is 2", "tensors of 4 blocks"),
    ("qwen35", "block_count", 3, "block_count is 3", "tensors of 5 blocks"),
]


@pytest.mark.parametrize("architecture, key, value, first, second", DISAGREEING)
def test_keys_that_disagree_with_tensors_are_refused_with_both_numbers(
    architecture: str, key: str, value: int, first: str, second: str, tmp_path: Path
) -> None:
    """Fewer blocks too: the rest of them would be left out, and the text be another model's."""
    path = MAKERS[architecture](tmp_path / "m.gguf", seed=1, keys={f"{architecture}.{key}": ("u32", value)})
    with pytest.raises((FileError, ConfigError), match=first) as error:
        load_model(open_gguf(path))
    assert re.search(second, str(error.value)) and "m.gguf" in str(error.value)


@pytest.mark.parametrize("name, is_known", [("blk.1.ffn_gate_inp.weight", False), ("blk.0.attn_q.bias", True),
                                            ("fc.weight", False), ("cls.output.weight", True)])  # fmt: skip
def test_a_tensor_that_no_code_reads_is_refused(
    name: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would do something in the model that the file holds."""
    write = families.Draft.write

    def with_another(draft: families.Draft, *arguments: Any) -> Path:
        draft.add(name, 256)
        return write(draft, *arguments)

    monkeypatch.setattr(families.Draft, "write", with_another)
    file = open_gguf(families.make_qwen3(tmp_path / "m.gguf", seed=1))
    if is_known:
        load_model(file)
        return
    with pytest.raises(UnsupportedError, match=f"m.gguf: tensor {name} is not part of a qwen3 model"):
        load_model(file)


def test_models_are_causal_unless_they_say_otherwise(tmp_path: Path) -> None:
    file = open_gguf(families.make_qwen3(tmp_path / "m.gguf", seed=1))
    assert "qwen3.attention.causal" not in file.metadata and read_config(file).causal
    load_model(file)
    file = open_gguf(families.make_qwen3(tmp_path / "n.gguf", keys={"qwen3.attention.causal": ("bool", False)}))
    with pytest.raises(UnsupportedError, match="qwen3.attention.causal is false; text generation needs a causal"):
        load_model(file)


def test_a_block_that_only_the_key_calls_an_mtp_block_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The text is then that of the blocks before it, in llama.cpp too."""
    load_model(open_gguf(families.make_qwen35(tmp_path / "whole.gguf", seed=1)))
    assert not caplog.records
    path = families.make_qwen35(tmp_path / "m.gguf", seed=1, n_layers=5, mtp=False, full_interval=5,
                                keys={"qwen35.nextn_predict_layers": ("u32", 1)})  # fmt: skip
    load_model(open_gguf(path))
    (record,) = caplog.records
    assert "m.gguf: block 4 is left out: key qwen35.nextn_predict_layers is 1" in record.getMessage()
