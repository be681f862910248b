"""The kernels' arrays: lossless, laid out as documented, decoded rightly by the kernels' own PTX, run here."""

import re

import pytest
import torch
from random_blocks import random_raw

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.decode import decode
from ggufspec.quant import layouts

FORMS = tuple(repack.FORMS)


def packed(type_name, rows=3, columns=512, seed=0):
    raw = random_raw(type_name, rows, columns, seed)
    shift = repack.shift_for(float(repack.largest_scale(raw, type_name)), type_name)
    return raw, shift, repack.repack(raw, type_name, shift)


@pytest.mark.parametrize("columns", [256, 768, 96])
@pytest.mark.parametrize("type_name", FORMS)
def test_repacking_loses_nothing(type_name, columns):
    if columns % layouts.BY_NAME[type_name].n_elements:
        columns = 512
    raw, shift, parts = packed(type_name, 7, columns)
    assert torch.equal(repack.unrepack(parts, type_name, columns, shift), raw)
    if columns % 256 == 0:
        assert sum(p.numel() * p.element_size() for p in parts.values()) == raw.numel()


def test_order_is_the_documented_one_and_inverts():
    x = torch.arange(512)
    y = repack.order(x)
    for e in range(512):
        block, r = divmod(e, 256)
        h, c, t, i = r // 128, r // 32 % 4, r // 4 % 8, r % 4
        assert y[256 * block + 32 * t + 8 * c + 2 * i + h] == e
    assert torch.equal(repack.disorder(y), x)


def u32(x):
    return int(x) & 0xFFFFFFFF


def run_ptx(text: str, operands: dict[int, int]) -> dict[int, int]:
    """Run straight-line PTX over 32-bit words and packed float16: the subset the kernels' assembly uses."""
    held = {f"${k}": v for k, v in operands.items()}

    def value(name):
        return held[name] if name in held else u32(int(name, 0))

    def halves(w):
        words = torch.tensor([w & 0xFFFF, w >> 16], dtype=torch.int32).to(torch.int16)
        return words.view(torch.float16).double()

    def pack(x):
        h = x.half().view(torch.int16).int() & 0xFFFF
        return int(h[0]) | int(h[1]) << 16

    for line in text.strip("{}\n").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        op, rest = line.split(None, 1)
        to, *names = (part.strip() for part in rest.split(","))
        v = [value(n) for n in names]
        if op == "and.b32":
            r = v[0] & v[1]
        elif op == "or.b32":
            r = v[0] | v[1]
        elif op == "shl.b32":
            r = u32(v[0] << v[1])
        elif op == "shr.u32":
            r = v[0] >> v[1]
        elif op == "prmt.b32":
            source = [(v[0] >> 8 * k) & 255 for k in range(4)] + [(v[1] >> 8 * k) & 255 for k in range(4)]
            r = sum(source[(v[2] >> 4 * k) & 7] << 8 * k for k in range(4))
        elif op == "add.rn.f16x2":
            r = pack(halves(v[0]) + halves(v[1]))
        elif op == "mul.rn.f16x2":
            r = pack(halves(v[0]) * halves(v[1]))
        else:
            assert op == "fma.rn.f16x2", op
            r = pack(halves(v[0]) * halves(v[1]) + halves(v[2]))
        held[to] = r
    return {int(name[1:]): v for name, v in held.items() if re.fullmatch(r"\$\d+", name)}


@pytest.mark.parametrize("type_name", FORMS)
def test_the_kernels_assembly_decodes_every_form(type_name):
    gluon = pytest.importorskip("ggufspec.kernels.matmul.gluon")
    raw, shift, parts = packed(type_name, 2, 256, seed=5)
    form = repack.FORMS[type_name]
    expected = decode(raw, type_name).double()
    out = torch.zeros(2, 256, dtype=torch.double)
    sign = 1 if form.scale == "half_min" else -1
    minimum = sign * 2.0 ** (shift - 24)
    word = lambda x: u32(gluon.pair(x))  # noqa: E731
    sixteenth = word(1 / 16)
    for row in range(2):
        low = [u32(w) for w in parts["low"][0, row]]
        high = [u32(w) for w in parts["high"][0, row]] if form.high else []
        scale = [u32(w) for w in parts["scale"][0, row]]
        for c in range(4):
            if form.scale == "six_bit":
                d = 0
                for k in range(4):
                    d |= (scale[k] & 0xF000F000) >> (12 - 4 * k)
                extra = (word(minimum), word(-1024 * minimum), word(-1024), sixteenth)
                r = run_ptx(gluon.SIX_BIT.value, dict(zip(range(3, 9), (scale[c], d, *extra))))
                triples = [(r[0], r[1], r[2])] * 2
            elif form.scale == "int8":
                d = int(parts["d"][0, row]) & 0xFFFF
                extra = (0x64646464, word(-1152), sixteenth, word(-32 * 2.0**-24))
                r = run_ptx(gluon.INT8.value, dict(zip(range(6, 12), (scale[c], d, *extra))))
                triples = [(r[0], r[1], r[2]), (r[3], r[4], r[5])]
            elif form.scale == "half":
                lift = word(-form.offset * 2.0**-24)
                r = run_ptx(gluon.HALF.value, {2: scale[c], 3: sixteenth, 4: lift})
                triples = [(scale[c], r[0], r[1])] * 2
            else:
                low_min = u32(parts["min"][0, row, c])
                args = {2: scale[c], 3: low_min, 4: sixteenth, 5: word(minimum)}
                r = run_ptx(gluon.HALF_MIN.value, args)
                triples = [(scale[c], r[0], r[1])] * 2
            for t in range(8):
                s, s16, add = triples[t // 4]
                if form.low == 8:
                    at = 16 * (t // 2) + 4 * c + 2 * (t % 2)
                    args = {4: low[at], 12: low[at + 1], 20: s, 28: add}
                else:
                    words = [low[16 * (t // 4) + 4 * c + t % 4]]
                    if form.high:
                        words.append(high[2 * c + t // 4 if form.high == 1 else 4 * c + t // 2])
                    args = {4 + 8 * k: w for k, w in enumerate([*words, s, s16, add])}
                r = run_ptx(gluon.quant_ptx.fn(form.low, form.high, t % 4), args)
                for k in range(4):
                    pair = torch.tensor([r[k] & 0xFFFF, r[k] >> 16], dtype=torch.int32).to(torch.int16)
                    place = 32 * t + 8 * c + 2 * k
                    out[row, place : place + 2] = pair.view(torch.float16).double()
    got = repack.disorder(out) * 2.0 ** (24 - shift)
    error = (got - expected).abs().amax() / expected.abs().amax()
    assert error < 1e-3 and (got - expected).norm() / expected.norm() < 6e-4
