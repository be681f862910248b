"""Forward passes of every architecture: published numbers, llama.cpp, and the invariances that parity rests on."""

from pathlib import Path

import families
import pytest
import torch
from fixtures import LOGPROBS, PROMPT, make_fixture
from peer import complete

from ggufspec.gguf_file import open_gguf
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.rows import Rows, prompt_rows

MAKERS = {
    "qwen3": families.make_qwen3,
    "qwen2": families.make_qwen2,
    "llama": families.make_llama,
    "gemma3": families.make_gemma3,
    "qwen35": families.make_qwen35,
}


def load(path: Path) -> Model:
    file = open_gguf(path)
    return load_model(file, Placement.single("cpu", int(file.metadata[f"{file.architecture}.block_count"])))


def narrow(model: Model, cache, tokens: list[int], n_past: int, slot: int = 0) -> torch.Tensor:
    """Logits [W, V] of tentative rows; nothing is accepted yet."""
    rows = Rows(torch.tensor([tokens]), torch.tensor([slot]), torch.tensor([n_past]), torch.tensor([len(tokens)]),
                tentative=True)
    return model.forward(rows, cache).logits[0]


def accept(cache, n: int, slot: int = 0) -> None:
    cache.accept(torch.tensor([slot]), torch.tensor([n]))


@pytest.mark.parametrize("name", LOGPROBS)
def test_published_log_probabilities(name: str, tmp_path: Path) -> None:
    model = load(make_fixture(tmp_path / "m.gguf", name))
    cache = model.new_cache(1, 64, "f32", "f32")
    logits = model.forward(prompt_rows(torch.tensor(PROMPT), 0, 0), cache, logits="last").logits[0, 0]
    for i, want in enumerate(LOGPROBS[name]):
        got = torch.log_softmax(logits.double(), 0)
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-4, rtol=0)
        token = int(logits[1:].argmax()) + 1
        logits = narrow(model, cache, [token], len(PROMPT) + i)[0]
        accept(cache, 1)


@pytest.mark.parametrize("architecture", MAKERS)
def test_rows_do_not_depend_on_their_neighbours(architecture: str, tmp_path: Path) -> None:
    """Widths 1..16, any split and any batch: the same bits for every row."""
    model = load(MAKERS[architecture](tmp_path / "m.gguf", seed=3))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.n_vocab, (37 + 16,), generator=generator)
    prompt, rest = tokens[:37], tokens[37:].tolist()

    def run(widths: list[int], n_slots: int = 1, slot: int = 0) -> torch.Tensor:
        cache = model.new_cache(n_slots, 256)
        for s in range(n_slots):
            model.forward(prompt_rows(prompt, s, 0), cache, logits="none")
        out, at = [], 0
        for width in widths:
            if n_slots == 1:
                out.append(narrow(model, cache, rest[at : at + width], 37 + at))
                accept(cache, width)
            else:
                batch = torch.tensor([rest[at : at + width]] * n_slots)
                rows = Rows(batch, torch.arange(n_slots), torch.full((n_slots,), 37 + at),
                            torch.full((n_slots,), width), tentative=True)
                out.append(model.forward(rows, cache).logits[slot])
                cache.accept(torch.arange(n_slots), torch.full((n_slots,), width))
            at += width
        return torch.cat(out)

    alone = run([1] * 16)
    for widths in ([16], [8, 8], [1, 7, 3, 5], [2, 2, 4, 8]):
        assert torch.equal(run(widths), alone), widths
    assert torch.equal(run([4] * 4, n_slots=3, slot=1), alone)


@pytest.mark.parametrize("architecture", MAKERS)
def test_rejected_rows_leave_no_trace(architecture: str, tmp_path: Path) -> None:
    """After any accepted count, the next row's logits are those of a run that never saw the rejected rows."""
    model = load(MAKERS[architecture](tmp_path / "m.gguf", seed=4))
    generator = torch.Generator().manual_seed(2)
    right = torch.randint(0, model.n_vocab, (40,), generator=generator).tolist()
    wrong = torch.randint(0, model.n_vocab, (8,), generator=generator).tolist()
    plain = model.new_cache(1, 256)
    model.forward(prompt_rows(torch.tensor(right[:20]), 0, 0), plain, logits="none")
    want = []
    for i in range(20, 40):
        want.append(narrow(model, plain, [right[i]], i)[0])
        accept(plain, 1)
    cache = model.new_cache(1, 256)
    model.forward(prompt_rows(torch.tensor(right[:20]), 0, 0), cache, logits="none")
    at = 20
    for kept in (1, 3, 1, 7, 2, 1, 4):
        rows = (right[at : at + kept] + wrong)[:8]
        got = narrow(model, cache, rows, at)
        accept(cache, kept)
        for i in range(kept):
            if at + i < 40:
                assert torch.equal(got[i], want[at + i - 20])
        at += kept
        if at >= 40:
            break


@pytest.mark.parametrize("architecture", MAKERS)
def test_prompt_chunks_agree_with_single_rows(architecture: str, tmp_path: Path) -> None:
    model = load(MAKERS[architecture](tmp_path / "m.gguf", seed=5))
    tokens = torch.randint(0, model.n_vocab, (150,), generator=torch.Generator().manual_seed(3))
    whole, chunked, single = (model.new_cache(1, 256, "f32", "f32") for _ in range(3))
    a = model.forward(prompt_rows(tokens, 0, 0), whole, logits="last").logits[0, 0]
    for start in range(0, 150, 60):
        b = model.forward(prompt_rows(tokens[start : start + 60], 0, start), chunked, logits="last").logits[0, 0]
    for i, token in enumerate(tokens.tolist()):
        c = narrow(model, single, [token], i)[0]
        accept(single, 1)
    torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(a, c, atol=2e-4, rtol=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("architecture", MAKERS)
def test_greedy_text_and_top_log_probabilities_are_llama_cpps(architecture: str, tmp_path: Path) -> None:
    """40 steps; a difference counts unless llama.cpp's own two best are within 1e-3 there."""
    path = MAKERS[architecture](tmp_path / "m.gguf", seed=6)
    model = load(path)
    prompt = torch.randint(0, model.n_vocab, (23,), generator=torch.Generator().manual_seed(4)).tolist()
    (answer,) = complete(path, [prompt], n_predict=40, top=5)
    cache = model.new_cache(1, 256)
    logits = model.forward(prompt_rows(torch.tensor(prompt), 0, 0), cache, logits="last").logits[0, 0]
    divergence = []
    for i, token in enumerate(answer.tokens):
        ours = torch.log_softmax(logits.double(), 0)
        if i < len(answer.top) and token in answer.top[i]:
            top = answer.top[i]
            divergence.append(sum(torch.tensor(p).exp().item() * (p - ours[t].item()) for t, p in top.items()))
            best = sorted(top.values(), reverse=True)
            if best[0] - best[1] > 1e-3:
                assert int(ours.argmax()) == token, f"step {i}"
        logits = narrow(model, cache, [token], len(prompt) + i)[0]
        accept(cache, 1)
    assert len(divergence) > 20
    assert sum(divergence) / len(divergence) < 1e-4
