"""What the MTP block is fed with, and what its cache holds of a prompt."""

import pytest
import torch
from families import make_qwen35
from loop import load_target, make_drafter, one
from small_vocabulary import twelve_letters

from ggufspec.kernels import kv as kvs
from ggufspec.models import Output
from ggufspec.rows import Rows, prompt_rows

SMALL = dict(type="F32", n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=12, state_size=16)
T = 40
TOKENS = torch.arange(T) * 7 % 11 + 1


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    path = make_qwen35(tmp_path_factory.mktemp("m") / "m.gguf", seed=3, vocabulary=twelve_letters(), **SMALL)
    return load_target(path)


def make(hybrid, **options):
    return make_drafter(*hybrid, None, ["draft-mtp"], n_max=3, **{"type_k": "f32", "type_v": "f32", **options})


def observe(drafter, hidden, ends, tentative=False, accepted=None):
    """Rows of TOKENS with these hidden rows, in chunks or in steps of which only so many rows are accepted."""
    start = 0
    for k, end in enumerate(ends):
        rows = prompt_rows(TOKENS[start:end], 0, start)
        rows = Rows(rows.tokens, rows.slots, rows.n_past, rows.n_rows, tentative)
        drafter.observe(rows, Output(None, hidden[:, start:end], None))
        start = end
        if tentative:
            drafter.accept(one(0), one(accepted[k] - 1))
            start = end - (rows.width - accepted[k])


def cells(drafter, n=T):
    return kvs.load(drafter.kv, 0, n)


@torch.inference_mode()
def test_hidden_rows_are_those_after_the_final_norm(hybrid):
    """They are what the head reads, and the row that awaits the next token is the last of them."""
    model, drafter = hybrid[1], make(hybrid)
    cache = model.new_cache(1, 64, "f32", "f32")
    rows = prompt_rows(TOKENS, 0, 0)
    output = model.forward(rows, cache, logits="all")
    drafter.observe(rows, output)
    assert torch.equal(drafter.pending[0], output.hidden[0, -1])
    assert torch.allclose((output.hidden / model.output_norm).square().mean(-1), torch.ones(1, T), atol=1e-4)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
@torch.inference_mode()
def test_the_cache_is_filled_for_the_whole_prompt(hybrid, kv):
    """However it is cut: every position, of the token there and the hidden row before it."""
    hidden = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(1))
    whole, pieces = (make(hybrid, type_k=kv, type_v=kv) for _ in range(2))
    observe(whole, hidden, [T])
    observe(pieces, hidden, [16, 17, 33, T])
    for a, b in zip(cells(whole), cells(pieces)):
        assert torch.equal(a, b) and bool((a != 0).any(-1).all())
    assert torch.equal(whole.pending, pieces.pending)
    for at in (0, 15, 16, 38):
        changed, other = hidden.clone(), make(hybrid, type_k=kv, type_v=kv)
        changed[0, at] = -changed[0, at]
        observe(other, changed, [16, 17, 33, T])
        differs = [int(i) for i in (cells(other)[0] != cells(whole)[0]).flatten(1).any(1).nonzero()]
        assert differs == [at + 1]


@torch.inference_mode()
def test_rejected_rows_leave_the_cache_of_the_accepted_ones(hybrid):
    """Steps of four rows, of which one to four stand: as if the others had never been."""
    hidden = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(2))
    whole, steps = make(hybrid), make(hybrid)
    observe(whole, hidden, [T])
    accepted, ends, start = [], [], 0
    while start + 4 <= T:
        accepted.append(1 + len(ends) % 4)
        ends.append(start + 4)
        start += accepted[-1]
    observe(steps, hidden, ends, tentative=True, accepted=accepted)
    for a, b in zip(cells(whole, start), cells(steps, start)):
        assert torch.equal(a, b)
    assert torch.equal(steps.pending[0], hidden[0, start - 1])


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0"])
@torch.inference_mode()
def test_what_is_observed_and_what_is_drafted_is_stored_alike(hybrid, kv):
    """Norm, rotation and Hadamard transform of a key are the same on both ways into the cache."""
    hidden = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(3))
    drafter, other = make(hybrid, type_k=kv, type_v=kv), make(hybrid, type_k=kv, type_v=kv)
    observe(drafter, hidden[:, : T - 1], [T - 1])
    observe(other, hidden, [T])
    drafter.propose(one(0), TOKENS[T - 1 :], one(T - 1), 1)
    for a, b in ((drafter.kv.k, other.kv.k), (drafter.kv.v, other.kv.v)):
        assert torch.equal(a[0, : T], b[0, : T])
