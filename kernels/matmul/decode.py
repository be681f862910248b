"""Blocks of file bytes to float32, one decoder per tensor type, in torch on any device: every kernel's oracle.

A decoder takes uint8 `b` [..., block_bytes] and returns float32 [..., block_elements]. All arithmetic is float32
in the order the format defines. Source: the GGUF block formats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ggufspec.quant import layouts

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [..., 1]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).float()


def nibbles(b: Tensor) -> Tensor:
    """Bytes [..., n] to [..., 2, n]: low halves, then high halves."""
    return torch.stack((b & 15, b >> 4), -2)


def bits(b: Tensor, n: int) -> Tensor:
    """Bytes [..., n_bytes] to their n lowest bits [..., n, n_bytes], lowest first."""
    return (b.unsqueeze(-2) >> torch.arange(n, device=b.device, dtype=torch.uint8).unsqueeze(-1)) & 1


def fifth_bit(b: Tensor, at: int) -> Tensor:
    """32 bits at byte `at`, bit e for element e, as 0 or 16: uint8 [..., 32]."""
    return bits(b[..., at : at + 4], 8).transpose(-1, -2).flatten(-2) << 4


def six_bit_pairs(s: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 scale bytes of Q4_K and Q5_K to (scales, mins), uint8 [..., 8] each, 0..63."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), -1)
    low = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), -1)
    return scale, low


def _q8_0(b: Tensor) -> Tensor:
    return half(b, 0) * b[..., 2:34].contiguous().view(torch.int8).float()


def _q4_0(b: Tensor) -> Tensor:
    return half(b, 0) * (nibbles(b[..., 2:18]).flatten(-2).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return half(b, 0) * nibbles(b[..., 4:20]).flatten(-2).float() + half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return half(b, 0) * ((nibbles(b[..., 6:22]).flatten(-2) | fifth_bit(b, 2)).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return half(b, 0) * (nibbles(b[..., 8:24]).flatten(-2) | fifth_bit(b, 4)).float() + half(b, 2)


def _iq4_table(q: Tensor) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=q.device)[q.long()]


def _iq4_nl(b: Tensor) -> Tensor:
    return half(b, 0) * _iq4_table(nibbles(b[..., 2:18]).flatten(-2))


def two_bits(b: Tensor) -> Tensor:
    """Bytes [..., 32 n] to 2-bit fields [..., 128 n]: element 128 n + 32 r + l is field r of byte 32 n + l."""
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).unsqueeze(-1)
    return ((b.unflatten(-1, (-1, 1, 32)) >> shift) & 3).flatten(-3)


def _q2_k(b: Tensor) -> Tensor:
    q = two_bits(b[..., 16:80]).unflatten(-1, (16, 16)).float()
    scale, low = (b[..., 0:16] & 15).float(), (b[..., 0:16] >> 4).float()
    return ((half(b, 80) * scale).unsqueeze(-1) * q - (half(b, 82) * low).unsqueeze(-1)).flatten(-2)


def q3_k_scales(b: Tensor) -> Tensor:
    """Sixteen 6-bit scales of Q3_K, 0..63 (value 32 means zero)."""
    low = nibbles(b[..., 96:104]).flatten(-2)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).unsqueeze(-1)
    return low | (((b[..., 104:108].unsqueeze(-2) >> shift) & 3).flatten(-2) << 4)


def _q3_k(b: Tensor) -> Tensor:
    high = bits(b[..., 0:32], 8).flatten(-2)
    q = two_bits(b[..., 32:96]).float() - 4 + 4 * high.float()
    scale = half(b, 108) * (q3_k_scales(b).float() - 32)
    return (scale.unsqueeze(-1) * q.unflatten(-1, (16, 16))).flatten(-2)


def _q4_k(b: Tensor) -> Tensor:
    scale, low = six_bit_pairs(b[..., 4:16])
    q = nibbles(b[..., 16:144].unflatten(-1, (4, 32))).flatten(-3, -2).float()
    scale, low = half(b, 0) * scale.float(), half(b, 2) * low.float()
    return (scale.unsqueeze(-1) * q - low.unsqueeze(-1)).flatten(-2)


def _q5_k(b: Tensor) -> Tensor:
    scale, low = six_bit_pairs(b[..., 4:16])
    q = nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-3, -2) | (bits(b[..., 16:48], 8) << 4)
    q = q.float()
    scale, low = half(b, 0) * scale.float(), half(b, 2) * low.float()
    return (scale.unsqueeze(-1) * q - low.unsqueeze(-1)).flatten(-2)


def _q6_k(b: Tensor) -> Tensor:
    low = nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-3)
    q = (low | (two_bits(b[..., 128:192]) << 4)).float() - 32
    scale = half(b, 208) * b[..., 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(-1) * q.unflatten(-1, (16, 16))).flatten(-2)


def iq4_xs_scales(b: Tensor) -> Tensor:
    """Eight 6-bit scales of IQ4_XS, 0..63 (value 32 means zero)."""
    low = nibbles(b[..., 4:8]).transpose(-1, -2).flatten(-2)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)
    return low | (((b[..., 2:4].unsqueeze(-1) >> shift) & 3).flatten(-2) << 4)


def _iq4_xs(b: Tensor) -> Tensor:
    scale = half(b, 0) * (iq4_xs_scales(b).float() - 32)
    q = nibbles(b[..., 8:136].unflatten(-1, (8, 16))).flatten(-2)
    return (scale.unsqueeze(-1) * _iq4_table(q)).flatten(-2)


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda b: b.contiguous().view(torch.float32),
    "F16": lambda b: b.contiguous().view(torch.float16).float(),
    "BF16": lambda b: b.contiguous().view(torch.bfloat16).float(),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def decode(raw: Tensor, type_name: str) -> Tensor:
    """File rows uint8 [R, row_bytes] to float32 [R, columns], on `raw`'s device."""
    layout = layouts.BY_NAME[type_name]
    if layout.n_elements == 1:
        return DECODERS[type_name](raw)
    return DECODERS[type_name](raw.unflatten(-1, (-1, layout.n_bytes))).flatten(-2)
