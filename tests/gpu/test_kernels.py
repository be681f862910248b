"""Triton kernels on a card, at real sizes: equal to their twins, rows independent of the width, and capturable."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
pytestmark = pytest.mark.gpu
NAMES = ("norms", "rope", "store", "norm_rope_store", "attention_types", "attention_masks", "attention_width",
         "attention_splits", "attention_prepared",
         "attention_padding", "gdn_steps", "gdn_prompt", "gdn_prompt_padding", "gdn_committed",
         "gdn_repeated_keys",
         "selection", "selector_walk", "dynamic_conv",
         "rows", "carry", "markov_tokens", "selector_rows", "prepared", "prepared_wide")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_twin(name):
    from cases import CASES

    CASES[name]("cuda", True)


def test_gdn_prompts_equal_the_twin():
    from cases.comparing import on
    from cases.gdn import gdn_rows, gdn_setup

    from ggufspec.kernels import gdn

    spec, weights = gdn_setup(True)
    dweights = gdn.GdnWeights(*on("cuda", weights.conv, weights.dt, weights.a))
    rows = gdn_rows(spec, 300)
    slots, n_rows = torch.tensor([1, 0]), torch.tensor([300, 171])
    mine, theirs = gdn.allocate(spec, 2, "cpu"), gdn.allocate(spec, 2, "cuda")
    for _ in range(2):  # the second prompt chunk starts from a state
        expected = gdn.chunk(*rows, weights, mine, slots, n_rows, spec)
        got = gdn.chunk(*on("cuda", *rows), dweights, theirs, *on("cuda", slots, n_rows), spec)
        assert torch.allclose(got.cpu()[0], expected[0], atol=2e-5)
        assert torch.allclose(got.cpu()[1, :171], expected[1, :171], atol=2e-5)
        assert torch.allclose(theirs.state.cpu(), mine.state, atol=5e-5)
        assert torch.equal(gdn.tails(theirs, slots.cuda()).cpu(), gdn.tails(mine, slots))


def test_a_step_can_be_captured():
    """One graph of all narrow kernels, replayed with other positions and counts, equals eager launches."""
    from cases.comparing import on, random
    from cases.gdn import gdn_rows, gdn_setup

    from ggufspec.kernels import attention, gdn, norm, rope, select
    from ggufspec.kernels import kv as kvs

    spec, weights = gdn_setup(True)
    weights = gdn.GdnWeights(*on("cuda", weights.conv, weights.dt, weights.a))
    W, H, n_kv, hd = 4, 24, 4, 256
    ropes, mask = rope.RopeSpec(64), attention.AttentionSpec(hd**-0.5)
    q, k, v = (random(1, W, n, hd).cuda() for n in (H, n_kv, n_kv))
    rows = [x[:1].cuda() for x in gdn_rows(spec, W)]
    weight, head_norm, z = random(hd).cuda(), random(spec.d).cuda(), random(1, W, spec.n_v * spec.d).cuda()
    slots, n_rows = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), W, device="cuda")

    def step(kv, state, n_past, n):
        positions = n_past[:, None] + torch.arange(W, device="cuda")
        cos, sin = rope.tables(positions, ropes)
        turned = kvs.norm_rope_store(kv, q, k, v, slots, positions, (weight, weight, 1e-6), (cos, sin, ropes))
        o = attention.attend(turned, kv, slots, n_past, n_rows, mask, q_rotated=True)
        u, alpha, beta = rows
        r = gdn.step_prepared(u, z, alpha, beta, weights, head_norm, 1e-6, state, slots, n_rows, spec).rows.float()
        gdn.accept(state, slots, n)
        normed = norm.add_rms_norm(o.flatten(2), o.flatten(2), torch.ones(H * hd, device="cuda"), 1e-6)[1]
        logits = torch.cat((normed, r.view(1, W, -1)), -1)
        return logits, select.argmax(logits), select.top_k(logits, 10)[1]

    def fresh():
        return kvs.allocate("q8_0", "q8_0", 1, 2048, n_kv, hd, hd, "cuda"), gdn.allocate(spec, 1, "cuda")

    n_past, n = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    kv, state = fresh()
    step(kv, state, n_past, n)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(kv, state, n_past, n)
    for t in (kv.k, kv.v, state.state, state.shared, state.window_u):
        t.zero_()
    eager_kv, eager_state = fresh()
    past = 0
    for accepted in (4, 1, 0, 3, 2):
        n_past.fill_(past), n.fill_(accepted)
        graph.replay()
        expected = step(eager_kv, eager_state, n_past, n)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected))
        past += accepted
