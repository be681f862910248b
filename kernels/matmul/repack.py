"""File blocks to the arrays the CUDA kernels read, and back to the same bytes; torch on any device.

Columns are handled in super-blocks of 256 (K padded with zero blocks). Inside one, a column's place is

    element = 128 h + 32 c + 4 t + i     h 0..1, c 0..3, t 0..7, i 0..3
    place   =  32 t + 8 c + 2 i + h

so that a lane c of a tensor-core fragment owns the 32-element sub-blocks c and c + 4 and nothing else, and two
neighbouring places (h = 0, 1) are one float16 pair. Activations stand in the same order (`order`). Every array is
[S, rows, n]: super-block, row, words of 32 bits, so that a tile of rows is one contiguous piece.

    low    2 bits: as `high` of two bits
           4 bits: word (t, c), quant (i, h) at bit 16 h + 4 i.
                                                        32 words at 16 (t div 4) + 4 c + t mod 4
           8 bits: words (t, c, i div 2), byte 2 h + i mod 2.
                                                        64 words at 16 (t div 2) + 4 c + 2 (t mod 2) + i div 2
    high   1 bit:  word (c, t div 4), quant (t mod 4, i, h)
                   at bit 16 h + 8 (t div 2 mod 2) + 4 (i mod 2) + 2 (t mod 2) + i div 2.
                                                        8 words at 2 c + t div 4
           2 bits: word (c, t div 2), quant (t mod 2, i, h) at bit 16 h + 8 (t mod 2) + 4 (i mod 2) + 2 (i div 2).
                                                        16 words at 4 c + t div 2
           16 bits: word (t, c, i), element h at bit 16 h.
                                                        128 words at 16 t + 4 c + i
    scale  word c, see `Form`                           4 words

Scales in float16 are stored times 2^shift (exact: shift >= 0), chosen so that the kernel's products stay normal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ggufspec.kernels.matmul import decode
from ggufspec.kernels.matmul.quants import join_nibbles, put_quants, quants_of, weighted
from ggufspec.quant import layouts

BLOCK = 256
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """How one tensor type is held for the kernels.

    low, high: bits a quant has in either array. scale: `six_bit` (6-bit scale and minimum pairs of sub-blocks c and
    c + 4 at bits 0 and 6 of each half, and a nibble of the block's float16 d and dmin at bit 12), `int8` (bytes for
    the 16-groups 2c, 2c+8, 2c+1, 2c+9, plus 128; `d` float16 beside), `half` (the float16 pair of c and c + 4),
    `half_min` (the same, and `min` with the pair of minima), `half_table` (`half`, quants are places in the table of
    `decode`), `six_table` (likewise; 6-bit scales plus 32 at bit 0 of each half, a nibble of d at bit 12), `nibbles`
    (bytes as `int8`'s, scale low and minimum high; `d` the block's float16 d and dmin), `none` and `bf16` (16-bit
    floats, no scales). offset: what a stored quant, or a table's value plus 128, exceeds its value by.
    """

    low: int
    high: int
    scale: str
    offset: int


FORMS: dict[str, Form] = {
    "Q4_0": Form(4, 0, "half", 8),
    "Q4_1": Form(4, 0, "half_min", 0),
    "Q5_0": Form(4, 1, "half", 16),
    "Q5_1": Form(4, 1, "half_min", 0),
    "Q8_0": Form(8, 0, "half", 128),
    "Q4_K": Form(4, 0, "six_bit", 0),
    "Q5_K": Form(4, 1, "six_bit", 0),
    "Q6_K": Form(4, 2, "int8", 32),
    "IQ4_NL": Form(4, 0, "half_table", 128),
    "IQ4_XS": Form(4, 0, "six_table", 128),
    "Q3_K": Form(2, 1, "int8", 4),
    "Q2_K": Form(2, 0, "nibbles", 0),
    "F16": Form(16, 0, "none", 0),
    "BF16": Form(16, 0, "bf16", 0),
}

LARGEST_QUANT_SCALE = {
    "six_bit": 63, "int8": 128, "half": 1, "half_min": 1, "half_table": 1, "six_table": 32, "nibbles": 15,
}  # fmt: skip


def order(x: Tensor) -> Tensor:
    """Columns [..., S * 256] from file order to the kernels' order."""
    return x.unflatten(-1, (-1, 2, 4, 8, 4)).movedim(-4, -1).transpose(-4, -3).flatten(-5)


def disorder(x: Tensor) -> Tensor:
    """The inverse of `order`."""
    return x.unflatten(-1, (-1, 8, 4, 4, 2)).transpose(-4, -3).movedim(-1, -4).flatten(-5)


def n_super_blocks(n_columns: int) -> int:
    return -(-n_columns // BLOCK)


def blocks_of(raw: Tensor, type_name: str) -> Tensor:
    """File rows uint8 [R, row_bytes] to blocks [R, S, n, block_bytes], n blocks to a super-block, zeros appended."""
    layout = layouts.BY_NAME[type_name]
    b = raw.unflatten(-1, (-1, layout.n_bytes))
    n = BLOCK // layout.n_elements
    missing = -b.shape[-2] % n
    if missing:
        b = functional.pad(b, (0, 0, 0, missing))
    return b.unflatten(-2, (-1, n))


# ---- quants to words and back


def _as_words(b: Tensor) -> Tensor:
    """Bytes [..., n, 4] to int32 [..., n]."""
    return b.contiguous().view(torch.int32).squeeze(-1)


def _as_bytes(w: Tensor) -> Tensor:
    """int32 [..., n] to bytes [..., n, 4]."""
    return w.unsqueeze(-1).contiguous().view(torch.uint8)


def low_words(q: Tensor, n_bits: int) -> Tensor:
    """Quants [R, S, 256] to their low bits' words [R, S, 8 * n_bits]."""
    if n_bits == 2:
        return high_words(q & 3, 2)
    q = q.unflatten(-1, (2, 4, 8, 2, 2))  # h c t i/2 i%2
    if n_bits == 4:
        b = (q[..., 0] & 15) | (q[..., 1] << 4)  # h c t i/2
        w = _as_words(b.movedim(-4, -2).flatten(-2))  # c t
        return w.unflatten(-1, (2, 4)).movedim(-2, -3).flatten(-3)
    w = _as_words(q.movedim(-5, -2).flatten(-2))  # c t i/2
    return w.unflatten(-2, (4, 2)).movedim(-3, -4).flatten(-4)


def low_quants(w: Tensor, n_bits: int) -> Tensor:
    """The inverse of `low_words`: [R, S, 256]."""
    if n_bits == 2:
        return high_quants(w, 2)
    if n_bits == 4:
        b = _as_bytes(w.unflatten(-1, (2, 4, 4)).movedim(-3, -2).flatten(-2))  # c t byte
        b = b.unflatten(-1, (2, 2)).movedim(-2, -4)  # h c t i/2
        return torch.stack((b & 15, b >> 4), -1).flatten(-5)
    b = _as_bytes(w.unflatten(-1, (4, 4, 2, 2)).movedim(-4, -3).flatten(-3, -2))  # c t i/2 byte
    return b.unflatten(-1, (2, 2)).movedim(-2, -5).flatten(-5)


def high_words(q: Tensor, n_bits: int) -> Tensor:
    """The n_bits of quants' high parts [R, S, 256] to words [R, S, 8 * n_bits]."""
    h = q.unflatten(-1, (2, 4, 2, 2, 2, 2, 2))  # h c t/4 t/2%2 t%2 i/2 i%2
    if n_bits == 1:
        b = weighted(h.transpose(-2, -3).flatten(-3), (0, 4, 2, 6, 1, 5, 3, 7))  # h c t/4 t/2%2
        return _as_words(b.movedim(-4, -2).flatten(-2)).flatten(-2)
    b = weighted(h.flatten(-2), (0, 4, 2, 6))  # h c t/4 t/2%2 t%2
    return _as_words(b.movedim(-5, -2).flatten(-2)).flatten(-3)


def high_quants(w: Tensor, n_bits: int) -> Tensor:
    """The inverse of `high_words`: [R, S, 256]."""
    if n_bits == 1:
        b = _as_bytes(w.unflatten(-1, (4, 2))).unflatten(-1, (2, 2)).movedim(-2, -4)  # h c t/4 t/2%2
        shift = torch.tensor((0, 4, 2, 6, 1, 5, 3, 7), dtype=torch.uint8, device=w.device)
        h = ((b.unsqueeze(-1) >> shift) & 1).unflatten(-1, (2, 2, 2)).transpose(-2, -3)
    else:
        b = _as_bytes(w.unflatten(-1, (4, 2, 2))).unflatten(-1, (2, 2)).movedim(-2, -5)  # h c t/4 t/2%2 t%2
        shift = torch.tensor((0, 4, 2, 6), dtype=torch.uint8, device=w.device)
        h = ((b.unsqueeze(-1) >> shift) & 3).unflatten(-1, (2, 2))
    return h.flatten(-7)


def float_words(raw: Tensor) -> Tensor:
    """Rows of 16-bit floats uint8 [R, 2 K] to words [R, S, 128]."""
    x = raw.contiguous().view(torch.int16)
    x = functional.pad(x, (0, -x.shape[1] % BLOCK))
    return order(x).contiguous().view(torch.int32).unflatten(-1, (-1, BLOCK // 2))


def float_bytes(w: Tensor, n_columns: int) -> Tensor:
    """The inverse of `float_words`."""
    x = disorder(w.flatten(1).contiguous().view(torch.int16))
    return x[:, :n_columns].contiguous().view(torch.uint8)


# ---- scales to words and back


def _halves(x: Tensor) -> Tensor:
    """int32 [R, S, 8] 16-bit values of sub-blocks to words [R, S, 4] of pairs (c, c + 4)."""
    return x.to(torch.int16).unflatten(-1, (2, 4)).transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1)


def _unhalves(w: Tensor) -> Tensor:
    """The inverse of `_halves`: int32 0..65535."""
    h = w.unsqueeze(-1).contiguous().view(torch.int16).transpose(-1, -2).flatten(-2)
    return h.to(torch.int32) & 0xFFFF


def _half_bits(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float16 [...]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _scaled(d: Tensor, shift: int) -> Tensor:
    """float16 d times 2^shift, exact while it fits, as its bits in int32."""
    return (d.float() * 2.0**shift).half().view(torch.int16).to(torch.int32) & 0xFFFF


def _unscaled(bits: Tensor, shift: int) -> Tensor:
    """The inverse of `_scaled`: float16."""
    return (bits.to(torch.int16).view(torch.float16).float() * 2.0**-shift).half()


def six_bit_words(b: Tensor, shift: int) -> Tensor:
    """Scale words of Q4_K and Q5_K blocks [R, S, bytes]: [R, S, 4]."""
    scale, low = (x.to(torch.int32) for x in decode.six_bit_pairs(b[..., 4:16]))
    d = _scaled(_half_bits(b, 0), shift)
    dmin = _half_bits(b, 2).view(torch.int16).to(torch.int32) & 0xFFFF
    at = torch.arange(4, device=b.device, dtype=torch.int32) * 4
    nibble = (torch.stack((d, dmin), -1).unsqueeze(-1) >> at) & 15  # [R, S, 2, 4]
    return _halves(scale | (low << 6) | (nibble.flatten(-2) << 12))


def put_six_bit(w: Tensor, b: Tensor, shift: int) -> None:
    """Write scale words back into the blocks' first 16 bytes."""
    x = _unhalves(w)
    scale, low = x & 63, (x >> 6) & 63
    at = torch.arange(4, device=b.device, dtype=torch.int32) * 4
    d = ((x >> 12).unflatten(-1, (2, 4)) << at).sum(-1)
    b[..., 0:2] = _unscaled(d[..., 0], shift).unsqueeze(-1).view(torch.uint8)
    b[..., 2:4] = d[..., 1].to(torch.int16).unsqueeze(-1).view(torch.uint8)
    s0, s1, m0, m1 = scale[..., :4], scale[..., 4:], low[..., :4], low[..., 4:]
    packed = torch.cat((s0 | ((s1 >> 4) << 6), m0 | ((m1 >> 4) << 6), (s1 & 15) | ((m1 & 15) << 4)), -1)
    b[..., 4:16] = packed.to(torch.uint8)


def group_words(s: Tensor) -> Tensor:
    """Bytes of 16-groups [R, S, 16] to words [R, S, 4] of groups (2c, 2c + 8, 2c + 1, 2c + 9)."""
    return _as_words(s.unflatten(-1, (2, 4, 2)).permute(0, 1, 3, 4, 2).flatten(-2))


def group_bytes(w: Tensor) -> Tensor:
    """The inverse of `group_words`."""
    return _as_bytes(w).unflatten(-1, (2, 2)).permute(0, 1, 4, 2, 3).flatten(-3)


def int8_words(b: Tensor, type_name: str) -> Tensor:
    """Scale words of Q6_K and Q3_K blocks [R, S, bytes]: [R, S, 4], scales plus 128."""
    return group_words(b[..., 192:208] ^ 128 if type_name == "Q6_K" else decode.q3_k_scales(b) + 96)


def put_int8(w: Tensor, b: Tensor, type_name: str) -> None:
    s = group_bytes(w)
    if type_name == "Q6_K":
        b[..., 192:208] = s ^ 128
        return
    s = s - 96
    b[..., 96:104] = join_nibbles(s.unflatten(-1, (2, 8)))
    b[..., 104:108] = weighted((s >> 4).unflatten(-1, (4, 4)).transpose(-1, -2), (0, 2, 4, 6))


def six_table_words(b: Tensor, shift: int) -> Tensor:
    """Scale words of IQ4_XS blocks [R, S, 136]: [R, S, 4]."""
    d = _scaled(_half_bits(b, 0), shift)
    at = torch.arange(4, device=b.device, dtype=torch.int32) * 4
    nibble = functional.pad((d.unsqueeze(-1) >> at) & 15, (0, 4))
    return _halves(decode.iq4_xs_scales(b).to(torch.int32) | (nibble << 12))


def put_six_table(w: Tensor, b: Tensor, shift: int) -> None:
    x = _unhalves(w)
    scale = (x & 63).to(torch.uint8)
    at = torch.arange(4, device=b.device, dtype=torch.int32) * 4
    d = ((x[..., :4] >> 12) << at).sum(-1)
    b[..., 0:2] = _unscaled(d, shift).unsqueeze(-1).view(torch.uint8)
    b[..., 2:4] = weighted((scale >> 4).unflatten(-1, (2, 4)), (0, 2, 4, 6))
    b[..., 4:8] = join_nibbles(scale.unflatten(-1, (4, 2)).transpose(-1, -2))


def half_words(b: Tensor, at: int, shift: int) -> Tensor:
    """Pairs (c, c + 4) of the float16 at byte `at` of 32-element blocks [R, S, 8, bytes], times 2^shift: [R, S, 4]."""
    return _halves(_scaled(_half_bits(b, at), shift))


def put_half(w: Tensor, b: Tensor, at: int, shift: int) -> None:
    b[..., at : at + 2] = _unscaled(_unhalves(w), shift).unsqueeze(-1).view(torch.uint8)


# ---- whole rows


def scale_at(type_name: str) -> int:
    """Byte of a block where the float16 scale stands."""
    return {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(type_name, 0)


def largest_scale(raw: Tensor, type_name: str) -> Tensor:
    """Largest |d| of the blocks' scales, a float32 scalar tensor (inf or nan if one is; 0 without scales)."""
    if FORMS[type_name].low == 16:
        return torch.zeros(())
    b = raw.unflatten(-1, (-1, layouts.BY_NAME[type_name].n_bytes))
    return _half_bits(b, scale_at(type_name)).float().abs().amax()


def shift_for(largest: float, type_name: str) -> int | None:
    """The power of two that brings the largest sub-block scale just under float16's maximum; None: no such one."""
    top = largest * LARGEST_QUANT_SCALE.get(FORMS[type_name].scale, 0)
    if not top < 65504:
        return None
    if top == 0:
        return 24
    shift = 15 - int(torch.tensor(top).log2().ceil())
    return max(0, min(shift, 30))


def repack(raw: Tensor, type_name: str, shift: int) -> Parts:
    """File rows uint8 [R, row_bytes] to arrays [S, R, n] (`d`: [S, R])."""
    form = FORMS[type_name]
    if form.low == 16:
        return {"low": float_words(raw).transpose(0, 1)}
    b = blocks_of(raw, type_name)
    q = quants_of(b, type_name)
    parts = {"low": low_words(q, form.low)}
    if form.high:
        parts["high"] = high_words(q >> form.low, form.high)
    if form.scale == "six_bit":
        parts["scale"] = six_bit_words(b.squeeze(2), shift)
    elif form.scale == "int8":
        parts["scale"] = int8_words(b.squeeze(2), type_name)
        parts["d"] = _scaled(_half_bits(b.squeeze(2), scale_at(type_name)), shift).to(torch.int16)
    elif form.scale == "nibbles":
        parts["scale"] = group_words(b[:, :, 0, 0:16])
        d, dmin = _scaled(_half_bits(b[:, :, 0], 80), shift), _scaled(_half_bits(b[:, :, 0], 82), 0)
        parts["d"] = torch.stack((d, dmin), -1).to(torch.int16).view(torch.int32).squeeze(-1)
    elif form.scale == "six_table":
        parts["scale"] = six_table_words(b.squeeze(2), shift)
    else:
        parts["scale"] = half_words(b, 0, shift)
        if form.scale == "half_min":
            parts["min"] = half_words(b, 2, 0)
    return {name: part.transpose(0, 1) for name, part in parts.items()}


def unrepack(parts: Parts, type_name: str, n_columns: int, shift: int) -> Tensor:
    """The inverse of `repack`: file rows uint8 [R, row_bytes]."""
    form, layout = FORMS[type_name], layouts.BY_NAME[type_name]
    p = {name: part.transpose(0, 1) for name, part in parts.items()}
    if form.low == 16:
        return float_bytes(p["low"], n_columns)
    q = low_quants(p["low"], form.low)
    if form.high:
        q = q | (high_quants(p["high"], form.high) << form.low)
    n = BLOCK // layout.n_elements
    b = torch.zeros((*q.shape[:2], n, layout.n_bytes), dtype=torch.uint8, device=q.device)
    put_quants(q, b, type_name)
    if form.scale == "six_bit":
        put_six_bit(p["scale"], b[:, :, 0], shift)
    elif form.scale == "int8":
        put_int8(p["scale"], b[:, :, 0], type_name)
        at = scale_at(type_name)
        b[:, :, 0, at : at + 2] = _unscaled(p["d"].to(torch.int32), shift).unsqueeze(-1).view(torch.uint8)
    elif form.scale == "nibbles":
        b[:, :, 0, 0:16] = group_bytes(p["scale"])
        d = p["d"].unsqueeze(-1).contiguous().view(torch.int16)
        b[:, :, 0, 80:82] = _unscaled(d[..., 0].to(torch.int32), shift).unsqueeze(-1).view(torch.uint8)
        b[:, :, 0, 82:84] = d[..., 1:].contiguous().view(torch.uint8)
    elif form.scale == "six_table":
        put_six_table(p["scale"], b[:, :, 0], shift)
    else:
        put_half(p["scale"], b, 0, shift)
        if form.scale == "half_min":
            put_half(p["min"], b, 2, 0)
    return b.flatten(1)[:, : layout.row_bytes(n_columns)]
