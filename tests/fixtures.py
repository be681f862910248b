"""Two tiny models and six drafters whose weights follow from a formula, with the numbers llama.cpp gives.

F32 weights, F32 KV caches, no flash attention. The greedy token is appended after each position; token 0 ends
a text and the target never samples it (drafts may hold it).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import formula_fill, make_dflash, make_qwen3, make_qwen35
from small_vocabulary import twelve_letters

PROMPT = [5, 6, 7, 8, 9, 10, 1, 3, 4, 2, 3, 2, 2, 5]
N_GENERATED = 60

# Natural log-probabilities of tokens 0..11 after positions 13, 14, 15.
LOGPROBS = {
    "fx_q3": [
        [-8.2297, -0.1277, -4.1244, -4.0407, -5.2435, -5.9193,
         -5.7634, -5.9251, -3.3783, -3.3173, -7.1708, -6.9814],
        [-8.0513, -3.1087, -4.5171, -4.5224, -10.2953, -3.3835,
         -13.2049, -3.4917, -3.2430, -0.1870, -8.1611, -11.4221],
        [-6.3964, -10.5916, -8.9686, -4.8374, -11.8879, -7.9349,
         -8.1051, -7.3344, -8.9784, -0.0120, -7.3779, -8.9283],
    ],
    "fx_q35": [
        [-3.1662, -5.6778, -4.0864, -3.6339, -4.0368, -0.1481,
         -6.8159, -7.0825, -6.9304, -3.6374, -7.6316, -6.5284],
        [-8.2668, -0.0484, -5.6360, -8.8621, -9.6803, -4.6115,
         -6.7090, -5.7937, -4.6775, -3.9990, -7.6361, -6.9864],
        [-5.0799, -7.0239, -2.8016, -5.5292, -1.9191, -0.8194,
         -2.7294, -9.8580, -8.4631, -11.0617, -5.5193, -1.3048],
    ],
}  # fmt: skip


@dataclass(frozen=True)
class DraftRun:
    """One drafted run of 60 tokens: `first_steps` are (draft, number accepted or None for an empty draft);
    `accepted_at` maps steps (0-based) to their accepted count, where the others accept none.
    """

    target: str
    drafter: str | None  # None: the MTP block of the target
    kind: str
    n_max: int
    first_steps: list[tuple[list[int], int | None]]
    n_drafted: int
    n_accepted: int
    p_min: float = 0.0
    accepted_at: dict[int, int] | None = None


RUNS = {
    "fx_mtp": DraftRun(
        "fx_q35", None, "draft-mtp", 3,
        [([7, 4, 3], 0), ([11, 8, 4], 0), ([2, 0, 8], 0), ([6, 5, 7], 0), ([6, 1, 7], 1), ([4, 8, 2], 0)],
        153, 6, accepted_at=dict.fromkeys((4, 8, 9, 10, 21, 28), 1),
    ),
    "fx_df": DraftRun(
        "fx_q3", "fx_df", "draft-dflash", 5,
        [([11, 8, 8, 1, 1], 0), ([8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8], 0),
         ([11, 11, 8, 8, 8], 0), ([11, 11, 1, 1, 1], 0)],
        235, 9, accepted_at=dict.fromkeys((6, *range(25, 33)), 1),
    ),
    "fx_dfswa": DraftRun(
        "fx_q3", "fx_dfswa", "draft-dflash", 5,
        [([11, 8, 2, 2, 2], 0), ([8, 5, 5, 5, 2], 0), ([4, 1, 8, 5, 2], 0), ([1, 1, 5, 5, 2], 0),
         ([4, 1, 5, 5, 2], 0), ([1, 1, 5, 5, 2], 0)],
        251, 7, accepted_at={9: 1, 12: 2, 23: 1, 48: 1, 49: 1, 50: 1},
    ),
    "fx_df2": DraftRun(
        "fx_q3", "fx_df2", "draft-dflash", 5,
        [([2, 1, 4, 10, 10], 0), ([2, 7, 10, 10, 6], 0), ([2, 7, 7, 6, 9], 0), ([2, 4, 8, 6, 9], 0),
         ([0, 5, 2, 1, 4], 0), ([8, 5, 1, 10, 6], 0)],
        260, 4, accepted_at=dict.fromkeys((12, 14, 24, 45), 1),
    ),
    "fx_ds": DraftRun(
        "fx_q3", "fx_ds", "draft-dspark", 6,
        [([2, 3, 11, 8, 8, 8], 0), ([11, 8, 8, 8, 8, 8], 0), ([11, 8, 8, 8, 8, 8], 0),
         ([11, 8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8, 8], 0)],
        237, 16,
    ),
    "fx_ds p_min": DraftRun(
        "fx_q3", "fx_ds", "draft-dspark", 6,
        [([], None), ([11, 8, 8, 8, 8, 8], 0), ([11, 8, 8, 8, 8, 8], 0),
         ([11, 8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8, 8], 0)],
        207, 16, p_min=0.5,
    ),
    "fx_ds1": DraftRun(
        "fx_q3", "fx_ds1", "draft-dspark", 5,
        [([3, 11, 8, 8, 8], 0), ([8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8], 0), ([8, 8, 8, 8, 8], 0),
         ([3, 11, 8, 8, 8], 0), ([3, 11, 8, 8, 8], 0)],
        215, 13,
    ),
    "fx_dfm": DraftRun(
        "fx_q35", "fx_dfm", "draft-dflash", 4,
        [([3, 3, 3, 3], 0), ([3, 3, 3, 2], 0), ([3, 3, 3, 10], 0), ([3, 3, 3, 3], 0), ([2, 2, 8, 7], 0),
         ([2, 2, 3, 3], 2)],
        202, 6, accepted_at={5: 2, 7: 1, 11: 1, 19: 1, 44: 1},
    ),
}  # fmt: skip

_COMMON: dict[str, Any] = dict(
    fill=formula_fill, type="F32", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12
)
_DRAFTERS: dict[str, dict[str, Any]] = {
    "fx_df": dict(),
    "fx_dfswa": dict(window=5, window_layers=[True, False], causal=True),
    "fx_dfm": dict(sections=[16, 0, 0, 0]),
    "fx_df2": dict(kind="dflash2", conv_kernel=3, conv_group=8, rank=8, top_k=4),
    "fx_ds": dict(kind="dspark", rank=8),
    "fx_ds1": dict(kind="dspark", rank=8, sample_from_anchor=False, confidence=False),
}


def make_fixture(path: Path | str, name: str) -> Path:
    """Write fx_q3, fx_q35, or one of the drafters fx_df, fx_dfswa, fx_dfm, fx_df2, fx_ds, fx_ds1."""
    if name == "fx_q3":
        return make_qwen3(path, n_layers=4, vocabulary=twelve_letters(), **_COMMON)
    if name == "fx_q35":
        return make_qwen35(
            path, n_layers=4, n_rot=16, sections=[3, 3, 2, 0], state_size=16, n_value_heads=4, n_key_heads=2,
            vocabulary=twelve_letters(), **_COMMON,
        )  # fmt: skip
    return make_dflash(
        path, taps=[1, 3], block_size=6, vocabulary=twelve_letters(mask=True), **_DRAFTERS[name], **_COMMON
    )
