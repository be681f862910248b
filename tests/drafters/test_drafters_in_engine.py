"""The trained drafters in the engine: several sequences at once, second turns, saved slots, grammars, cancels."""

import pytest
from golden.check_parity import Pair

from ggufspec import bundled
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec
from ggufspec.host_copy import host_copy
from ggufspec.job import JobState, Request
from ggufspec.prompt_cache import PromptCache
from ggufspec.sampling import SamplingParams
from ggufspec.slot_file import read_slot, write_slot

KINDS = {"mtp": (None, 3), "dspark": ("dspark", 5), "dflash2": ("dflash2", 4)}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TEXTS = [
    "import os\nimport json\n\n\ndef read_config(path):\n    ",
    '{"name": "value", "list": [1, 2, 3], "other": {"name": ',
    "The function returns a list of all the values that ",
    "for i in range(10):\n    print(",
]
N = 20


@pytest.fixture(scope="module")
def pair():
    return Pair(bundled.target_path())


@pytest.fixture(scope="module")
def prompts(pair):
    return [pair.tokenizer.encode(text) for text in TEXTS]


def engine(pair, kind, *, n_slots=1, kv="f16", n_ctx=256):
    from ggufspec.drafters import DraftOptions
    from ggufspec.drafters.load import SpecOptions, load_drafter
    from ggufspec.engine import Engine

    if kind is None:
        return Engine(pair.model, pair.tokenizer, n_slots=n_slots, n_ctx=n_ctx)
    file, n_max = KINDS[kind]
    drafter = load_drafter(
        SpecOptions(("draft-mtp",) if file is None else (), DraftOptions(n_max=n_max), type_k=kv, type_v=kv),
        pair.file, pair.model, None if file is None else open_gguf(bundled.path(file)),
        n_slots=n_slots, n_ctx=n_ctx, target_weights=pair.weights,
    )  # fmt: skip
    return Engine(pair.model, pair.tokenizer, drafter=drafter, n_slots=n_slots, n_ctx=n_ctx, n_ubatch=32)


def run(engine, prompt, n=N, **request):
    job = engine.submit(Request(prompt, request.pop("sampling", GREEDY), n_predict=n, **request))
    while job.state is not JobState.DONE:
        engine.step()
    return job


def result(job):
    return job.generated, job.stats.draft_n, job.stats.draft_n_accepted


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return [run(engine(pair, None), prompt).generated for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_four_sequences_at_once(pair, prompts, plain, kind):
    """Each stream is the plain one and its counts are those it has alone, whatever the others accept."""
    together = engine(pair, kind, n_slots=4)
    jobs = [together.submit(Request(prompt, GREEDY, n_predict=N)) for prompt in prompts]
    while not together.idle:
        together.step()
    assert [job.generated for job in jobs] == plain
    assert all(job.stats.draft_n_accepted > 0 for job in jobs)
    alone = engine(pair, kind)
    assert [result(job) for job in jobs] == [result(run(alone, prompt)) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_drafts_as_a_cold_one(pair, prompts, kind):
    """The first answer's end is cut off and replaced: the prompt goes on from a checkpoint, the drafter too."""
    warm = engine(pair, kind)
    first = run(warm, prompts[0])
    second = prompts[0] + first.generated[:10] + prompts[2] + prompts[1]
    again = run(warm, second)
    assert again.n_prompt_cached > 0
    cold = run(engine(pair, kind), second, cache_prompt=False)
    assert cold.n_prompt_cached == 0 and result(again)[0] == result(cold)[0]
    # Rounding of the prompt's chunks may turn a near-tie of the drafter, nothing more.
    assert result(again)[2] == pytest.approx(result(cold)[2], abs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_slot_goes_on_as_it_would_have(pair, prompts, kind, tmp_path):
    source = engine(pair, kind, n_slots=2)
    first = run(source, prompts[0], slot=0)
    more = prompts[0] + first.generated
    write_slot(tmp_path / "slot", source.save_slot(0))
    data, _ = read_slot(tmp_path / "slot")
    expected = result(run(source, more, slot=0))
    run(source, prompts[1], slot=1)
    source.restore_slot(1, data)
    job = run(source, more, slot=1)
    assert job.n_prompt_cached > len(prompts[0]) and result(job) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_cache_counts_and_restores_the_drafter_too(pair, prompts, kind):
    e = engine(pair, kind)
    first = run(e, prompts[0])
    e.prompt_cache = PromptCache(-1)
    run(e, prompts[1])
    (entry,) = e.prompt_cache.entries
    target, drafter = entry.state["cache"], host_copy(entry.state["drafter"])[1]
    points = host_copy(entry.state["checkpoints"])[1]
    assert drafter > 0 and entry.n_bytes == target.n_bytes + drafter + points
    again = run(e, [*prompts[0], *first.generated])
    cold = run(engine(pair, kind), [*prompts[0], *first.generated], cache_prompt=False)
    assert again.n_prompt_cached > len(prompts[0]) and result(again)[0] == result(cold)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_stream_leaves_nothing_behind(pair, prompts, plain, kind):
    e = engine(pair, kind)
    expected = result(run(e, prompts[0], cache_prompt=False))
    job = e.submit(Request(prompts[2], GREEDY, n_predict=100))
    for _ in range(4):
        e.step()
    e.cancel(job)
    e.step()
    assert job.finish_reason == "cancelled"
    again = result(run(e, prompts[0], cache_prompt=False))
    assert again == expected and again[0] == plain[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_binds_drafts_too(pair, prompts, kind):
    schema = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
    sampling = SamplingParams(temperature=0.0)
    without = run(engine(pair, None), prompts[1], grammar=schema, sampling=sampling)
    drafted = run(engine(pair, kind), prompts[1], grammar=schema, sampling=sampling)
    assert drafted.generated == without.generated and drafted.finish_reason == without.finish_reason
    assert drafted.stats.draft_n > 0


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_draft_caches_keep_their_acceptance(pair, prompts, plain, kind):
    """q8_0 accepts within 2 points of f16 over all streams; the text never changes."""
    share = {}
    for kv in ("f16", "q8_0"):
        e = engine(pair, kind, kv=kv)
        jobs = [run(e, prompt) for prompt in prompts]
        assert [job.generated for job in jobs] == plain
        drafted = sum(job.stats.draft_n for job in jobs)
        share[kv] = sum(job.stats.draft_n_accepted for job in jobs) / drafted
        assert e.drafter.stats.draft_n == drafted
    assert share["q8_0"] == pytest.approx(share["f16"], abs=0.02)


def test_statistics_of_an_engine_run(pair, prompts):
    e = engine(pair, "mtp")
    job = run(e, prompts[0])
    numbers = e.drafter.stats.as_dict()
    assert numbers["draft_n"] == job.stats.draft_n and numbers["draft_n_accepted"] == job.stats.draft_n_accepted
    assert numbers["n_drafts"] == job.stats.n_verify == numbers["calls"]["draft"]
    assert numbers["ms"]["draft"] > 0 and numbers["calls"]["begin"] == 1
    assert sum(numbers["accepted_per_position"]) * numbers["n_drafts"] == pytest.approx(numbers["draft_n_accepted"])
    assert len(numbers["accepted_per_position"]) == 3
