"""The assembly that turns packed quants and scales into float16 pairs, as text for Gluon's inline assembly.

Operands are 32-bit registers; an operand of eight (a tensor spread over a word's eight values) is the same register
eight times, of which the text names the first. `tests` run all of it on the CPU.
"""

import struct

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from ggufspec.kernels.matmul.decode import IQ4_VALUES


def pair(value: float) -> int:
    """A float16 twice in one 32-bit word, as the signed number a kernel argument is."""
    half = struct.unpack("<h", struct.pack("<e", value))[0]
    return half << 16 | half & 0xFFFF


@constexpr_function
def constraints(n_out, n_in):
    return ",".join(["=r"] * n_out + ["r"] * n_in)


# A row's four scale words to two: the nibbles of d in byte 1 of either and of dmin in byte 3, lower half first
JOIN = gl.constexpr("""{
.reg .b32 x, k;
mov.b32 k, 0xf000f000;
shr.u32 x, $2, 4;
lop3.b32 $0, k, $3, x, 0xca;
shr.u32 x, $4, 4;
lop3.b32 $1, k, $5, x, 0xca;
}""")

# Scale words to packed float16: scale, scale / 16, and the constant to add. -1024 and -1152 take the bits of 1024.0
# (and of the signed byte's 128) away again, exactly.
SIX_BIT = gl.constexpr("""{
.reg .b32 k, s, m, d, n;
mov.b32 k, 0x64006400;
lop3.b32 s, $3, 0x003f003f, k, 0xea;
shr.u32 m, $3, 6;
lop3.b32 m, m, 0x003f003f, k, 0xea;
prmt.b32 d, $4, $5, 0x5151;
prmt.b32 n, $4, $5, 0x7373;
add.rn.f16x2 s, s, $8;
fma.rn.f16x2 m, m, $6, $7;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $1, $0, $9;
mul.rn.f16x2 $2, m, n;
}""")
INT8 = gl.constexpr("""{
.reg .b32 s, u, d;
prmt.b32 d, $7, $7, 0x1010;
prmt.b32 s, $6, $8, 0x4140;
prmt.b32 u, $6, $8, 0x4342;
add.rn.f16x2 s, s, $9;
add.rn.f16x2 u, u, $9;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $3, u, d;
mul.rn.f16x2 $1, $0, $10;
mul.rn.f16x2 $4, $3, $10;
mul.rn.f16x2 $2, $0, $11;
mul.rn.f16x2 $5, $3, $11;
}""")
HALF = gl.constexpr("""{
mul.rn.f16x2 $0, $2, $3;
mul.rn.f16x2 $1, $2, $4;
}""")
HALF_MIN = gl.constexpr("""{
mul.rn.f16x2 $0, $2, $4;
mul.rn.f16x2 $1, $3, $5;
}""")


SIX_TABLE = gl.constexpr("""{
.reg .b32 k, s, d;
mov.b32 k, 0x64006400;
lop3.b32 s, $2, 0x003f003f, k, 0xea;
prmt.b32 d, $3, $4, 0x5151;
add.rn.f16x2 s, s, $5;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $1, $0, $6;
}""")
NIBBLES = gl.constexpr("""{
.reg .b32 t, m, s, u, p, r, d, n;
prmt.b32 d, $7, $7, 0x1010;
prmt.b32 n, $7, $7, 0x3232;
and.b32 t, $6, 0x0f0f0f0f;
shr.u32 m, $6, 4;
and.b32 m, m, 0x0f0f0f0f;
prmt.b32 s, t, $8, 0x4140;
prmt.b32 u, t, $8, 0x4342;
prmt.b32 p, m, $8, 0x4140;
prmt.b32 r, m, $8, 0x4342;
add.rn.f16x2 s, s, $9;
add.rn.f16x2 u, u, $9;
fma.rn.f16x2 p, p, $10, $11;
fma.rn.f16x2 r, r, $10, $11;
mul.rn.f16x2 $0, s, d;
mul.rn.f16x2 $3, u, d;
mul.rn.f16x2 $1, $0, $12;
mul.rn.f16x2 $4, $3, $12;
mul.rn.f16x2 $2, p, n;
mul.rn.f16x2 $5, r, n;
}""")

# Eight places in the table to eight bytes (value + 128): a byte's selector has three bits, so both halves of the table
# are looked up and the fourth bit picks
TABLE = gl.constexpr(
    "{\n.reg .b32 a, b, c, d, s, p, l, h, x, y, v;\n"
    + "".join(
        f"mov.b32 {name}, {sum((IQ4_VALUES[4 * k + j] + 128) << 8 * j for j in range(4)):#x};\n"
        for k, name in enumerate("abcd")
    )
    + """and.b32 s, $4, 0x77777777;
shr.u32 p, $4, 1;
and.b32 p, p, 0x44444444;
or.b32 p, p, 0x32103210;
prmt.b32 x, a, b, s;
prmt.b32 y, c, d, s;
prmt.b32 l, x, y, p;
shr.u32 s, s, 16;
shr.u32 p, p, 16;
prmt.b32 x, a, b, s;
prmt.b32 y, c, d, s;
prmt.b32 h, x, y, p;
prmt.b32 x, l, h, 0x5140;
prmt.b32 y, l, h, 0x7362;
prmt.b32 v, x, 0, 0x4140;
fma.rn.f16x2 $0, v, $12, $28;
prmt.b32 v, x, 0, 0x4342;
fma.rn.f16x2 $1, v, $12, $28;
prmt.b32 v, y, 0, 0x4140;
fma.rn.f16x2 $2, v, $12, $28;
prmt.b32 v, y, 0, 0x4342;
fma.rn.f16x2 $3, v, $12, $28;
}"""
)

# Four words of float16 pairs as they are, or of bfloat16 pairs widened and rounded to float16
FLOAT16 = gl.constexpr("{\nmov.b32 $0, $4;\nmov.b32 $1, $12;\nmov.b32 $2, $20;\nmov.b32 $3, $28;\n}")
BFLOAT16 = gl.constexpr(
    "{\n.reg .b32 v, x;\n"
    + "".join(
        f"shl.b32 v, ${4 + 8 * k}, 16;\nand.b32 x, ${4 + 8 * k}, 0xffff0000;\ncvt.rn.f16x2.f32 ${k}, x, v;\n"
        for k in range(4)
    )
    + "}"
)


@constexpr_function
def quant_ptx(low, high, tl):
    """One low word (two when quants have 8 bits) and, with `high`, its word of high bits, to eight float16.

    Operands in eights: low word(s), high word, scale, scale / 16, constant. tl: t mod 4, which says where in the
    high word the bits are.
    """
    if low == 8:
        lines = [".reg .b32 v;"]
        for k, from_word in enumerate((4, 4, 12, 12)):
            lines.append(f"prmt.b32 v, ${from_word}, 0, {'0x4240' if k % 2 == 0 else '0x4341'};")
            lines.append(f"fma.rn.f16x2 ${k}, v, $20, $28;")
        return "{\n" + "\n".join(lines) + "\n}"
    n = 1 if high else 0
    w, h, scale, sixteenth, add = 4, 12, 12 + 8 * n, 20 + 8 * n, 28 + 8 * n
    lines = [".reg .b32 v, x, y, z;", f"shr.u32 x, ${w}, 8;"]
    if low == 2:
        for k in range(4):
            if k % 2 == 0:  # pairs k and k + 1 to bits 0 and 4, their high bits to 2 and 6
                lines.append(f"shr.u32 x, ${w}, {8 * (tl % 2) + 2 * (k // 2)};")
                u = tl * 2 + k // 2
                at = u % 4 + 8 * (u // 4)
                if high:
                    lines.append(f"shl.b32 y, ${h}, {2 - at};" if at < 2 else f"shr.u32 y, ${h}, {at - 2};")
            lines.append(f"and.b32 v, x, {('0x00030003', '0x00300030')[k % 2]};")
            if high:
                lines += [f"and.b32 z, y, {('0x00040004', '0x00400040')[k % 2]};", "or.b32 v, v, z;"]
            lines.append(f"fma.rn.f16x2 ${k}, v, ${scale if k % 2 == 0 else sixteenth}, ${add};")
        return "{\n" + "\n".join(lines) + "\n}"
    for k in range(4):
        if high and k % 2 == 0:  # pairs k and k + 1 take their high bits from the word moved so: to bits 4 and 8
            if high == 1:
                u = tl * 2 + k // 2
                at = u % 4 + 8 * (u // 4)
            else:
                at = 8 * (tl % 2) + 2 * (k // 2)
            lines.append(f"shl.b32 y, ${h}, {4 - at};" if at < 4 else f"shr.u32 y, ${h}, {at - 4};")
        word = f"${w}" if k < 2 else "x"
        mask = "0x000f000f" if k % 2 == 0 else "0x00f000f0"
        lines.append(f"and.b32 v, {word}, {mask};")
        if high:
            ones = {1: ("0x00100010", "0x01000100"), 2: ("0x00300030", "0x03000300")}[high][k % 2]
            lines += [f"and.b32 z, y, {ones};", "or.b32 v, v, z;"]
        lines.append(f"fma.rn.f16x2 ${k}, v, ${scale if k % 2 == 0 else sixteenth}, ${add};")
    return "{\n" + "\n".join(lines) + "\n}"
