"""The policy inside the engine: texts never depend on it, drafters are asked as it says, time is what counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import families
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from scripted import Scripted  # noqa: E402

from ggufspec import bundled  # noqa: E402
from ggufspec.adaptive import Adaptive, Choice, adaptive_for  # noqa: E402
from ggufspec.drafters import Drafter, DraftOptions  # noqa: E402
from ggufspec.drafters.load import SpecOptions, load_drafter  # noqa: E402
from ggufspec.engine import Engine  # noqa: E402
from ggufspec.gguf_file import open_gguf  # noqa: E402
from ggufspec.job import Job, Request  # noqa: E402
from ggufspec.models import Model, load_model  # noqa: E402
from ggufspec.placement import Placement  # noqa: E402
from ggufspec.sampling import SamplingParams  # noqa: E402
from ggufspec.tokenizer import Tokenizer  # noqa: E402
from ggufspec.tools import warm_up  # noqa: E402
from ggufspec.weights import Weights  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(seed=5, ignore_eos=True)
PROMPT = [40, 41, 42, 43, 44, 45, 46, 50]


class Clock(Adaptive):
    """The policy in a simulated clock: a step takes what `cost` says, whatever it really took."""

    def __init__(self, n_max: int, cost: Callable[[int, int], float]):
        super().__init__([n_max])
        self.cost = cost
        self.ms = 0.0
        self.used: list[int] = []

    def record(self, jobs: Sequence[int], choice: Choice, n_drafted: Sequence[int], n_accepted: Sequence[int],
               sources: Sequence[int], ms: float | None) -> None:
        spent = self.cost(len(jobs), choice.n)
        self.ms += spent
        self.used.append(choice.n)
        super().record(jobs, choice, n_drafted, n_accepted, sources, None if ms is None else spent)


def cost(batch: int, n: int) -> float:
    return 10.0 * (1 + (0.2 if n else 0) + 0.02 * n * batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    path = families.make_qwen35(tmp_path_factory.mktemp("m") / "m.gguf", seed=11)
    file = open_gguf(path)
    n = int(file.metadata[f"{file.architecture}.block_count"])
    return load_model(file, Placement.single("cpu", n)), Tokenizer.from_metadata(file.metadata)


def run(engine: Engine, prompts: Sequence[list[int]], n: int, sampling: SamplingParams = GREEDY) -> list[Job]:
    jobs = [engine.submit(Request(prompt, sampling, n_predict=n)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return jobs


def knows(stream: Sequence[int], until: int) -> Scripted:
    """Right for the first `until` tokens of the answer, then always wrong."""

    def script(slot: int, n_past: int, n: int) -> list[int]:
        at = n_past - len(PROMPT) + 1
        return [stream[i] if i < until and i < len(stream) else stream[i % len(stream)] + 1 for i in range(at, at + n)]

    return Scripted(script)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_turns_useless(model: tuple[Model, Tokenizer], sampling: SamplingParams) -> None:
    """The same text; the second half costs three percent more than plain at most."""
    n = 300
    want = run(Engine(*model, n_ctx=640), [PROMPT], n, sampling)[0].generated
    clock = Clock(7, cost)
    drafter = knows(want, 150)
    job = run(Engine(*model, drafter=drafter, n_ctx=640, policy=clock), [PROMPT], n, sampling)[0]
    assert job.generated == want
    assert clock.ms < 0.7 * n * cost(1, 0)
    asked = [n_past for n_past, _ in drafter.calls]
    late = [at for at in asked if at > len(PROMPT) + 150 + 25]
    assert len(late) < 0.2 * 125  # probes only: with no draft wanted the drafter is not even asked
    assert sum(width > 0 for width in clock.used[:20]) > 10


def test_useless_drafts_in_a_crowd(model: tuple[Model, Tokenizer]) -> None:
    prompts = [[*PROMPT, 60 + b] for b in range(4)]
    want = [job.generated for job in run(Engine(*model, n_ctx=256, n_slots=4), prompts, 96)]
    clock = Clock(7, cost)
    wrong = Scripted(lambda slot, past, n: [1] * n)
    engine = Engine(*model, drafter=wrong, n_ctx=256, n_slots=4, policy=clock)
    assert [job.generated for job in run(engine, prompts, 96)] == want
    steps = len(clock.used)
    assert clock.ms <= 1.06 * steps * cost(4, 0)  # a short run: its first steps are still in it


def test_slots_that_come_and_go(model: tuple[Model, Tokenizer]) -> None:
    """Jobs of different lengths on two slots, a cancelled one among them: nobody's text changes."""
    lengths = [30, 50, 40, 60]
    alone = [run(Engine(*model, n_ctx=256), [[*PROMPT, b]], n)[0].generated for b, n in enumerate(lengths)]
    policy = Clock(7, cost)
    engine = Engine(*model, drafter=Scripted(lambda slot, past, n: [past % 50] * n), n_ctx=256, n_slots=2,
                    policy=policy)
    jobs = [engine.submit(Request([*PROMPT, b], GREEDY, n_predict=n)) for b, n in enumerate(lengths)]
    for _ in range(12):
        engine.step()
    engine.cancel(jobs[1])
    while not engine.idle:
        engine.step()
    for b in (0, 2, 3):
        assert jobs[b].generated == alone[b]
    assert jobs[1].generated == alone[1][: len(jobs[1].generated)]


def test_times_are_kept_by_the_entries_that_the_decoder_computes(model: tuple[Model, Tokenizer]) -> None:
    """On the CPU nothing is padded: three streams are three entries. As captured they are what `n_entries` says."""
    policy = Adaptive([3])
    engine = Engine(*model, drafter=Scripted(lambda slot, past, n: [1] * n), n_ctx=256, n_slots=6, policy=policy)
    assert policy.costs.entries(5, 3) == 5
    engine.decoder.run_stage = object()  # type: ignore[assignment]  # as if stages were captured
    assert policy.costs.entries(5, 3) == engine.decoder.n_entries(5, 3) == 6


def test_a_fixed_number_is_a_fixed_number(model: tuple[Model, Tokenizer]) -> None:
    drafter = Scripted(lambda slot, past, n: [1] * n)
    run(Engine(*model, drafter=drafter, n_ctx=256, n_max=3), [PROMPT], 30)
    assert {n for _, n in drafter.calls[:20]} == {3}


DRAFTERS = {"draft-mtp": None, "draft-dspark": "dspark", "draft-dflash": "dflash2"}


@pytest.fixture(scope="module")
def trained() -> tuple[Model, Tokenizer, Weights]:
    file = open_gguf(bundled.target_path())
    weights = Weights(file)
    model = load_model(file, Placement.single("cpu", 64), weights=weights)
    return model, Tokenizer.from_metadata(file.metadata), weights


def drafter_of(trained: tuple[Model, Tokenizer, Weights], types: tuple[str, ...], n_slots: int) -> Drafter:
    target, _, weights = trained
    name = next((DRAFTERS[t] for t in types if DRAFTERS.get(t)), None)
    draft_file = None if name is None else open_gguf(bundled.path(name))
    spec = SpecOptions(types=types, draft=DraftOptions(n_max=4))
    made = load_drafter(spec, weights.file, target, draft_file, n_slots=n_slots, n_ctx=512, target_weights=weights)
    assert made is not None
    return made


@pytest.mark.parametrize("types", [("draft-mtp",), ("draft-dspark",), ("draft-dflash",),
                                   ("ngram-simple", "draft-mtp", "draft-dspark")], ids=",".join)
def test_trained_drafters_keep_the_text(trained: tuple[Model, Tokenizer, Weights], types: tuple[str, ...]) -> None:
    """Two streams, one of them code, in real time: whatever lengths come of it, the tokens are the plain ones."""
    target, tokenizer, _ = trained
    prompts = [tokenizer.encode("import os\nimport sys\n\n\ndef read"), tokenizer.encode("Once upon a time")]
    want = [job.generated for job in run(Engine(target, tokenizer, n_ctx=512, n_slots=2), prompts, 80)]
    drafter = drafter_of(trained, types, 2)
    policy = adaptive_for(drafter)
    engine = Engine(target, tokenizer, drafter=drafter, n_ctx=512, n_slots=2, policy=policy)
    jobs = run(engine, prompts, 80)
    assert [job.generated for job in jobs] == want
    assert sum(job.stats.draft_n for job in jobs) > 0
    assert policy.costs.known(2, 0, 0) and len(policy.table(2)) >= 1
    again = run(engine, prompts, 40)  # on caches and a policy that are warm
    assert [job.generated for job in again] == [tokens[:40] for tokens in want]
    assert torch.isfinite(torch.tensor([ms for _, _, ms in policy.table(2)])).all()


def test_times_taken_at_the_start_leave_nothing_else_behind(trained: tuple[Model, Tokenizer, Weights]) -> None:
    target, tokenizer, _ = trained
    prompts = [tokenizer.encode("import os\nimport sys\n"), tokenizer.encode("Once upon")]
    want = [job.generated for job in run(Engine(target, tokenizer, n_ctx=512, n_slots=2), prompts, 24)]
    drafter = drafter_of(trained, ("draft-mtp",), 2)
    policy = adaptive_for(drafter)
    engine = Engine(target, tokenizer, drafter=drafter, n_ctx=512, n_slots=2, policy=policy)
    for n_streams in (1, 2):
        warm_up.run(engine, 5, n_streams)
        assert all(policy.costs.known(n_streams, 1 if n else 0, n) for n in (0, 3, 4))
    assert engine.idle and all(slot.n_past == 0 for slot in engine.slots) and engine.stats.n_decode == 0
    assert not policy.jobs and policy.account.total == 0.0 and drafter.stats.n_drafts == 0
    assert [job.generated for job in run(engine, prompts, 24)] == want
