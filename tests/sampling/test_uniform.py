"""The counter-based random numbers: known values, one law for tensors and integers, and statistics."""

import numpy as np
import pytest
import torch

from ggufspec.sampling.uniform import (
    GAMMA,
    mix64,
    stream_key,
    stream_keys,
    uniform,
    uniform_of_keys,
    uniform_scalar,
)

from . import reference


def looks_uniform(u):
    """Kolmogorov-Smirnov: sqrt(n) * the largest gap to the diagonal stays below 2.23 but once in 10,000
    tries.
    """
    u = np.sort(u)
    steps = np.arange(len(u) + 1) / len(u)
    gap = max(np.abs(u - steps[1:]).max(), np.abs(u - steps[:-1]).max())
    return 0 <= u[0] and u[-1] < 1 and gap * len(u) ** 0.5 < 2.23


def correlation(a, b):
    return abs(np.corrcoef(a, b)[0, 1])


def test_splitmix64_known_values():
    # the published first outputs of SplitMix64 started at 0 and at 1234567
    assert [mix64(GAMMA * (i + 1)) for i in range(3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # fmt: skip
    assert mix64(1234567 + GAMMA) == 6457827717110365317


def test_tensor_integer_and_reference_agree():
    seeds = torch.tensor([0, 1, 42, 4294967294, 2**40, -5])
    positions = torch.tensor([0, 1, 7, 262143, 2**31, 9])
    for stream in range(4):
        got = uniform(seeds, positions, stream).tolist()
        pairs = list(zip(seeds.tolist(), positions.tolist()))
        assert got == [uniform_scalar(s, n, stream) for s, n in pairs]
        assert got == [reference.uniform(s, n, stream) for s, n in pairs]
        assert stream_keys(seeds, stream).tolist() == [stream_key(s, stream) for s in seeds.tolist()]


def test_depends_on_nothing_else():
    keys = stream_keys(torch.arange(64))
    positions = torch.arange(64) * 3
    together = uniform_of_keys(keys, positions)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(uniform_of_keys(keys[order], positions[order]), together[order])
    assert torch.equal(uniform_of_keys(keys[5:6], positions[5:6]), together[5:6])


@pytest.mark.parametrize("seed", [0, 1, 2, 4294967294])
def test_uniform_along_positions(seed):
    u = uniform(torch.full((100_000,), seed), torch.arange(100_000)).numpy()
    assert looks_uniform(u)
    assert correlation(u[:-1], u[1:]) < 0.015


def test_neighbouring_seeds_and_streams_are_unrelated():
    n = torch.arange(50_000)
    base = uniform(torch.full_like(n, 7), n).numpy()
    for other in (uniform(torch.full_like(n, 8), n), uniform(torch.full_like(n, 7), n, 1)):
        assert correlation(base, other.numpy()) < 0.02
    across_seeds = uniform(n, torch.full_like(n, 12)).numpy()
    assert looks_uniform(across_seeds)


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seeds, positions = torch.arange(1000) * 7919, torch.arange(1000) * 31
    for stream in range(4):
        assert torch.equal(uniform(seeds.cuda(), positions.cuda(), stream).cpu(), uniform(seeds, positions, stream))
