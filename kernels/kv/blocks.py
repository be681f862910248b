"""Row formats of the KV cache: encoders and decoders in PyTorch, the oracle of the Triton kernels.

A quantized row holds the bytes of the file format's blocks, each field of all blocks together, so that a
kernel reads whole words:

    | qs of every block | qh of every block | d of every block | m of every block |

Rounding follows llama.cpp's CPU code for cache rows: plain searches without an importance matrix; q8_0 rounds
ties to even with the inverse scale 127 / amax; iq4_nl makes a single pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ggufspec.errors import ConfigError
from ggufspec.quant.layouts import BY_NAME, Layout

BLOCK = 32
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Fields:
    """One quantized block type: bytes of each field of a block of 32 elements. d and m are halves."""

    qs: int
    qh: int
    m: int
    encode: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # x [.., 32] to (codes uint8 [.., 32], d, m)
    decode: Callable[[Tensor, Tensor, Tensor], Tensor]  # (codes, d [.., 1], m [.., 1]) float32 to values

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of qs, qh, d, m."""
        return self.qs, self.qh, 2, self.m


def inverse(x: Tensor) -> Tensor:
    """1 / x, 0 where x is 0."""
    return torch.where(x == 0, torch.zeros_like(x), 1.0 / x)


def signed_extreme(x: Tensor) -> Tensor:
    """[.., 32] to [.., 1]: the value of the largest magnitude, the first on ties."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def encode_q8_0(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.zeros_like(amax), 127.0 / amax)
    q = torch.round(x * scale).to(torch.int8).view(torch.uint8)
    return q, amax / 127.0, torch.zeros_like(amax)


def encode_symmetric(n: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q4_0 (n = 8) and q5_0 (n = 16): codes 0 .. 2n - 1 around n."""

    def encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = signed_extreme(x) / -float(n)
        codes = (x * inverse(d) + (n + 0.5)).trunc().clamp(max=2 * n - 1)
        return codes.to(torch.uint8), d, torch.zeros_like(d)

    return encode


def encode_affine(n: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q4_1 (n = 15) and q5_1 (n = 31): codes 0 .. n from the minimum."""

    def encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        d = (high - low) / float(n)
        codes = ((x - low) * inverse(d) + 0.5).trunc().clamp(max=n)
        return codes.to(torch.uint8), d, low

    return encode


def nearest_iq4_nl(x: Tensor) -> Tensor:
    """Index of the nearest table value; the upper one when equally near."""
    table = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=x.device)
    upper = torch.searchsorted(table, x.contiguous(), right=True).clamp(1, 15)
    below = x - table[upper - 1] < table[upper] - x
    return torch.where(below, upper - 1, upper)


def encode_iq4_nl(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    extreme = signed_extreme(x)
    zero = extreme.abs() < 1e-15
    codes = nearest_iq4_nl(x * inverse(extreme / float(IQ4_NL_VALUES[0])))
    q = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=x.device)[codes]
    weight = x * x
    qx, qq = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for j in range(BLOCK):  # sums in index order
        w, qj = weight[..., j : j + 1], q[..., j : j + 1]
        qx = qx + w * qj * x[..., j : j + 1]
        qq = qq + w * qj * qj
    d = torch.where(zero, torch.zeros_like(extreme), qx / qq)
    codes = torch.where(zero, torch.zeros_like(codes), codes)
    return codes.to(torch.uint8), d, torch.zeros_like(extreme)


def decode_q8_0(codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return d * codes.view(torch.int8).float()


def decode_iq4_nl(codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return d * torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=codes.device)[codes.long()]


BLOCKS: dict[str, Fields] = {
    "q8_0": Fields(32, 0, 0, encode_q8_0, decode_q8_0),
    "q4_0": Fields(16, 0, 0, encode_symmetric(8), lambda q, d, m: d * (q.float() - 8.0)),
    "q4_1": Fields(16, 0, 2, encode_affine(15), lambda q, d, m: d * q.float() + m),
    "q5_0": Fields(16, 4, 0, encode_symmetric(16), lambda q, d, m: d * (q.float() - 16.0)),
    "q5_1": Fields(16, 4, 2, encode_affine(31), lambda q, d, m: d * q.float() + m),
    "iq4_nl": Fields(16, 0, 0, encode_iq4_nl, decode_iq4_nl),
}
PLAIN: dict[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TYPES = (*PLAIN, *BLOCKS)


def layout_of(type_name: str) -> Layout:
    """The file format's layout. Raises ConfigError for a type that no cache can have."""
    if type_name not in TYPES:
        raise ConfigError(f"cache type {type_name!r} is not known; choose one of {', '.join(TYPES)}")
    return BY_NAME[type_name.upper()]


def encode(x: Tensor, type_name: str) -> Tensor:
    """x [.., hd] float32 to cache rows: [.., hd] of a plain type or uint8 [.., row_bytes]."""
    if type_name in PLAIN:
        return x.to(PLAIN[type_name])
    fields = BLOCKS[type_name]
    lead, n_blocks = x.shape[:-1], x.shape[-1] // BLOCK
    codes, d, m = fields.encode(x.float().reshape(*lead, n_blocks, BLOCK))
    parts = [codes if fields.qs == BLOCK else (codes[..., :16] & 15) | (codes[..., 16:] & 15) << 4]
    if fields.qh:  # bit e of a block's 32-bit word is bit 4 of element e
        bits = (codes >> 4).to(torch.int32).reshape(*lead, n_blocks, 4, 8)
        parts.append((bits << torch.arange(8, dtype=torch.int32, device=x.device)).sum(-1).to(torch.uint8))
    parts.append(d.half().view(torch.uint8))
    if fields.m:
        parts.append(m.half().view(torch.uint8))
    return torch.cat([part.reshape(*lead, -1) for part in parts], -1)


def decode(row: Tensor, type_name: str, hd: int) -> Tensor:
    """Cache rows of head size hd to float32 [.., hd]."""
    if type_name in PLAIN:
        return row.float()
    fields = BLOCKS[type_name]
    lead, n_blocks = row.shape[:-1], hd // BLOCK
    qs, qh, d, m = row.split([n_blocks * size for size in fields.sizes], -1)
    codes = qs.reshape(*lead, n_blocks, fields.qs)
    if fields.qs != BLOCK:
        codes = torch.cat((codes & 15, codes >> 4), -1)
    if fields.qh:
        words = qh.reshape(*lead, n_blocks, 4, 1)
        bits = words >> torch.arange(8, dtype=torch.uint8, device=row.device) & 1
        codes = codes | bits.reshape(*lead, n_blocks, BLOCK) << 4
    scale = halves(d).unsqueeze(-1)
    low = halves(m).unsqueeze(-1) if fields.m else scale
    return fields.decode(codes.contiguous(), scale, low).reshape(*lead, hd)


def halves(raw: Tensor) -> Tensor:
    """uint8 [.., 2n] to float32 [.., n]."""
    return raw.contiguous().view(torch.float16).float()


def to_file_blocks(row: Tensor, type_name: str, hd: int) -> Tensor:
    """Quantized cache rows to the file format's bytes, block after block: uint8 [.., row_bytes]."""
    fields = BLOCKS[type_name]
    n_blocks = hd // BLOCK
    parts = row.split([n_blocks * size for size in fields.sizes], -1)
    qs, qh, d, m = (part.reshape(*row.shape[:-1], n_blocks, -1) for part in parts)
    return torch.cat((d, m, qh, qs), -1).reshape(*row.shape[:-1], -1)
