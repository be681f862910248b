"""The device path on a GPU: the CPU's tokens, any batch, and inside a CUDA graph."""

from dataclasses import replace

import pytest
import torch

from ggufspec.sampling import RowParams, SamplingParams, device, sample_rows

pytestmark = pytest.mark.gpu

N_VOCAB = 50_021
PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.0),
    SamplingParams(seed=3, top_k=0, temperature=1.7, top_p=0.9),
    SamplingParams(seed=4, top_k=5, min_p=0.0, top_p=1.0, temperature=2.0),
    SamplingParams(seed=5, repeat_penalty=1.3, presence_penalty=0.5, repeat_last_n=40),
    SamplingParams(seed=6, temperature=0.0, frequency_penalty=0.7),
    SamplingParams(seed=7, typical_p=0.6),
    SamplingParams(seed=8, logit_bias=((7, 4.0), (9, -float("inf")))),
]


def rows(n):
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(n, N_VOCAB, generator=generator) * 4
    positions = torch.randint(0, 10**6, (n,), generator=generator)
    histories = torch.randint(0, 300, (n, 64), generator=generator).tolist()
    return logits, positions, histories, [replace(PARAMS[i % len(PARAMS)], seed=i) for i in range(n)]


def test_equals_the_cpu_in_any_batch():
    logits, positions, histories, params = rows(128)
    here = sample_rows(logits, params, positions, histories=histories).tokens
    there = sample_rows(logits.cuda(), params, positions.cuda(), histories=histories).tokens
    assert torch.equal(here, there.cpu())
    for part in (slice(0, 1), slice(3, 4), slice(5, 40), slice(64, 128)):
        some = sample_rows(logits[part].cuda(), params[part], positions[part].cuda(), histories=histories[part])
        assert torch.equal(some.tokens, there[part])


def test_masks():
    logits, positions, histories, params = rows(32)
    mask = torch.rand(32, N_VOCAB, generator=torch.Generator().manual_seed(1)) < 0.2
    here = sample_rows(logits, params, positions, histories=histories, masks=mask).tokens
    there = sample_rows(logits.cuda(), params, positions.cuda(), histories=histories, masks=mask.cuda()).tokens
    assert torch.equal(here, there.cpu())


def test_a_captured_graph_serves_other_rows_and_parameters():
    logits, positions, histories, params = rows(16)
    params = [p for p in params if p.on_device and p.top_k]
    n = len(params)

    def of(params, flip):
        order = list(reversed(range(n))) if flip else list(range(n))
        return (
            logits[order].cuda(), positions[order].cuda(), torch.tensor([histories[i] for i in order]).cuda(),
            RowParams.of([params[i] for i in order], "cuda", N_VOCAB),
        )  # fmt: skip

    buffers = of(params, False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            device.sample(buffers[0], buffers[3], buffers[1], 64, buffers[2])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = device.sample(buffers[0], buffers[3], buffers[1], 64, buffers[2]).tokens
    for flip in (False, True):
        fresh = of(params, flip)
        for buffer, value in zip(buffers, fresh):
            buffer.copy_(value)
        graph.replay()
        eager = device.sample(fresh[0], fresh[3], fresh[1], 64, fresh[2]).tokens
        assert torch.equal(out, eager)
