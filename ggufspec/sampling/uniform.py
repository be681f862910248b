"""The random number of a token: a pure function of (seed, position, stream).

There is no generator object and no state. A sequence's stream of numbers is SplitMix64 started at
`stream_key(seed, stream)`; the token that will stand at position n of the sequence (0-based, prompt
included) takes its n-th output. So batching, drafting, slots and restarts cannot change a stream: whoever
samples position n of a sequence with this seed gets this number.

    key = mix64(seed + GAMMA * (stream + 1))         mix64: Stafford's variant 13, as in SplitMix64
    z   = mix64(key + GAMMA * (position + 1))        all modulo 2**64
    u   = (z >> 11) * 2**-53                         in [0, 1)

Streams keep the draws of one position apart: `CHOICE` picks the token, `XTC` decides whether xtc fires;
`CHOICE_MASKED` and `XTC_MASKED` serve the second pass that follows a grammar's rejection.

Integer operations only until the last conversion, which is exact: CPU and CUDA give the same bits.
"""

from __future__ import annotations

from torch import Tensor

from ggufspec.kernels.draw.plain import mix, uniform_of_keys

CHOICE, XTC, CHOICE_MASKED, XTC_MASKED = 0, 1, 2, 3

GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    """The int64 with the same 64 bits (torch has no arithmetic on uint64)."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def mix64(x: int) -> int:
    """SplitMix64's finalizer on a Python integer, modulo 2**64."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def stream_key(seed: int, stream: int = CHOICE) -> int:
    """Start of the stream as a signed 64-bit integer, ready for a tensor."""
    return _signed(mix64(seed + GAMMA * (stream + 1)))


def stream_keys(seeds: Tensor, stream: int = CHOICE) -> Tensor:
    """`stream_key` for a tensor of seeds (int64, any shape)."""
    return mix(seeds + _signed(GAMMA * (stream + 1)))


def uniform(seeds: Tensor, positions: Tensor, stream: int = CHOICE) -> Tensor:
    """float64 in [0, 1) for seeds and positions (int64, same shape or broadcast)."""
    return uniform_of_keys(stream_keys(seeds, stream), positions)


def uniform_scalar(seed: int, position: int, stream: int = CHOICE) -> float:
    """The same number for Python integers."""
    z = mix64(stream_key(seed, stream) + GAMMA * (position + 1))
    return (z >> 11) * 2.0**-53
