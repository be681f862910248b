"""Triton kernels without a card: their results under the CPU interpreter, and that they compile for real cards.

Both replace parts of Triton for a whole process, so both run in processes of their own.
"""

import pytest
from processes import python

pytest.importorskip("triton")
CASES = ("norms", "rope", "store", "norm_rope_store", "attention_types", "attention_masks", "attention_width",
         "attention_splits", "attention_prepared", "attention_padding",
         "gdn_steps", "gdn_padding", "gdn_prompt", "gdn_prompt_padding", "gdn_committed", "gdn_repeated_keys",
         "selection", "selector_walk", "dynamic_conv",
         "rows", "carry", "markov_tokens", "selector_rows", "prepared", "prepared_wide")  # fmt: skip


@pytest.mark.parametrize("group", [CASES[i::2] for i in range(2)], ids=["even", "odd"])
def test_kernels_equal_their_twins_in_the_interpreter(group):
    calls = "\n".join(f"CASES[{name!r}]('cpu', False)" for name in group)
    python("-c", f"import interpreter\nfrom cases import CASES\n{calls}")


def test_no_case_is_forgotten():
    python("-c", f"import interpreter\nfrom cases import CASES\nassert set(CASES) == set({CASES!r}), set(CASES)")


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_kernels_compile(capability):
    python("-c", f"import compiled\ncompiled.everything({capability})")
