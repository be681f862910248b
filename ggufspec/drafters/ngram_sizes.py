"""The numbers that n-gram drafters take, with llama.cpp's defaults."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NgramSizes:
    """`--spec-ngram-simple/-map-k/-map-k4v-size-n, -size-m, -min-hits`."""

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1


@dataclass(frozen=True)
class ModSizes:
    """`--spec-ngram-mod-n-match, -n-min, -n-max`."""

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64
