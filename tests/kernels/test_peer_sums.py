"""Sums through memory that ranks map: the protocol in Triton's interpreter, one process a rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import FOLDER, environment, inboxes_in, python

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.peer import COLUMNS, ROWS, plain
from ggufspec.kernels.peer.link import Link

pytest.importorskip("triton")
CALLS = ((1, 96), (3, 96), (1, 300), (3, 96), (2, 96), (3, 300))  # rows and columns: channels idle and return


def part(rank: int, call: int, T: int, K: int) -> torch.Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(100 * call + rank))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_up_in_order_and_alike(size: int, tmp_path: Path) -> None:
    """Several calls of other shapes in a row: every rank gets the bits of the plain sum, and nobody waits in vain."""
    inboxes = inboxes_in(tmp_path, size)
    ranks = [
        subprocess.Popen(
            [sys.executable, FOLDER / "peer_rank.py", str(r), tmp_path / f"out{r}", json.dumps(CALLS), *inboxes],
            env=environment(), stderr=subprocess.PIPE,
        )
        for r in range(size)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors.decode()[-2000:]
    saved = [torch.load(tmp_path / f"out{r}") for r in range(size)]
    for other in saved:
        assert other["late"] == 0
        assert other["calls"][:4].tolist() == [6, 4, 3, 0]
        for mine, theirs in zip(saved[0]["results"], other["results"]):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs))

    for call, (T, K) in enumerate(CALLS):
        parts = [part(r, call, T, K) for r in range(size)]
        got = saved[0]["results"][call]
        if call % 2 == 0:
            assert torch.equal(got[0], plain.sum_parts(parts))
            continue
        x, weight = part(50, call, T, K), part(60, call, 1, K)[0]
        total, a = plain.sum_add_rms_norm(x, parts, weight, 1e-6)
        assert torch.equal(got[0], total)
        assert torch.allclose(values(got[1], got[2], K), a.rows[:, :K], atol=2e-3, rtol=2e-3)


def values(rows: torch.Tensor, scale: torch.Tensor, K: int) -> torch.Tensor:
    """A kernel's prepared rows as numbers in the file's order."""
    return repack.disorder(rows.float() * scale[:, None])[:, :K]


def test_compiles_for_every_card() -> None:
    python("compiled_peer.py")


def test_what_fits_the_channels() -> None:
    link = Link(0, 2, *(torch.zeros(1),) * 4)
    assert link.takes(torch.zeros(ROWS, 8)) and not link.takes(torch.zeros(ROWS + 1, 8))
    assert not link.takes(torch.zeros(1, COLUMNS + 1)) and not link.takes(torch.zeros(1, 8, dtype=torch.float16))
