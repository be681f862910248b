"""Elementwise decoders in Triton: the float32 value of any element, from the kernels' arrays or from file bytes.

Slow and plain; the arithmetic is the format's, in its order. Embedding rows come from here, products of weights held
as file bytes, and everything on cards the Gluon kernels do not run on.
"""

import triton
import triton.language as tl

# the sixteen values of IQ4_NL and IQ4_XS as bytes, lowest first
IQ4_LOW = tl.constexpr(int.from_bytes(bytes(v & 255 for v in (-127, -104, -83, -65, -49, -35, -22, -10)), "little"))
IQ4_HIGH = tl.constexpr(int.from_bytes(bytes((1, 13, 25, 38, 53, 69, 89, 113)), "little"))


@triton.jit
def place_of(e):
    """Where column e of a super-block stands in the kernels' order (see `repack`)."""
    return 32 * (e // 4 % 8) + 8 * (e // 32 % 4) + 2 * (e % 4) + e // 128


@triton.jit
def element_at(p):
    """The inverse of `place_of`."""
    return (p % 2) * 128 + (p // 8 % 4) * 32 + (p // 32 % 8) * 4 + p // 2 % 4


# What stands in a slot that waits for a float32: a NaN that no arithmetic gives (a card's own is 0x7fffffff).
EMPTY = tl.constexpr(-8531)  # 0xffffdead
# Producers that cannot see a whole row write an activation divided by this instead of by a power of two of the row's
# own: magnitudes to a million stay in float16's range, and what underflows is below 1e-6.
FIXED_SCALE = tl.constexpr(16.0)
# The same, in powers of two above the root mean square that a row had one norm earlier.
HEADROOM = tl.constexpr(4)


@triton.jit
def row_place(e):
    """Where column e of a row stands in an activation row."""
    return e // 256 * 256 + place_of(e % 256)


@triton.jit
def bounded_half(v):
    """v as float16, at most float16's largest number."""
    return tl.minimum(tl.maximum(v, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def fixed_half(v):
    """v / FIXED_SCALE as float16, likewise."""
    return bounded_half(v * (1.0 / FIXED_SCALE))


@triton.jit
def power_near(mean_square):
    """A power of two, HEADROOM steps above the root of a mean square: what a stream of that size is divided by."""
    exponent = (((mean_square.to(tl.int32, bitcast=True) >> 23) - 127) >> 1) + 127 + HEADROOM
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_half(bits):
    """Sixteen low bits as a float16, in float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def form_value(
    low, high, scale, extra, at, e, unit, mask,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Elements e (0..255) of the super-blocks numbered `at` (block * rows + row, int64); unit: 2^-shift."""
    h, c, t, i = e // 128, e // 32 % 4, e // 4 % 8, e % 4
    if LOW == 2:
        word = tl.load(low + at * 16 + (4 * c + t // 2), mask, 0)
        q = (word >> (16 * h + 8 * (t % 2) + 4 * (i % 2) + 2 * (i // 2))) & 3
    elif LOW == 4:
        q = (tl.load(low + at * 32 + (16 * (t // 4) + 4 * c + t % 4), mask, 0) >> (16 * h + 4 * i)) & 15
    else:
        word = tl.load(low + at * 64 + (16 * (t // 2) + 4 * c + 2 * (t % 2) + i // 2), mask, 0)
        q = (word >> (16 * h + 8 * (i % 2))) & 255
    if HIGH == 1:
        word = tl.load(high + at * 8 + (2 * c + t // 4), mask, 0)
        q |= ((word >> (16 * h + 8 * (t // 2 % 2) + 4 * (i % 2) + 2 * (t % 2) + i // 2)) & 1) << LOW
    elif HIGH == 2:
        word = tl.load(high + at * 16 + (4 * c + t // 2), mask, 0)
        q |= ((word >> (16 * h + 8 * (t % 2) + 4 * (i % 2) + 2 * (i // 2))) & 3) << LOW
    own = tl.load(scale + at * 4 + c, mask, 0)
    if SCALE == "six_bit":
        d = own * 0
        for k in tl.static_range(4):
            nibbles = (tl.load(scale + at * 4 + (c * 0 + k), mask, 0) >> 12) & 0xF000F
            d |= nibbles << (4 * k)
        pair = own >> (16 * h)
        s = as_half(d) * unit * (pair & 63).to(tl.float32)
        return s * q.to(tl.float32) - as_half(d >> 16) * ((pair >> 6) & 63).to(tl.float32)
    elif SCALE == "int8":
        s = ((own >> (8 * h + 16 * (t // 4))) & 255) - 128
        d = as_half(tl.load(extra + at + e * 0, mask, 0)) * unit
        return d * s.to(tl.float32) * (q - OFFSET).to(tl.float32)
    elif SCALE == "nibbles":
        s = (own >> (8 * h + 16 * (t // 4))) & 255
        d = tl.load(extra + at + e * 0, mask, 0)
        scaled = as_half(d) * unit * (s & 15).to(tl.float32) * q.to(tl.float32)
        return scaled - as_half(d >> 16) * (s >> 4).to(tl.float32)
    elif SCALE == "six_table":
        d = own * 0
        for k in tl.static_range(4):
            d |= ((tl.load(scale + at * 4 + (c * 0 + k), mask, 0) >> 12) & 15) << (4 * k)
        s = ((own >> (16 * h)) & 63) - 32
        return as_half(d) * unit * s.to(tl.float32) * iq4_value(q)
    elif SCALE == "half_table":
        return as_half(own >> (16 * h)) * unit * iq4_value(q)
    else:
        value = as_half(own >> (16 * h)) * unit * (q - OFFSET).to(tl.float32)
        if SCALE == "half_min":
            value += as_half(tl.load(extra + at * 4 + c, mask, 0) >> (16 * h))
        return value


@triton.jit
def float_value(low, at, e, mask, SCALE: tl.constexpr):
    """The same of the types of 16-bit floats."""
    h, c, t, i = e // 128, e // 32 % 4, e // 4 % 8, e % 4
    bits = tl.load(low + at * 128 + (16 * t + 4 * c + i), mask, 0) >> (16 * h)
    return (bits << 16).to(tl.float32, bitcast=True) if SCALE == "bf16" else as_half(bits)


@triton.jit
def iq4_value(q):
    """The table of IQ4_NL and IQ4_XS at q (0..15)."""
    half = tl.where(q < 8, IQ4_LOW, IQ4_HIGH).to(tl.int64)
    byte = (half >> (8 * (q & 7)).to(tl.int64)) & 255
    return ((byte ^ 128) - 128).to(tl.float32)


@triton.jit
def half_at(raw, byte, mask):
    """The float16 at an even byte, in float32."""
    return tl.load((raw + byte).to(tl.pointer_type(tl.float16)), mask, 0.0).to(tl.float32)


@triton.jit
def byte_at(raw, byte, mask):
    return tl.load(raw + byte, mask, 0).to(tl.int32)


@triton.jit
def file_value(raw, row_byte, block, e, mask, TYPE: tl.constexpr):
    """Elements e (0..255) of super-block `block` of the rows whose bytes start at row_byte (int64)."""
    if TYPE == "F32":
        return tl.load((raw + row_byte + (block * 256 + e) * 4).to(tl.pointer_type(tl.float32)), mask, 0.0)
    elif TYPE == "F16":
        return half_at(raw, row_byte + (block * 256 + e) * 2, mask)
    elif TYPE == "BF16":
        at = (raw + row_byte + (block * 256 + e) * 2).to(tl.pointer_type(tl.bfloat16))
        return tl.load(at, mask, 0.0).to(tl.float32)
    elif TYPE == "Q2_K":
        b = row_byte + block * 84
        q = (byte_at(raw, b + (16 + 32 * (e // 128) + e % 32), mask) >> (2 * (e % 128 // 32))) & 3
        s = byte_at(raw, b + e // 16, mask)
        d = half_at(raw, b + 80 + e * 0, mask) * (s & 15).to(tl.float32)
        return d * q.to(tl.float32) - half_at(raw, b + 82 + e * 0, mask) * (s >> 4).to(tl.float32)
    elif TYPE == "Q3_K":
        b = row_byte + block * 110
        q = (byte_at(raw, b + (32 + 32 * (e // 128) + e % 32), mask) >> (2 * (e % 128 // 32))) & 3
        q += 4 * ((byte_at(raw, b + e % 32, mask) >> (e // 32)) & 1) - 4
        g = e // 16
        s = (byte_at(raw, b + 96 + g % 8, mask) >> (4 * (g // 8))) & 15
        s |= ((byte_at(raw, b + 104 + g % 4, mask) >> (2 * (g // 4))) & 3) << 4
        return half_at(raw, b + 108 + e * 0, mask) * (s - 32).to(tl.float32) * q.to(tl.float32)
    elif TYPE == "IQ4_XS":
        b = row_byte + block * 136
        n = e // 32
        s = (byte_at(raw, b + 4 + n // 2, mask) >> (4 * (n % 2))) & 15
        s |= ((byte_at(raw, b + 2 + n // 4, mask) >> (2 * (n % 4))) & 3) << 4
        q = (byte_at(raw, b + (8 + 16 * n + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        return half_at(raw, b + e * 0, mask) * (s - 32).to(tl.float32) * iq4_value(q)
    elif TYPE == "IQ4_NL":
        b = row_byte + (block * 8 + e // 32) * 18
        q = (byte_at(raw, b + (2 + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        return half_at(raw, b, mask) * iq4_value(q)
    elif TYPE == "Q8_0":
        b = row_byte + (block * 8 + e // 32) * 34
        q = byte_at(raw, b + (2 + e % 32), mask)
        return half_at(raw, b, mask) * ((q ^ 128) - 128).to(tl.float32)
    elif TYPE == "Q4_0":
        b = row_byte + (block * 8 + e // 32) * 18
        q = (byte_at(raw, b + (2 + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        return half_at(raw, b, mask) * (q - 8).to(tl.float32)
    elif TYPE == "Q4_1":
        b = row_byte + (block * 8 + e // 32) * 20
        q = (byte_at(raw, b + (4 + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        return half_at(raw, b, mask) * q.to(tl.float32) + half_at(raw, b + 2, mask)
    elif TYPE == "Q5_0":
        b = row_byte + (block * 8 + e // 32) * 22
        q = (byte_at(raw, b + (6 + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        q |= ((byte_at(raw, b + 2 + e % 32 // 8, mask) >> (e % 8)) & 1) << 4
        return half_at(raw, b, mask) * (q - 16).to(tl.float32)
    elif TYPE == "Q5_1":
        b = row_byte + (block * 8 + e // 32) * 24
        q = (byte_at(raw, b + (8 + e % 16), mask) >> (4 * (e % 32 // 16))) & 15
        q |= ((byte_at(raw, b + 4 + e % 32 // 8, mask) >> (e % 8)) & 1) << 4
        return half_at(raw, b, mask) * q.to(tl.float32) + half_at(raw, b + 2, mask)
    elif TYPE == "Q6_K":
        b = row_byte + block * 210
        n, r, l = e // 128, e % 128 // 32, e % 32
        q = (byte_at(raw, b + (64 * n + 32 * (r % 2) + l), mask) >> (4 * (r // 2))) & 15
        q |= ((byte_at(raw, b + (128 + 32 * n + l), mask) >> (2 * r)) & 3) << 4
        s = (byte_at(raw, b + 192 + e // 16, mask) ^ 128) - 128
        return half_at(raw, b + 208 + e * 0, mask) * s.to(tl.float32) * (q - 32).to(tl.float32)
    else:
        tl.static_assert(TYPE == "Q4_K" or TYPE == "Q5_K", "a type without a decoder")
        five: tl.constexpr = TYPE == "Q5_K"
        b = row_byte + block * (176 if five else 144)
        s, l = e // 32, e % 32
        q = (byte_at(raw, b + ((48 if five else 16) + 32 * (s // 2) + l), mask) >> (4 * (s % 2))) & 15
        if five:
            q |= ((byte_at(raw, b + 16 + l, mask) >> s) & 1) << 4
        # 6-bit pairs: whole in bytes s and s + 4 for s < 4; else nibbles of byte s + 4 and the tops of s - 4 and s
        own = byte_at(raw, b + 4 + s, mask)
        next4 = byte_at(raw, b + 4 + tl.minimum(s + 4, 11), mask)
        back4 = byte_at(raw, b + 4 + tl.maximum(s - 4, 0), mask)
        scale = tl.where(s < 4, own & 63, (next4 & 15) | ((back4 >> 6) << 4))
        low = tl.where(s < 4, next4 & 63, (next4 >> 4) | ((own >> 6) << 4))
        d = half_at(raw, b + e * 0, mask) * scale.to(tl.float32)
        return d * q.to(tl.float32) - half_at(raw, b + 2 + e * 0, mask) * low.to(tl.float32)
