"""The engine with scripted drafters on small random models: whatever is drafted, the stream is the plain one."""

from __future__ import annotations

import families
import pytest
from scripted import Scripted, knowing, lengths, noise

from ggufspec.engine import Engine
from ggufspec.errors import ConfigError, RequestError
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec, Trigger
from ggufspec.job import Event, Job, JobState, Request
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, min_p=0.0, seed=42, ignore_eos=True)
PROMPT = [40, 41, 42, 43, 44, 45, 46, 50, 51, 52, 60, 61]


@pytest.fixture(scope="module", params=["qwen35", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    {"qwen35": families.make_qwen35, "qwen3": families.make_qwen3}[request.param](path, seed=11)
    file = open_gguf(path)
    n = int(file.metadata[f"{file.architecture}.block_count"])
    return load_model(file, Placement.single("cpu", n)), Tokenizer.from_metadata(file.metadata)


def engine(model: tuple[Model, Tokenizer], drafter: Scripted | None = None, **options: object) -> Engine:
    options = {"n_ctx": 640} | options
    return Engine(model[0], model[1], drafter=drafter, **options)  # type: ignore[arg-type]


def run(engine: Engine, request: Request) -> tuple[list[int], Job]:
    job = None
    for event in engine.generate(request):
        job = event.job
    assert job is not None and job.state is JobState.DONE
    return job.generated, job


def plain(model: tuple[Model, Tokenizer], n: int, sampling: SamplingParams = GREEDY, prompt: list[int] = PROMPT
          ) -> list[int]:
    return run(engine(model), Request(prompt, sampling, n_predict=n))[0]


def drain(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def test_random_drafts_change_nothing_for_512_tokens(model: tuple[Model, Tokenizer]) -> None:
    drafted, job = run(engine(model, noise(model[0].n_vocab)), Request(PROMPT, GREEDY, n_predict=512))
    assert drafted == plain(model, 512)
    assert job.stats.draft_n > 1000


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", range(8))
def test_every_fixed_accepted_count(model: tuple[Model, Tokenizer], right: int, sampling: SamplingParams) -> None:
    want = plain(model, 60, sampling)
    drafter = knowing(want, len(PROMPT), lambda step: right, model[0].n_vocab)
    got, job = run(engine(model, drafter), Request(PROMPT, sampling, n_predict=60))
    assert got == want
    assert job.stats.draft_n_accepted >= right * (60 // (right + 1) - 1)


def test_scripted_draft_lengths(model: tuple[Model, Tokenizer]) -> None:
    want = plain(model, 80)
    drafter = lengths(want, len(PROMPT), [7, 0, 3, 0, 0, 7, 1])
    assert run(engine(model, drafter), Request(PROMPT, GREEDY, n_predict=80))[0] == want
    assert 0 in {n for _, n in drafter.calls} and 7 in {n for _, n in drafter.calls}


def test_drafts_outside_the_vocabulary_are_rejected(model: tuple[Model, Tokenizer]) -> None:
    drafter = noise(model[0].n_vocab, outside=True)
    assert run(engine(model, drafter), Request(PROMPT, GREEDY, n_predict=60))[0] == plain(model, 60)


def test_slots_do_not_touch_one_another(model: tuple[Model, Tokenizer]) -> None:
    """Three prompts at once, with drafts of different accepted lengths, one of them cancelled midway."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:] + PROMPT[:3]]
    want = [plain(model, 50, prompt=p) for p in prompts]

    def script(slot: int, n_past: int, n: int) -> list[int]:
        at = n_past - len(PROMPT) + 1
        good = want[slot][at : at + slot * 2]
        return good + [1] * (n - len(good))

    e = engine(model, Scripted(script), n_slots=3)
    jobs = [e.submit(Request(p, GREEDY, n_predict=50)) for p in prompts]
    for _ in range(9):
        e.step()
    e.cancel(jobs[1])
    drain(e)
    assert jobs[0].generated == want[0] and jobs[2].generated == want[2]
    assert jobs[1].finish_reason == "cancelled" and jobs[1].generated == want[1][: len(jobs[1].generated)]
    again = e.submit(Request(prompts[1], GREEDY, n_predict=50))
    drain(e)
    assert again.generated == want[1]


def test_limits_inside_an_accepted_block(model: tuple[Model, Tokenizer]) -> None:
    want = plain(model, 40)
    for limit in range(1, 20):
        drafter = knowing(want, len(PROMPT), lambda step: 7, model[0].n_vocab)
        got, job = run(engine(model, drafter), Request(PROMPT, GREEDY, n_predict=limit))
        assert got == want[:limit]
        assert (job.finish_reason, job.stop_kind, job.stats.predicted_n) == ("length", "limit", limit)


def test_the_context_end_is_reached_exactly(model: tuple[Model, Tokenizer]) -> None:
    want, job = run(engine(model, n_ctx=256), Request(PROMPT, GREEDY))
    assert job.truncated and len(PROMPT) + len(want) == 256
    drafter = knowing(want, len(PROMPT), lambda step: 7, model[0].n_vocab)
    got, job = run(engine(model, drafter, n_ctx=256), Request(PROMPT, GREEDY))
    assert got == want and job.finish_reason == "length"


def test_stop_string_inside_an_accepted_block(model: tuple[Model, Tokenizer]) -> None:
    """Nothing of the stop string is shown, and the slot goes on as if the block had ended there."""
    want, job = run(engine(model), Request(PROMPT, GREEDY, n_predict=60))
    text = job.text
    stop = text[20:23]
    base, plain_job = run(engine(model), Request(PROMPT, GREEDY, n_predict=60, stop=(stop,)))
    drafter = knowing(want, len(PROMPT), lambda step: 7, model[0].n_vocab)
    e = engine(model, drafter)
    got, job = run(e, Request(PROMPT, GREEDY, n_predict=60, stop=(stop,)))
    assert got == base and job.text == plain_job.text == text[: text.find(stop)]
    assert (job.finish_reason, job.stop_kind, job.stopping_word) == ("stop", "word", stop)
    assert e.slots[0].tokens == PROMPT + got[:-1]
    longer = [*PROMPT, *got, 70, 71]
    again, job = run(e, Request(longer, GREEDY, n_predict=30))
    assert job.n_prompt_cached == len(PROMPT) + len(got) - 1
    e.drafter = None
    assert again == run(engine(model), Request(longer, GREEDY, n_predict=30))[0]


def test_end_of_text_counts_only_from_the_target(model: tuple[Model, Tokenizer]) -> None:
    """The draft is full of end tokens that the target does not choose; then the target's own ends the stream."""
    eog = sorted(model[1].eog)[0]
    drafter = Scripted(lambda slot, past, n: [eog] * n)
    assert run(engine(model, drafter), Request(PROMPT, GREEDY, n_predict=40))[0] == plain(model, 40)
    want = plain(model, 40)
    forced = SamplingParams(temperature=0.0, logit_bias=((eog, 1e4),))
    got, job = run(engine(model, knowing(want, len(PROMPT), lambda s: 7, model[0].n_vocab)),
                   Request(PROMPT, forced, n_predict=40))
    assert got == [eog] and job.stop_kind == "eos" and job.text == ""


def test_a_second_turn_reuses_the_first(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model)
    prompt = (PROMPT * 12)[:140]
    answer, _ = run(e, Request(prompt, GREEDY, n_predict=20))
    _, job = run(e, Request([*prompt, *answer, 33, 34, 35], GREEDY, n_predict=5))
    assert job.n_prompt_cached == len(prompt) + len(answer) - 1
    # the answer was changed (its thinking stripped): back to a checkpoint near the prompt's end
    _, job = run(e, Request([*prompt[:-4], 90, 91, 92, 93, 94], GREEDY, n_predict=5))
    assert job.n_prompt_cached >= len(prompt) - 4 - 16
    fresh = run(engine(model), Request([*prompt[:-4], 90, 91, 92, 93, 94], GREEDY, n_predict=5))[0]
    assert job.generated == fresh


def test_a_saved_slot_goes_on_where_it_was(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model, n_slots=2)
    answer, _ = run(e, Request(PROMPT, GREEDY, n_predict=20, slot=0))
    saved = e.save_slot(0)
    longer = [*PROMPT, *answer, 80]
    want, _ = run(e, Request(longer, GREEDY, n_predict=20, slot=0))
    e.restore_slot(1, saved)
    got, job = run(e, Request(longer, GREEDY, n_predict=20, slot=1))
    assert got == want and job.n_prompt_cached == len(PROMPT) + 19
    other = engine(model, n_slots=1, type_k="q8_0")
    with pytest.raises(ConfigError, match="cache types"):
        other.restore_slot(0, saved)
    assert other.slots[0].tokens == []


def test_requests_that_can_never_be_served(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model, n_ctx=256)
    with pytest.raises(RequestError, match=r"request \(300 tokens\) exceeds the available context size \(256"):
        e.submit(Request([40] * 300, GREEDY))
    with pytest.raises(RequestError, match="must not be empty"):
        e.submit(Request([], GREEDY))
    with pytest.raises(RequestError, match="token id 999999"):
        e.submit(Request([999999], GREEDY))


LETTERS = tuple(Trigger("pattern", p) for p in (r"[\s\S]",))
FAILING = {
    "mistake": (GrammarSpec("gbnf", "root ::= [a"), "closing bracket"),
    "dead end": (GrammarSpec("lark", 'start: "a" /[b&&c]/'), "grammar"),
    "late trigger": (GrammarSpec("gbnf", 'root ::= "~~~"', lazy=True, triggers=LETTERS), "does not fit it"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_grammar_that_fails_ends_its_own_request_only(model: tuple[Model, Tokenizer], name: str) -> None:
    grammar, message = FAILING[name]
    want = plain(model, 30)
    e = engine(model, knowing(want, len(PROMPT), lambda s: 3, model[0].n_vocab), n_slots=2)
    good = e.submit(Request(PROMPT, GREEDY, n_predict=30))
    e.step()
    bad = e.submit(Request(PROMPT, SAMPLED, n_predict=30, grammar=grammar))
    (error,) = [event for event in drain(e) if event.kind == "error"]
    assert error.job is bad and message in str(error.error) and bad.finish_reason == "error"
    assert good.generated == want and all(slot.job is None for slot in e.slots)
    with pytest.raises(RequestError, match=message):
        list(e.generate(Request(PROMPT, SAMPLED, n_predict=30, grammar=grammar)))
    assert run(e, Request(PROMPT, GREEDY, n_predict=30))[0] == want


def test_log_probabilities_of_accepted_tokens(model: tuple[Model, Tokenizer]) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=4)

    def reported(e: Engine) -> list[tuple[int, float, list[tuple[int, float]]]]:
        events = list(e.generate(Request(PROMPT, sampling, n_predict=30)))
        return [(t.id, t.logprob or 0.0, t.top) for event in events for t in event.tokens]

    want = reported(engine(model))
    stream = [t for t, _, _ in want]
    assert len(want) == 30 and all(len(top) == 4 for _, _, top in want)
    assert reported(engine(model, knowing(stream, len(PROMPT), lambda s: 5, model[0].n_vocab))) == want


def test_penalties_see_the_draft_before_them(model: tuple[Model, Tokenizer]) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, repeat_penalty=1.5, repeat_last_n=16, ignore_eos=True)
    want = plain(model, 50, sampling)
    for right in (2, 7):
        drafter = knowing(want, len(PROMPT), lambda step, right=right: right, model[0].n_vocab)
        assert run(engine(model, drafter), Request(PROMPT, sampling, n_predict=50))[0] == want


def test_a_long_prompt_does_not_stall_running_streams(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model, n_slots=2, n_ubatch=32)
    short = e.submit(Request(PROMPT, GREEDY, n_predict=60))
    e.step()
    e.submit(Request((PROMPT * 40)[:300], GREEDY, n_predict=2))
    before = len(short.generated)
    for i in range(1, 9):
        e.step()
        assert len(short.generated) == before + i
    drain(e)
    assert short.generated == plain(model, 60)


def test_without_continuous_batching_prompts_are_read_when_nobody_generates(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model, n_slots=3, n_ubatch=32, continuous=False)
    first, second = (e.submit(Request((PROMPT * 40)[:n], GREEDY, n_predict=12)) for n in (len(PROMPT), 100))
    while second.n_prompt_done < 100:  # both are read before either goes on
        e.step()
        assert len(first.generated) <= 1
    late = e.submit(Request(PROMPT, GREEDY, n_predict=5))
    while len(second.generated) < 12:
        e.step()
        assert late.n_prompt_done == 0 and (len(first.generated) == len(second.generated) or not first.generated[1:])
    drain(e)
    assert first.generated == plain(model, 12) and late.generated == plain(model, 5)
    assert second.generated == run(engine(model), Request((PROMPT * 40)[:100], GREEDY, n_predict=12))[0]


def test_checkpoints_stay_within_their_limit(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model, n_ubatch=16, n_checkpoints=3, checkpoint_step=16)
    run(e, Request((PROMPT * 20)[:200], GREEDY, n_predict=3))
    assert len(e.slots[0].checkpoints) == (3 if e.cache.has_recurrent else 0)


def test_without_checkpoints_a_prompt_has_no_chunk_for_them(model: tuple[Model, Tokenizer]) -> None:
    ends = {}
    for n_checkpoints in (0, 1):
        e = engine(model, n_ubatch=64, n_checkpoints=n_checkpoints)
        job = e.submit(Request((PROMPT * 20)[:120], GREEDY, n_predict=1))
        ends[n_checkpoints] = []
        while job.n_prompt_done < 120:
            e.step()
            ends[n_checkpoints].append(job.n_prompt_done)
    assert ends == {0: [64, 120], 1: [64, 104, 120] if e.cache.has_recurrent else [64, 120]}


def test_a_saved_slot_of_another_model_is_refused_before_anything_is_written(model: tuple[Model, Tokenizer]) -> None:
    e = engine(model)
    run(e, Request(PROMPT, GREEDY, n_predict=4))
    saved = e.save_slot(0)
    if not e.cache.has_recurrent:
        return
    states = saved["cache"].recurrent
    at = next(i for i, state in enumerate(states) if state is not None)
    states[at] = states[at][:-1]
    other = engine(model)
    with pytest.raises(ConfigError, match="recurrent state of another size"):
        other.restore_slot(0, saved)
    assert other.slots[0].tokens == []
