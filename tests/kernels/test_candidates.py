"""The best of ranks' parts of the logits, merged: what selecting from all of them gives, ids and ties included."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import FOLDER, environment, inboxes_in, python
from tied_logits import logits_of

from ggufspec.kernels import candidates, select
from ggufspec.kernels.peer.link import COLUMNS, ROWS, Link

# rows, candidates, columns, each rank's: none at all, fewer than candidates, more rows than channels; channels return
CALLS = {
    2: [(1, 1, 100, [(0, 64), (64, 100)]), (3, 5, 90, [(0, 2), (2, 90)]), (70, 1, 40, [(0, 40), (40, 40)]),
        (3, 5, 90, [(0, 64), (64, 90)])],
    3: [(2, 1, 100, [(0, 0), (0, 64), (64, 100)]), (66, 3, 60, [(0, 20), (20, 50), (50, 60)]),
        (2, 20, 200, [(0, 64), (64, 70), (70, 200)])],
}  # fmt: skip


LOGIT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf")]), st.floats(width=32, allow_nan=False)
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, int]], int]:
    """Logits of a few rows, where ranks' parts end, and how many candidates are wanted."""
    V, T = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    x = torch.tensor(draw(st.lists(LOGIT, min_size=T * V, max_size=T * V)), dtype=torch.float32).view(T, V)
    cuts = sorted(draw(st.lists(st.integers(0, V), min_size=1, max_size=3)))
    return x, list(zip([0, *cuts], [*cuts, V])), draw(st.integers(1, V))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_merging_gives_what_the_whole_gives(case: tuple[torch.Tensor, list[tuple[int, int]], int]) -> None:
    x, bounds, k = case
    every = []
    for first, end in bounds:
        part, m = x[:, first:end], min(k, end - first)
        ids = select.top_k(part, m)[1] if m else torch.empty(x.shape[0], 0, dtype=torch.int64)
        every.append(candidates.keys(part, ids, first, k))
    values, ids = candidates.merge(torch.stack(every))
    expected, expected_ids = select.top_k(x, k)
    assert torch.equal(values, expected) and torch.equal(ids, expected_ids)
    assert torch.equal(ids[:, 0], select.argmax(x))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_the_same_through_shared_memory(size: int, tmp_path: Path) -> None:
    """Several exchanges of other shapes in a row, in Triton's interpreter, one process a rank."""
    pytest.importorskip("triton")
    inboxes = inboxes_in(tmp_path, size)
    ranks = [
        subprocess.Popen(
            [sys.executable, FOLDER / "candidates_rank.py", str(r), tmp_path / f"out{r}", json.dumps(CALLS[size]),
             *inboxes], env=environment(), stderr=subprocess.PIPE,
        )
        for r in range(size)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors.decode()[-2000:]
    finally:
        for rank in ranks:
            rank.kill()  # one whose words did not come lets the others wait
    for r in range(size):
        saved = torch.load(tmp_path / f"out{r}")
        assert saved["late"] == 0
        for call, (T, k, V, _) in enumerate(CALLS[size]):
            values, ids = select.top_k(logits_of(call, T, V), k)
            assert torch.equal(saved["results"][call][0], values), (r, call)
            assert torch.equal(saved["results"][call][1], ids), (r, call)


def test_kernels_match_their_twins() -> None:
    pytest.importorskip("triton")
    python("interpreted_candidates.py")


def test_compiles_for_every_card() -> None:
    pytest.importorskip("triton")
    python("compiled_candidates.py")


def test_what_fits_the_channels() -> None:
    link = Link(0, 2, *(torch.zeros(1),) * 4)
    assert candidates.fits(192, 20, link) and candidates.fits(ROWS, candidates.LARGEST // 2, link)
    assert not candidates.fits(1, candidates.LARGEST // 2 + 1, link)
    n_each = COLUMNS // 2
    assert candidates.fits(n_each * ROWS, 1, link) and not candidates.fits(n_each * ROWS + 1, 1, link)
