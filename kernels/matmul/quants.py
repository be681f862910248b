"""Quants of file blocks, value plus offset in file order, and back into a block's bytes."""

from torch import Tensor

from ggufspec.kernels.matmul import decode


def join_nibbles(q: Tensor) -> Tensor:
    """[..., 2, n] quants to bytes [..., n]: the inverse of `decode.nibbles`."""
    return (q[..., 0, :] & 15) | ((q[..., 1, :] & 15) << 4)


def weighted(bits: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Sum of bits [..., n] << shifts over the last dimension, in uint8."""
    out = bits[..., 0] << shifts[0]
    for k in range(1, len(shifts)):
        out |= bits[..., k] << shifts[k]
    return out


def quants_of(b: Tensor, type_name: str) -> Tensor:
    """Blocks [R, S, n, bytes] to quants uint8 [R, S, 256] (value + offset)."""
    if type_name == "Q8_0":
        q = b[..., 2:34] ^ 128
    elif type_name in ("Q4_0", "Q4_1"):
        at = 2 if type_name == "Q4_0" else 4
        q = decode.nibbles(b[..., at : at + 16])
    elif type_name in ("Q5_0", "Q5_1"):
        at = 2 if type_name == "Q5_0" else 4
        q = decode.nibbles(b[..., at + 4 : at + 20]).flatten(-2) | decode.fifth_bit(b, at)
    elif type_name == "IQ4_NL":
        q = decode.nibbles(b[..., 2:18])
    elif type_name == "IQ4_XS":
        q = decode.nibbles(b[..., 8:136].unflatten(-1, (8, 16)))
    elif type_name == "Q2_K":
        q = decode.two_bits(b[..., 16:80])
    elif type_name == "Q3_K":
        q = decode.two_bits(b[..., 32:96]) | (decode.bits(b[..., 0:32], 8).flatten(-2) << 2)
    elif type_name == "Q4_K":
        q = decode.nibbles(b[..., 16:144].unflatten(-1, (4, 32)))
    elif type_name == "Q5_K":
        q = decode.nibbles(b[..., 48:176].unflatten(-1, (4, 32))).flatten(-3, -2)
        q = q | (decode.bits(b[..., 16:48], 8) << 4)
    else:
        q = decode.nibbles(b[..., 0:128].unflatten(-1, (2, 64))).flatten(-3)
        q = q | (decode.two_bits(b[..., 128:192]) << 4)
    return q.flatten(2)


def put_quants(q: Tensor, b: Tensor, type_name: str) -> None:
    """Write quants uint8 [R, S, 256] into blocks [R, S, n, bytes]: the inverse of `quants_of`."""
    if type_name == "Q8_0":
        b[..., 2:34] = q.unflatten(-1, (8, 32)) ^ 128
    elif type_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        at = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[type_name]
        b[..., at : at + 16] = join_nibbles(q.unflatten(-1, (8, 2, 16)))
        if at > 4:
            b[..., at - 4 : at] = weighted((q >> 4).unflatten(-1, (8, 4, 8)), tuple(range(8)))
    elif type_name == "IQ4_NL":
        b[..., 2:18] = join_nibbles(q.unflatten(-1, (8, 2, 16)))
    elif type_name == "IQ4_XS":
        b[..., 0, 8:136] = join_nibbles(q.unflatten(-1, (8, 2, 16))).flatten(-2)
    elif type_name in ("Q2_K", "Q3_K"):
        at = 16 if type_name == "Q2_K" else 32
        low = (q & 3).unflatten(-1, (2, 4, 32)).transpose(-1, -2)
        b[..., 0, at : at + 64] = weighted(low, (0, 2, 4, 6)).flatten(-2)
        if type_name == "Q3_K":
            b[..., 0, 0:32] = weighted((q >> 2).unflatten(-1, (8, 32)).transpose(-1, -2), tuple(range(8)))
    elif type_name == "Q4_K":
        b[..., 0, 16:144] = join_nibbles(q.unflatten(-1, (4, 2, 32))).flatten(-2)
    elif type_name == "Q5_K":
        b[..., 0, 48:176] = join_nibbles(q.unflatten(-1, (4, 2, 32))).flatten(-2)
        b[..., 0, 16:48] = weighted((q >> 4).unflatten(-1, (8, 32)).transpose(-1, -2), tuple(range(8)))
    else:
        b[..., 0, 0:128] = join_nibbles(q.unflatten(-1, (2, 2, 64))).flatten(-2)
        high = (q >> 4).unflatten(-1, (2, 4, 32)).transpose(-1, -2)
        b[..., 0, 128:192] = weighted(high, (0, 2, 4, 6)).flatten(-2)
