"""Triton kernels without a card: their results under the CPU interpreter, and that they compile for real cards.

Both replace parts of Triton for a whole process, so both run in processes of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")
CASES = ("norms", "rope", "store", "norm_rope_store", "attention_types", "attention_masks", "attention_width",
         "attention_splits", "attention_prepared",
         "gdn_steps", "gdn_padding", "gdn_prompt", "gdn_repeated_keys", "selection", "selector_walk", "dynamic_conv",
         "rows", "carry", "markov_tokens", "selector_rows", "prepared", "prepared_wide")  # fmt: skip


def run(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("group", [CASES[i::2] for i in range(2)], ids=["even", "odd"])
def test_kernels_equal_their_twins_in_the_interpreter(group):
    calls = "\n".join(f"CASES[{name!r}]('cpu', False)" for name in group)
    run(f"import interpreter\nfrom cases import CASES\n{calls}")


def test_no_case_is_forgotten():
    run(f"import interpreter\nfrom cases import CASES\nassert set(CASES) == set({CASES!r}), set(CASES)")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_kernels_compile(capability):
    run(f"import compiled\ncompiled.everything({capability})")
