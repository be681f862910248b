"""Keys that contradict each other or the tensors are refused by name, before anything is computed with them."""

from pathlib import Path

import families
import pytest

from ggufspec.errors import FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model
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
