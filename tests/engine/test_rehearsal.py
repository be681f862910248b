"""Kernels compiled ahead: a rehearsal launches what an engine at work launches, and leaves no trace in the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_engines import GREEDY, KINDS, SAMPLED, Family, drain, outcome, same_slots

from ggufspec.drafters.chain import Chain
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.synth import SyntheticAcceptance, rates_of_length
from ggufspec.engine import Engine
from ggufspec.job import Request
from ggufspec.rehearsal import draft_lengths, rehearse, stream_counts

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def with_lookup(family: Family) -> Chain:
    """MTP and a drafter on the host as one."""
    found = load_drafter(SpecOptions(("ngram-mod",)), family.file, family.model, None, n_slots=3, n_ctx=256,
                         target_weights=family.weights)  # fmt: skip
    mtp = family.drafter("mtp", 3, 256)
    assert found is not None and mtp is not None
    return Chain([mtp, *getattr(found, "members", [found])])


@pytest.mark.parametrize("kind", [*KINDS, "chain", "synthetic"])
def test_a_rehearsal_leaves_no_trace(family: Family, kind: str) -> None:
    def engine() -> Engine:
        options: dict[str, Any] = {"n_slots": 3, "n_ubatch": 64}
        if kind == "chain":
            return family.engine("plain", False, drafter=with_lookup(family), **options)
        if kind == "synthetic":
            options["synthetic"] = SyntheticAcceptance(rates_of_length(2.0, 3), 3, family.model.device)
        return family.engine("mtp" if kind == "synthetic" else kind, kind in KINDS, **options)

    def play(engine: Engine) -> list[Any]:
        greedy = replace(GREEDY, seed=3)  # which draws for synthetic acceptance
        jobs = [engine.submit(Request(p, s, n_predict=12)) for p, s in zip(family.prompts, (greedy, SAMPLED, greedy))]
        drain(engine)
        return [outcome(job) for job in jobs]

    fresh, rehearsed = engine(), engine()
    rehearse(rehearsed, [SAMPLED])
    assert rehearsed.idle and all(not slot.tokens and slot.job is None for slot in rehearsed.slots)
    ours, theirs = (getattr(e.drafter, "members", [e.drafter]) for e in (rehearsed, fresh))
    assert all(vars(a.stats) == vars(b.stats) for a, b in zip(ours, theirs) if a is not None)
    assert play(rehearsed) == play(fresh)
    same_slots(rehearsed, fresh)


def test_what_is_rehearsed() -> None:
    assert stream_counts(1) == [1] and stream_counts(6) == [1, 2, 4, 6]
    assert draft_lengths(0) == [0] and draft_lengths(3) == [0, 1, 3] and draft_lengths(15) == [0, 1, 7, 15]


def run(code: str, **environment: str) -> None:
    folders = os.pathsep.join(map(str, (HERE, HERE.parent / "kernels", HERE.parent)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PYTHONPATH": folders, **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "dflash2" else pytest.mark.slow) for kind in (*KINDS, "chain")]
)
def test_a_rehearsal_launches_what_work_launches(kind: str) -> None:
    """Every kernel an engine launches is compiled by then, and hardly one that it does not launch."""
    pytest.importorskip("triton")
    run(f"import rehearsed\nrehearsed.compare({kind!r})")
