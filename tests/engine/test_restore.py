"""A saved slot comes back as a whole, target and drafter together, or the slot stays what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from two_engines import GREEDY, Family, difference, drain, flat

from ggufspec.engine import Engine
from ggufspec.errors import ConfigError
from ggufspec.host_copy import host_copy
from ggufspec.job import Request

KINDS = ("mtp", "dspark", "dflash2")


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def played(family: Family, kind: str, prompt: int, **options: Any) -> Engine:
    engine = family.engine(kind, False, **options)
    engine.submit(Request(family.prompts[prompt], GREEDY, n_predict=6))
    drain(engine)
    return engine


def leaves(engine: Engine) -> list[tuple[str, Any]]:
    return flat(copy.deepcopy(host_copy(engine.save_slot(0))[0]))


def unusable(family: Family, kind: str) -> dict[str, dict[str, Any]]:
    """States of another text that do not fit: of the target's part or the drafter's one is as it should be."""
    other = played(family, kind, 1)
    fits = other.save_slot(0)
    without, quantized = played(family, "plain", 1).save_slot(0), played(family, kind, 1, type_k="q8_0").save_slot(0)
    another = played(family, KINDS[KINDS.index(kind) - 1], 1).save_slot(0)
    drafted = copy.deepcopy(fits["drafter"][1])
    pairs = [drafted.kv] if kind == "mtp" else drafted
    pairs[-1] = (pairs[-1][0][:, :1], pairs[-1][1])  # fewer heads
    if kind == "mtp":
        drafted.kv = pairs[0]
    short = copy.deepcopy(fits["cache"])
    at = next(i for i, state in enumerate(short.recurrent) if state is not None)
    short.recurrent[at] = short.recurrent[at][:-1]
    return {
        "no drafter": without, "another drafter": another, "other cache types": quantized,
        "fewer heads in the drafter": fits | {"drafter": (fits["drafter"][0], drafted)},
        "a recurrent state of another size": fits | {"cache": short},
        "more tokens than a slot holds": fits | {"tokens": [40] * 10_000},
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_fit_changes_nothing(family: Family, kind: str) -> None:
    engine = played(family, kind, 0)
    before, states = leaves(engine), unusable(family, kind)
    for name, state in states.items():
        with pytest.raises(ConfigError):
            engine.restore_slot(0, state)
            pytest.fail(name)
        after = leaves(engine)
        assert [at for at, _ in before] == [at for at, _ in after], name
        wrong = [at for (at, x), (_, y) in zip(before, after) if difference(x, y)]
        assert not wrong, (name, wrong)
    prompt = [*engine.slots[0].tokens, 50]
    cold_engine = family.engine(kind, False)
    again, cold = (e.submit(Request(prompt, GREEDY, n_predict=8)) for e in (engine, cold_engine))
    drain(engine), drain(cold_engine)
    assert again.n_prompt_cached == len(prompt) - 1 and again.generated == cold.generated
    engine.restore_slot(0, played(family, kind, 1).save_slot(0))
    assert engine.slots[0].tokens[:4] == family.prompts[1][:4]
