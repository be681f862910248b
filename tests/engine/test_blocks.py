"""What happens inside a block of accepted tokens: states, ends, counts, and grammars that begin to apply there."""

from __future__ import annotations

import copy
import json
import re

import families
import pytest
import torch
from scripted import Scripted, knowing, lengths

from ggufspec.chat_grammar import schema_grammar
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.grammar import GrammarSpec, Trigger
from ggufspec.job import Job, Request
from ggufspec.models import Model, load_model
from ggufspec.sampling import SamplingParams
from ggufspec.thinking import thinking_budget
from ggufspec.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPT = [40, 41, 42, 43, 44, 45, 46, 50, 51, 52, 60, 61]
SMALL = dict(n_embd=64, n_ff=96, head_dim=32, state_size=16)

Pair = tuple[Model, Tokenizer]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    file = open_gguf(families.make_qwen35(tmp_path_factory.mktemp("m") / "m.gguf", seed=11, **SMALL))
    return load_model(file), Tokenizer.from_metadata(file.metadata)


def engine(pair: Pair, drafter: Scripted | None = None) -> Engine:
    return Engine(pair[0], pair[1], drafter=drafter, n_ctx=256)  # type: ignore[arg-type]


def run(pair: Pair, request: Request, drafter: Scripted | None = None) -> Job:
    e = engine(pair, drafter)
    job = e.submit(request)
    while not e.idle:
        e.step()
    return job


@pytest.fixture(scope="module")
def stream(pair: Pair) -> list[int]:
    return run(pair, Request(PROMPT, GREEDY, n_predict=80)).generated


@pytest.mark.parametrize("drafts", ["right", "scripted lengths", "partly right"])
def test_every_step_leaves_the_state_of_a_plain_run(pair: Pair, stream: list[int], drafts: str) -> None:
    """Recurrent states and convolutions' tails after each step, bit for bit those of single tokens."""

    def states(drafter: Scripted | None) -> dict[int, list[torch.Tensor]]:
        e, found = engine(pair, drafter), {}
        job = e.submit(Request(PROMPT, GREEDY, n_predict=60))
        while not e.idle:
            e.step()
            found[e.slots[0].n_past] = [state.clone() for state in e.cache.save_recurrent(0)]
        assert job.generated == stream[:60]
        return found

    plain = states(None)
    assert sorted(plain) == list(range(min(plain), len(PROMPT) + 60))
    got = states({
        "right": knowing(stream, len(PROMPT), lambda step: 7, pair[0].n_vocab),
        "scripted lengths": lengths(stream, len(PROMPT), [7, 0, 3, 0, 0, 7, 1]),
        "partly right": knowing(stream, len(PROMPT), lambda step: step % 8, pair[0].n_vocab),
    }[drafts])  # fmt: skip
    assert 6 < len(got) < 40
    for n_past, state in got.items():
        assert all(map(torch.equal, state, plain[n_past])), n_past


@pytest.mark.parametrize("capturable", [False, True])
def test_an_empty_draft_is_a_plain_step(
    pair: Pair, stream: list[int], capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row goes through the target, and nothing is counted as a draft. Where the host does not see the draft, its
    rows are there and none of them is valid."""
    steps: list[tuple[int, int]] = []
    drafter, model = Scripted(lambda slot, n_past, n: []), pair[0]
    drafter.capturable = capturable
    forward = model.forward

    def watched(rows, *arguments, **how):  # noqa: ANN001, ANN002, ANN003, ANN202
        if rows.tentative:
            steps.append((rows.width, int(rows.n_rows)))
        return forward(rows, *arguments, **how)

    monkeypatch.setattr(model, "forward", watched)
    job = run(pair, Request(PROMPT, GREEDY, n_predict=30), drafter)
    assert job.generated == stream[:30]
    assert {n_rows for _, n_rows in steps} == {1} and (capturable or {width for width, _ in steps} == {1})
    stats = job.stats
    assert (stats.draft_n, stats.draft_n_accepted, stats.n_verify, drafter.stats.n_drafts) == (0, 0, 0, 0)


@pytest.mark.parametrize("at", range(1, 17))
def test_nothing_after_an_end_token_inside_a_block_is_shown(pair: Pair, stream: list[int], at: int) -> None:
    """The draft is right about the end and about all that would follow it."""
    end = stream[at]
    at = stream.index(end)
    tokenizer = copy.copy(pair[1])
    tokenizer.eog = frozenset({end})
    request = Request(PROMPT, SamplingParams(temperature=0.0), n_predict=60)
    job = run((pair[0], tokenizer), request, knowing(stream, len(PROMPT), lambda step: 7, pair[0].n_vocab))
    assert job.generated == stream[: at + 1] and job.stop_kind == "eos" and job.stats.predicted_n == at + 1
    assert job.text == run(pair, Request(PROMPT, GREEDY, n_predict=at)).text if at else job.text == ""
    assert job.stats.draft_n_accepted <= at


@pytest.mark.parametrize("right", [3, 7])
def test_what_a_limit_inside_a_block_delivers_is_what_is_counted(pair: Pair, stream: list[int], right: int) -> None:
    """Tokens in events, tokens with probabilities and the counted ones, for every place of the limit in a block."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=2)
    for limit in range(1, 18):
        e = engine(pair, knowing(stream, len(PROMPT), lambda step: right, pair[0].n_vocab))
        events = list(e.generate(Request(PROMPT, sampling, n_predict=limit)))
        shown = [token for event in events for token in event.tokens]
        assert [token.id for token in shown] == stream[:limit] and all(len(token.top) == 2 for token in shown)
        job = events[-1].job
        assert job.stats.predicted_n == len(job.generated) == limit and e.stats.predicted_tokens == limit
        assert job.stats.draft_n_accepted <= limit - 1


def digits_after(pair: Pair, job: Job, mark: str) -> str:
    """What follows the mark in all that was generated."""
    text = b"".join(pair[1].piece(token) for token in job.generated).decode(errors="replace")
    assert text.count(mark) == 1
    return text.split(mark)[1]


@pytest.mark.parametrize("first", range(8))
def test_a_grammar_behind_thoughts_binds_the_rest_of_the_block(pair: Pair, first: int) -> None:
    """The thoughts end at every place of a block; whether drafts know of the grammar or not, it holds from there on."""
    encode = lambda text: pair[1].encode(text, add_special=False, parse_special=True)  # noqa: E731
    budget = thinking_budget(encode, 11, ("<think>", "</think>"), generation_prompt="<think>")
    schema = {"type": "integer", "minimum": 1000000, "maximum": 999999999}
    grammar = GrammarSpec("lark", schema_grammar(schema, "</think>").lark, thinking=budget)
    request = Request(PROMPT, GREEDY, n_predict=40, grammar=grammar)
    want = run(pair, request)
    assert re.fullmatch(r"\s*[0-9]{1,9}", digits_after(pair, want, "</think>"))
    free = run(pair, Request(PROMPT, GREEDY, n_predict=40, grammar=GrammarSpec("none", thinking=budget))).generated
    assert free != want.generated
    for known in (want.generated, free):
        drafter = knowing(known, len(PROMPT), lambda step: 7 if step else first, pair[0].n_vocab)
        got = run(pair, request, drafter)
        assert got.generated == want.generated and got.text == want.text
        assert got.stats.draft_n_accepted > 7 and got.finish_reason == want.finish_reason


@pytest.mark.parametrize("at", range(3, 12))
def test_a_grammar_that_a_token_inside_a_block_switches_on(pair: Pair, stream: list[int], at: int) -> None:
    token = stream[at]
    at, word = stream.index(token), json.dumps(pair[1].piece(token).decode())
    grammar = GrammarSpec("gbnf", f"root ::= {word} [0-9]+", lazy=True, triggers=(Trigger("token", token),))
    request = Request(PROMPT, GREEDY, n_predict=24, grammar=grammar)
    want = run(pair, request).generated
    assert want[: at + 1] == stream[: at + 1]
    assert re.fullmatch("[0-9]+", b"".join(map(pair[1].piece, want[at + 1 :])).decode())
    for known in (want, stream):
        drafter = knowing(known, len(PROMPT), lambda step: 7, pair[0].n_vocab)
        assert run(pair, request, drafter).generated == want
