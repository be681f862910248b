"""The kernels' arrays: lossless, laid out as documented, decoded rightly by the kernels' own PTX, run here."""

import itertools
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
        held = sum(p.numel() * p.element_size() for p in parts.values())
        assert held == raw.numel() * {"IQ4_XS": 144 / 136, "Q3_K": 114 / 110}.get(type_name, 1)


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
        elif op == "lop3.b32":
            r = {0xEA: v[0] & v[1] | v[2], 0xCA: v[0] & v[1] | u32(~v[0]) & v[2]}[v[3]]
        elif op == "prmt.b32":
            source = [(v[0] >> 8 * k) & 255 for k in range(4)] + [(v[1] >> 8 * k) & 255 for k in range(4)]
            r = sum(source[(v[2] >> 4 * k) & 7] << 8 * k for k in range(4))
        elif op == "mov.b32":
            r = v[0]
        elif op == "cvt.rn.f16x2.f32":
            high, low = (torch.tensor(x, dtype=torch.uint32).view(torch.float32).double() for x in v)
            r = pack(torch.stack((low, high)))
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
    ptx = pytest.importorskip("ggufspec.kernels.matmul.ptx")
    raw, shift, parts = packed(type_name, 2, 256, seed=5)
    form = repack.FORMS[type_name]
    expected = decode(raw, type_name).double()
    out = torch.zeros(2, 256, dtype=torch.double)
    sign = 1 if form.scale == "half_min" else -1
    minimum = sign * 2.0 ** (shift - 24)
    word = lambda x: u32(ptx.pair(x))  # noqa: E731
    sixteenth = word(1 / 16)
    for row in range(2):
        low = [u32(w) for w in parts["low"][0, row]]
        high = [u32(w) for w in parts["high"][0, row]] if form.high else []
        scale = [u32(w) for w in parts["scale"][0, row]] if "scale" in parts else [0] * 4
        for c in range(4):
            if form.scale == "six_bit":
                d = run_ptx(ptx.JOIN.value, dict(zip(range(2, 6), scale)))
                extra = (word(minimum), word(-1024 * minimum), word(-1024), sixteenth)
                r = run_ptx(ptx.SIX_BIT.value, dict(zip(range(3, 10), (scale[c], d[0], d[1], *extra))))
                triples = [(r[0], r[1], r[2])] * 2
            elif form.scale == "int8":
                d = int(parts["d"][0, row]) & 0xFFFF
                extra = (0x64646464, word(-1152), sixteenth, word(-form.offset * 2.0**-24))
                r = run_ptx(ptx.INT8.value, dict(zip(range(6, 12), (scale[c], d, *extra))))
                triples = [(r[0], r[1], r[2]), (r[3], r[4], r[5])]
            elif form.low == 16:
                triples = []
            elif form.scale == "nibbles":
                d = u32(parts["d"][0, row])
                extra = (0x64646464, word(-1024), word(minimum), word(-1024 * minimum), sixteenth)
                r = run_ptx(ptx.NIBBLES.value, dict(zip(range(6, 13), (scale[c], d, *extra))))
                triples = [(r[0], r[1], r[2]), (r[3], r[4], r[5])]
            elif form.scale == "six_table":
                d = run_ptx(ptx.JOIN.value, dict(zip(range(2, 6), scale)))
                lift = word(-128 * 2.0**-24)
                r = run_ptx(ptx.SIX_TABLE.value, dict(zip(range(2, 7), (scale[c], d[0], d[1], word(-1056), lift))))
                triples = [(r[0], 0, r[1])] * 2
            elif form.scale in ("half", "half_table"):
                lift = word(-form.offset * 2.0**-24)
                r = run_ptx(ptx.HALF.value, {2: scale[c], 3: sixteenth, 4: lift})
                triples = [(scale[c], r[0], r[1])] * 2
            else:
                low_min = u32(parts["min"][0, row, c])
                args = {2: scale[c], 3: low_min, 4: sixteenth, 5: word(minimum)}
                r = run_ptx(ptx.HALF_MIN.value, args)
                triples = [(scale[c], r[0], r[1])] * 2
            for t in range(8):
                s, s16, add = triples[t // 4] if triples else (0, 0, 0)
                if form.low == 16:
                    args = {4 + 8 * i: low[16 * t + 4 * c + i] for i in range(4)}
                elif form.low == 8:
                    at = 16 * (t // 2) + 4 * c + 2 * (t % 2)
                    args = {4: low[at], 12: low[at + 1], 20: s, 28: add}
                else:
                    words = [low[4 * c + t // 2 if form.low == 2 else 16 * (t // 4) + 4 * c + t % 4]]
                    if form.high:
                        words.append(high[2 * c + t // 4 if form.high == 1 else 4 * c + t // 2])
                    args = {4 + 8 * k: w for k, w in enumerate([*words, s, s16, add])}
                if form.low == 16:
                    text = (ptx.BFLOAT16 if form.scale == "bf16" else ptx.FLOAT16).value
                elif form.scale.endswith("table"):
                    text = ptx.TABLE.value
                else:
                    text = ptx.quant_ptx.fn(form.low, form.high, t % 4)
                r = run_ptx(text, args)
                for k in range(4):
                    pair = torch.tensor([r[k] & 0xFFFF, r[k] >> 16], dtype=torch.int32).to(torch.int16)
                    place = 32 * t + 8 * c + 2 * k
                    out[row, place : place + 2] = pair.view(torch.float16).double()
    got = repack.disorder(out) * 2.0 ** (24 - shift)
    error = (got - expected).abs().amax() / expected.abs().amax()
    assert error < 1e-3 and (got - expected).norm() / expected.norm() < 6e-4


def test_a_cut_covers_every_unit_once_in_order():
    from ggufspec.kernels.matmul.cuda import MOST_PARTS, Config
    from ggufspec.kernels.matmul.narrow import cut

    for rows, blocks, n_programs in ((34816, 20, 264), (5120, 68, 528), (128, 20, 264), (128, 1, 264), (640, 24, 8)):
        for config in (Config(), Config(MT=1), Config(KW=2, WM=2)):
            c = cut(rows, blocks, config, n_programs)
            n_tiles = rows // config.n_rows
            assert c.units * config.KW >= blocks > (c.units - 1) * config.KW
            assert c.n_units == c.units * n_tiles
            assert 0 <= c.n_programs * c.per_program - c.n_units < c.per_program
            programs = [{u // c.per_program for u in range(t * c.units, (t + 1) * c.units)} for t in range(3)]
            programs = [p for p, first in zip(programs, range(0, c.n_units, c.units)) if first < c.n_units]
            assert max(map(len, programs)) <= c.n_parts <= MOST_PARTS


def test_stages_fit_the_shared_memory_of_small_and_large_cards():
    from ggufspec.kernels.matmul.cuda import Config, config_for
    from ggufspec.kernels.matmul.narrow import tile_and_stages

    for shared, most in ((100 << 10, 99 << 10), (164 << 10, 163 << 10), (228 << 10, 227 << 10)):
        for type_name, form in repack.FORMS.items():
            layout = layouts.BY_NAME[type_name]
            block_bytes = layout.n_bytes * 256 // layout.n_elements
            for n_tokens in (1, 9, 100):
                config = config_for((9, 0), type_name, 5120, 20, block_bytes)
                tile, stages = tile_and_stages(config, block_bytes, n_tokens, shared, most)
                assert stages >= 2 and tile in (8, 16, 32), (type_name, form)
                assert stages * (config.n_rows * block_bytes + tile * 512) < most
    assert config_for((1, 0), "Q4_K", 5120, 20, 144) != config_for((1, 0), "Q4_K", 248320, 20, 144)
    assert config_for((9, 0), "Q6_K", 250000, 20, 210) == Config(MT=2, ST=2, per_sm=3)


def test_every_shape_covers_a_tile_and_fits_a_multiprocessor():
    """Above 16 tokens only the endings that were measured leave the usual tile, and only Hopper's leave 32 tokens."""
    from ggufspec.kernels.matmul.cuda import NARROW_TOKENS, Config, config_for
    from ggufspec.kernels.matmul.narrow import NEVER, Wide, shape_for

    cards = {(8, 0): (164 << 10, 163 << 10), (9, 0): (228 << 10, 227 << 10), (12, 0): (100 << 10, 99 << 10)}
    every = itertools.product(cards.items(), repack.FORMS, (5120, 34816, 248320), (8, 16, 24, 33, 64, 65, 129, 192))
    for (capability, (shared, most)), type_name, rows, n_tokens in every:
        layout = layouts.BY_NAME[type_name]
        block_bytes = layout.n_bytes * 256 // layout.n_elements
        config = config_for((9, 0), type_name, rows, 20, block_bytes)
        for wide in (Wide(17, 2), Wide(17, 3), Wide(33, 3), NEVER):
            shape = shape_for(config, block_bytes, n_tokens, shared, most, wide, capability == (9, 0))
            assert not shape.together or (capability == (9, 0) and n_tokens >= max(33, wide.from_tokens))
            assert shape.tile == 64 if shape.together else shape.tile in (8, 16, 32)
            warps = config.n_rows // 16 if shape.together else config.KW * config.WM
            assert shape.n_registers * 32 * warps <= 65536
            assert shape.stages * (config.n_rows * block_bytes + shape.tile * 512) <= most
            assert -(-n_tokens // shape.tile) * shape.tile <= NARROW_TOKENS, "the slots' tokens"
    usual = Config(WM=8, MT=1, ST=3, per_sm=2)
    for n_tokens, together in ((16, False), (17, False), (32, False), (33, True), (192, True)):
        shape = shape_for(usual, 144, n_tokens, *cards[9, 0], Wide(17), True)
        assert shape.together == together and shape.n_registers == (255 if together else 128)
        shape = shape_for(usual, 144, n_tokens, *cards[9, 0], NEVER, True)
        assert shape.tile <= 32 and shape.n_registers == (128 if n_tokens == 16 else 255)
        assert shape == shape_for(usual, 144, n_tokens, *cards[9, 0], NEVER, False)


def test_tiles_of_64_have_the_stages_asked_for_if_they_fit():
    from ggufspec.kernels.matmul.cuda import Config
    from ggufspec.kernels.matmul.narrow import NEVER, Wide, shape_for

    config, card = Config(WM=8, MT=1, ST=2, per_sm=2), (228 << 10, 227 << 10)
    for block_bytes, most in ((144, 3), (272, 3), (512, 2)):  # as of Q4_K, Q8_0, F16
        for stages in (2, 3):
            shape = shape_for(config, block_bytes, 64, *card, Wide(17, stages), True)
            assert shape.together and shape.stages == min(stages, most)
    assert shape_for(config, 144, 64, *card, NEVER, True).stages == 2


def test_pieces_are_all_tokens_in_whole_tiles_but_the_last():
    from ggufspec.kernels.matmul.cuda import Config
    from ggufspec.kernels.matmul.narrow import NEVER, Wide, pieces_for, shape_for

    config, card = Config(WM=8, MT=1, ST=3, per_sm=2), (228 << 10, 227 << 10)
    for n_tokens in range(1, 193):
        for wide, hopper in itertools.product((Wide(17), Wide(33, 3), NEVER), (True, False)):
            *full, last = pieces_for(config, 144, n_tokens, *card, wide, hopper)
            assert bool(full) == (hopper and wide != NEVER and (64 < n_tokens <= 96 or 128 < n_tokens <= 160))
            for piece in full:
                assert (piece.first, piece.n_tokens) == (0, n_tokens // 64 * 64) and piece.shape.tile == 64
            assert last.first % last.shape.tile == 0 and last.first == sum(piece.n_tokens for piece in full)
            assert last.first + last.n_tokens == n_tokens
            assert last.shape == shape_for(config, 144, last.n_tokens, *card, wide, hopper), "compiled for fewer tokens"


def test_programs_fill_their_share_of_shared_memory():
    """As many as a config says fit a multiprocessor, with what the driver takes, and no more."""
    from ggufspec.kernels import tune
    from ggufspec.kernels.matmul.cuda import Config
    from ggufspec.kernels.matmul.narrow import spare_stages, tile_and_stages

    shared, most, driver, sums = 228 << 10, 227 << 10, 1 << 10, 1 << 10
    for entry in tune.entries((9, 0)):
        config = Config(**entry.config)
        layout = layouts.BY_NAME[entry.type_name]
        block_bytes = layout.n_bytes * 256 // layout.n_elements
        for n_tokens in (1, 16):
            tile, stages = tile_and_stages(config, block_bytes, n_tokens, shared, most)
            spare = spare_stages(config, block_bytes, tile, stages, shared, most)
            used = stages * config.n_rows * block_bytes + (stages + spare) * tile * 512
            assert config.per_sm * (used + sums + driver) <= shared < (config.per_sm + 1) * (used + driver), entry
    assert spare_stages(Config(KW=2), 144, 8, 2, shared, most) == 0
