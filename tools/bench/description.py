"""A model in a few words, as llama.cpp describes it: `qwen35 27B Q4_K - Medium`."""

from __future__ import annotations

from collections import Counter

from ggufspec.gguf_file import GGUFFile
from ggufspec.quant import policy

_BITS = {
    "IQ1_S": "1.5625", "IQ1_M": "1.75", "IQ2_XXS": "2.0625", "IQ2_XS": "2.3125", "IQ2_S": "2.5", "IQ2_M": "2.7",
    "IQ3_XXS": "3.0625", "IQ3_XS": "3.3", "IQ3_S": "3.4375", "IQ4_NL": "4.5", "IQ4_XS": "4.25",
}  # fmt: skip
_SIZES = {"S": "Small", "M": "Medium", "L": "Large"}


def model_type(file: GGUFFile) -> str:
    """Architecture, size, file type. The size is the file's own label, or counted."""
    n = sum(tensor.n_elements for tensor in file.tensors.values())
    counted = f"{n / 1e9:.0f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"
    return f"{file.architecture} {file.get('general.size_label', str, counted)} {file_type_text(file)}"


def file_type_text(file: GGUFFile) -> str:
    """The name of `general.file_type`; without that key what the commonest tensor type suggests."""
    number = file.get("general.file_type", int, None)
    if number is None:
        ((commonest, _),) = Counter(tensor.layout.name for tensor in file.tensors.values()).most_common(1)
        guess = policy.GUESSED.get(commonest)
        return "unknown" if guess is None else f"{named(guess)} (guessed)"
    return named(number)


def named(number: int) -> str:
    known = {t.id: t.name for t in policy.FILE_TYPES} | {i: name for name, i in policy.NOT_WRITTEN.items()}
    name = known.get(number)
    if name is None:
        return f"type {number}"
    if name in _BITS:
        return f"{name} - {_BITS[name]} bpw"
    if name == "F32":
        return "all F32"
    if name == "Q2_K":
        return "Q2_K - Medium"
    stem, _, size = name.rpartition("_")
    return f"{stem} - {_SIZES[size]}" if size in _SIZES and "_K" in stem else name
