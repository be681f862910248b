"""`ggufspec bench` on a GPU: captured steps, device times, kernels by room, the same figures twice."""

import pytest

from ggufspec import bundled
from ggufspec.sampling import SamplingParams
from ggufspec.tools.bench.attach import Bench, free, parse_drafter
from ggufspec.tools.bench.spec import Plan, measure
from ggufspec.tools.settings import ModelSettings, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = {"a": [list(range(5, 60)), list(range(300, 330))]}


@pytest.fixture(scope="module")
def bench():
    made = Bench.load(Settings(model=ModelSettings(path=str(bundled.target_path()))), 4, 512, show_progress=False)
    assert made.model.device.type == "cuda"
    yield made
    free()


def plan(*drafters, **changes):
    values = dict(
        n_max=[], temperatures=[0.0], streams=[1], prompts=PROMPTS, n_tokens=64, n_repetitions=3,
        sampling=SamplingParams(temperature=0.0, seed=1), ignore_eos=True,
    )  # fmt: skip
    return Plan([parse_drafter(text, True) for text in drafters], **(values | changes))


def test_drafters_in_turn(bench):
    made = measure(
        bench, plan("mtp", "dspark", "dflash2", temperatures=[0.0, 1.0], streams=[1, 4], n_repetitions=1),
        split=True, show_progress=False,
    )  # fmt: skip
    assert {c.parity for c in made.cells} == {"equal"} and {p["result"] for p in made.parity} == {"equal"}
    for cell in made.cells:
        assert min(cell.draft_ms.median, cell.verify_ms.median, cell.sample_ms.median) > 0
        parts = cell.draft_ms.median + cell.verify_ms.median + cell.sample_ms.median
        assert parts <= 1.02 * cell.step_ms.median
    for entry in made.split:
        assert {"matmul", "gdn", "attention", "head"} <= set(entry["verify"]), entry
        assert entry["draft"].get("matmul", 0) > 0


def test_the_same_figures_twice(bench):
    """One drafter under two names: equal counts, medians within 3%."""
    made = measure(bench, plan("mtp,n=1", "mtp,n=1,label=again", n_repetitions=10), show_progress=False)
    first, second = made.cells
    assert (first.n_drafted, first.n_accepted) == (second.n_drafted, second.n_accepted)
    assert first.ms_per_token.median == pytest.approx(second.ms_per_token.median, rel=0.03)
    assert first.verify_ms.median == pytest.approx(second.verify_ms.median, rel=0.03)
