"""docs/quantization.md names every option, every file type with its number, and the fallbacks the code has."""

from pathlib import Path

import pytest

from ggufspec.quant.policy import FALLBACK, FILE_TYPES
from ggufspec.tools.quantize import command

TEXT = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()


@pytest.mark.parametrize("option", [name for p in command.params for name in p.opts if name.startswith("--")])
def test_options(option):
    assert f"`{option}" in TEXT


@pytest.mark.parametrize("kind", FILE_TYPES, ids=lambda kind: kind.name)
def test_file_types(kind):
    row = next(line for line in TEXT.splitlines() if line.startswith("|") and f"{kind.name}" in line.split("|")[1])
    numbers = [int(n) for n in row.split("|")[2].split(",")]
    assert kind.id in numbers


def test_fallbacks():
    flat = " ".join(TEXT.split())
    assert "Q4_K to Q5_0, Q5_K to Q5_1, Q6_K to Q8_0, Q2_K and Q3_K to Q4_0, IQ4_XS to IQ4_NL" in flat
    assert FALLBACK == {
        "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL",
    }  # fmt: skip
