"""Prompt chunks of a few widths: rows past the tokens change no logits, no slot and nothing that a drafter keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_engines import GREEDY, KINDS, SAMPLED, Family, difference, drain, flat, outcome, replayed, same_slots

from ggufspec.admission import branch_of
from ggufspec.drafters import DraftOptions
from ggufspec.drafters.small_model import SmallModel
from ggufspec.engine import Engine
from ggufspec.host_copy import host_copy
from ggufspec.job import Job, Request
from ggufspec.prefill import WIDTHS, padded_width
from ggufspec.rows import prompt_table, rows_of_table
from ggufspec.sampling import SamplingParams


@pytest.fixture(scope="module")
def family() -> Family:
    return Family()


def padded(engine: Engine) -> Engine:
    """Chunks and steps captured as far as a CPU can."""
    replayed(engine)
    engine.prefill.graphs, engine.prefill.is_padded = engine.decoder.graphs, True
    return engine


def captured_widths(engine: Engine) -> set[int]:
    graphs = engine.prefill.graphs
    assert graphs is not None
    return {key[0][1] for key in graphs.captured if key[0][0] == "prompt"}


def test_widths() -> None:
    assert [padded_width(n) for n in (1, 16, 17, 33, 192, 193, 300, 512, 513, 2048)] == [
        16, 16, 32, 64, 192, 256, 384, 512, 513, 2048
    ]  # fmt: skip
    assert all(width % 2 == 0 for width in WIDTHS)


@pytest.mark.parametrize("width", [5, 6, 16])
def test_a_table_is_rows(width: int) -> None:
    """Whatever is read by itself begins at a whole multiple of 16 bytes."""
    table = prompt_table([7, 8, 9, 10, 11], 3, 40, width)
    rows = rows_of_table(table, width)
    assert rows.tokens.tolist() == [[7, 8, 9, 10, 11] + [0] * (width - 5)] and not rows.tentative
    assert (rows.slots.tolist(), rows.n_past.tolist(), rows.n_rows.tolist()) == ([3], [40], [5])
    for part in (rows.slots, rows.n_past, rows.n_rows):
        assert (part.data_ptr() - table.data_ptr()) % 16 == 0


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_every_length(family: Family, kind: str) -> None:
    """Two chunks, the second after the first: logits, hidden rows, states, cells, drafters' own."""
    exact, wide = (family.engine(kind, False, 1, 256) for _ in range(2))
    padded(wide)
    tokens = [40 + 7 * i % 400 for i in range(140)]
    with torch.inference_mode():
        for n in range(1, 71) if kind == "plain" else (1, 2, 7, 16, 17, 33, 64, 65):
            outputs: list[list[torch.Tensor]] = []
            for engine in (exact, wide):
                engine.erase_slot(0)
                parts = []
                for start, stop in ((0, n), (n, n + 70 - n // 2)):
                    output = engine.prefill.run(tokens[start:stop], 0, start, is_last=True)
                    assert output.logits is not None
                    parts += [output.logits.clone(), output.hidden[:, : stop - start].clone()]
                engine.slots[0].tokens = tokens[:stop]
                outputs.append(parts)
            for a, b in zip(*outputs):
                assert a.shape == b.shape and torch.equal(a, b), n
            same_slots(exact, wide)
    assert captured_widths(wide) >= {16, 32, 64, 96}


@pytest.mark.parametrize("kind", [*KINDS, "chain", "small"])
def test_streams(family: Family, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slots, chunks of every kind beside steps, second turns: everything as without padding."""
    monkeypatch.setattr("ggufspec.admission.N_SPARE", 0)  # the same chunks in both

    def engine() -> Engine:
        options: dict[str, Any] = {"n_slots": 3, "n_ubatch": 48}
        if kind == "small":
            small = SmallModel(family.model, DraftOptions(n_max=2), n_slots=3, n_ctx=256)
            return family.engine("plain", False, drafter=small, **options)
        if kind == "chain":
            from test_rehearsal import with_lookup

            return family.engine("plain", False, drafter=with_lookup(family), **options)
        return family.engine(kind, False, **options)

    def play(engine: Engine) -> list[Job]:
        jobs = []
        for k, n in enumerate((3, 30, 110)):
            prompt = (family.prompts[k] * 9)[:n]
            jobs.append(engine.submit(Request(prompt, (GREEDY, SAMPLED)[k % 2], n_predict=14)))
        drain(engine)
        for job in list(jobs):
            jobs.append(engine.submit(Request([*job.request.prompt, *job.generated, 50, 51], GREEDY, n_predict=5)))
        jobs.append(engine.submit(Request(family.prompts[0], GREEDY, n_predict=9)))
        drain(engine)
        jobs.append(engine.submit(Request(family.prompts[1], GREEDY, want_embedding=True)))
        drain(engine)
        return jobs

    exact, wide = engine(), padded(engine())
    want, got = play(exact), play(wide)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert [job.n_prompt_cached for job in got] == [job.n_prompt_cached for job in want]
    assert want[-1].embedding is not None and torch.equal(got[-1].embedding, want[-1].embedding)
    same_slots(exact, wide)
    assert captured_widths(wide) >= {16, 64}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_slots_with_a_window(family: Family, sampling: SamplingParams) -> None:
    """Chunks as long as the ring of a sliding layer, checkpoints of it, steps ahead that are dropped: captured or not,
    slots are left the same."""
    tokens = [40 + 7 * i % 400 for i in range(600)]

    def play(engine: Engine) -> list[Job]:
        jobs = [engine.submit(Request(tokens[k : k + n], sampling, n_predict=9 + k, slot=k % 2))
                for k, n in enumerate((17, 40, 200, 530))]  # fmt: skip
        drain(engine)
        for k, job in enumerate(jobs[-2:]):
            text = [*job.request.prompt, *job.generated, 50, 51]
            jobs.append(engine.submit(Request(text, sampling, n_predict=7, slot=k)))
        drain(engine)
        return jobs

    captured = padded(family.engine("dflash2", True, 2, 1024))
    eager = family.engine("dflash2", False, 2, 1024)
    eager.prefill.is_padded = True
    got, want = play(captured), play(eager)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert [job.n_prompt_cached for job in got] == [job.n_prompt_cached for job in want] and got[-1].n_prompt_cached
    assert any(point.drafter[0] is not None for slot in captured.slots for point in slot.checkpoints)
    same_slots(captured, eager)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_past_the_last_cell(family: Family, kind: str) -> None:
    """A chunk whose padding would stand behind the end of the context, and behind all cells there are."""
    exact, wide = (family.engine(kind, False, 1, 250) for _ in range(2))
    padded(wide)
    tokens = [40 + 7 * i % 400 for i in range(249)]
    parts: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for engine in (exact, wide):
            for start, stop in ((0, 100), (100, 230), (230, 249)):
                output = engine.prefill.run(tokens[start:stop], 0, start, is_last=True)
            assert output.logits is not None
            parts.append([output.logits.clone(), output.hidden[:, :19].clone()])
            engine.slots[0].tokens = tokens
    assert all(torch.equal(a, b) for a, b in zip(*parts))
    same_slots(exact, wide)
    assert captured_widths(wide) == {128, 160, 32}  # the last one to position 262, of 256 cells


def test_padding_touches_nothing_else(family: Family) -> None:
    """Every number of a slot beside the one that is given a prompt."""
    engine = padded(family.engine("mtp", False, 2))
    engine.submit(Request(family.prompts[0], GREEDY, n_predict=4, slot=1))
    drain(engine)
    before = flat(host_copy(engine.save_slot(1))[0])
    engine.submit(Request(family.prompts[1][:5], GREEDY, n_predict=1, slot=0))
    drain(engine)
    after = flat(host_copy(engine.save_slot(1))[0])
    assert [at for at, _ in before] == [at for at, _ in after]
    assert not [at for (at, a), (_, b) in zip(before, after) if difference(a, b)]


def ends(engine: Engine, n: int, **options: Any) -> list[int]:
    """Where the chunks of a prompt of n tokens end."""
    job = engine.submit(Request([40 + 7 * i % 400 for i in range(n)], GREEDY, n_predict=1, **options))
    found = []
    while job.n_prompt_done < n:
        engine.step()
        found.append(job.n_prompt_done)
    drain(engine)
    return found


def test_where_a_prompt_is_left() -> None:
    """At its last few tokens, or at a border or checkpoint that is hardly before them."""
    assert [branch_of(n, 512, 0, 0) for n in (5, 20, 200, 512, 530, 700)] == [0, 4, 184, 496, 514, 684]
    assert [branch_of(n, 512, 0, 128) for n in (5, 20, 143, 144, 512, 530, 655, 656)] == [
        0, 0, 0, 128, 496, 512, 512, 640
    ]  # fmt: skip
    assert [branch_of(300, 512, newest, 128) for newest in (100, 156, 157, 284, 299)] == [284, 284, 157, 284, 284]


def test_a_short_prompt_is_one_chunk(family: Family) -> None:
    """No chunk of its own for a checkpoint that would spare hardly anything; the next turn goes back as far."""
    engine = padded(family.engine("plain", False, 1, 1024, n_ubatch=256))
    assert ends(engine, 140, cache_prompt=False) == [140]
    assert [c.n_past for c in engine.slots[0].checkpoints] == [140]
    assert ends(engine, 200, cache_prompt=False) == [184, 200]
    assert ends(engine, 300, cache_prompt=False) == [256, 300]
    assert [c.n_past for c in engine.slots[0].checkpoints] == [256, 300]
    prompt = [40 + 7 * i % 400 for i in range(300)]
    changed = engine.submit(Request([*prompt[:290], 41, 42, 43], GREEDY, n_predict=4))
    drain(engine)
    assert changed.n_prompt_cached == 256
    cold = padded(family.engine("plain", False, 1, 1024, n_ubatch=256))
    want = cold.submit(Request(changed.request.prompt, GREEDY, n_predict=4))
    drain(cold)
    assert changed.generated == want.generated


def test_checkpoints_are_put_away_after_the_first_token(family: Family) -> None:
    """The step that gives the first token does nothing else; the newest two stay where they are."""
    engine = family.engine("plain", False, 1, 1024, n_ubatch=32, checkpoint_step=32)
    job = engine.submit(Request([40 + 7 * i % 400 for i in range(150)], GREEDY, n_predict=3))
    while not job.generated:
        (event,) = engine.step()
    assert event.kind == "text" and len(job.generated) == 1 and engine.crowded == [engine.slots[0]]
    points = engine.slots[0].checkpoints
    before = [c.states for c in points]
    engine.step()
    stowed = [a is not c.states for a, c in zip(before, points)]
    assert stowed == [True] * (len(points) - 2) + [False] * 2 and not engine.crowded
    drain(engine)
    assert engine.idle and len(job.generated) == 3


def five_beside_one(engine: Engine, family: Family) -> tuple[Job, list[tuple[int, int]]]:
    """A running stream that five prompts join; by step, prompts with a first token and tokens of the running stream."""
    running = engine.submit(Request(family.prompts[0], GREEDY, n_predict=60))
    while len(running.generated) < 3:
        engine.step()
    jobs = [engine.submit(Request([40 + b, *range(60, 84)], GREEDY, n_predict=30)) for b in range(5)]
    seen = []
    while not jobs[-1].generated:
        before = len(running.generated)
        engine.step()
        seen.append((sum(bool(job.generated) for job in jobs), len(running.generated) - before))
    return running, seen


def test_short_prompts_do_not_wait_for_steps_in_between(family: Family) -> None:
    """Prompts that come together have their first tokens one after the other; a running stream waits for no more rows
    than a chunk may have."""
    engine = family.engine("plain", False, 6, n_ubatch=64)
    running, seen = five_beside_one(engine, family)
    # 25 tokens in chunks of 9 and 16; the stream has a token where a chunk is not its prompt's last or 64 rows are full
    assert [n for n, _ in seen] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert [n for _, n in seen] == [1, 0, 1, 0, 1, 0, 1, 0, 1, 1]
    drain(engine)
    alone = family.engine("plain", False, 1)
    want = alone.submit(Request(family.prompts[0], GREEDY, n_predict=60))
    drain(alone)
    assert running.generated == want.generated

    engine = family.engine("plain", False, 6, n_ubatch=64, n_checkpoints=0)
    _, seen = five_beside_one(engine, family)
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 0), (5, 1)]
