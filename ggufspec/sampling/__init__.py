"""Sampling: llama.cpp's chain, with random numbers that depend on (seed, position) and nothing else.

`sample_rows` serves any request; `device` is the part a captured CUDA graph can hold. See docs/sampling.md.
"""

from ggufspec.sampling.bind import Vocabulary, bind
from ggufspec.sampling.chain import SamplerState
from ggufspec.sampling.device import RowParams
from ggufspec.sampling.params import (
    DEFAULT_CHAIN,
    RANDOM_SEED,
    BoundParams,
    SamplingParams,
    sampler_letters,
    sampler_names,
)
from ggufspec.sampling.rows import SampledRows, sample_rows
from ggufspec.sampling.uniform import uniform

__all__ = [
    "DEFAULT_CHAIN",
    "RANDOM_SEED",
    "BoundParams",
    "RowParams",
    "SampledRows",
    "SamplerState",
    "SamplingParams",
    "Vocabulary",
    "bind",
    "sample_rows",
    "sampler_letters",
    "sampler_names",
    "uniform",
]
