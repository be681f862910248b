"""Every division of a narrow product's work, whether planned or not: the bits of the tile of 8 tokens."""

import pytest
import torch
from random_blocks import random_raw

from ggufspec.kernels import matmul as mm
from ggufspec.kernels.matmul import narrow
from ggufspec.kernels.matmul.cuda import Config, Launch
from ggufspec.kernels.matmul.repack import FORMS
from ggufspec.kernels.matmul.weight import Activation, Normed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, COLUMNS, T = 1024, 2048, 192
CONFIGS = (Config(WM=8, MT=1, ST=3, per_sm=2), Config(WM=4, MT=2, ST=2, per_sm=2))  # as many warps as Hopper's, or half


def outputs(launch: Launch, ending: str, inputs: dict[str, torch.Tensor], rows: slice, **choices):
    power = inputs["power"][rows]
    a = Activation(inputs["x"][rows], COLUMNS, power)
    if ending == "rows":
        return narrow.run(launch, a, **choices)
    norm = Normed(inputs["squares"][:, rows].contiguous(), torch.empty_like(power), 1e-6)
    a = Activation(a.rows, COLUMNS, power, norm)
    if ending == "added":
        total, n = narrow.run_added(launch, a, inputs["stream"][rows], inputs["gain"], 1e-6, power, **choices)
        return [total, n.rows, n.norm.squares.T, norm.next_power]
    y = narrow.run_gated(launch, a, ending == "gelu", **choices)
    return [y.rows, y.scale, norm.next_power]


def random_inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(7)
    return {
        "x": torch.randn(T, COLUMNS, device="cuda", generator=g).half(),
        "stream": torch.randn(T, ROWS, device="cuda", generator=g),
        "gain": torch.rand(ROWS, device="cuda", generator=g) + 0.5,
        "power": torch.exp2(torch.randint(-2, 3, (T,), device="cuda", generator=g).float()),
        "squares": torch.rand(40, T, device="cuda", generator=g) * COLUMNS / 40,
    }


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's")
@pytest.mark.parametrize("type_name", ("Q4_K", "Q8_0"))
def test_tiles_of_64_have_those_bits_every_time(type_name):
    launch = mm.fuse([mm.pack(random_raw(type_name, ROWS, COLUMNS), type_name, (ROWS, COLUMNS), "cuda")]).launches[0]
    inputs, config = random_inputs(), CONFIGS[0]
    shared, most = narrow.card(torch.cuda.current_device())[1:]
    for ending in ("rows", "silu"):
        narrowest = narrow.shape_for(config, launch.block_bytes, 8, shared, most, narrow.NEVER, True)
        kept = outputs(launch, ending, inputs, slice(0, T), config=config, shape=narrowest)
        for stages in (2, 3):
            shape = narrow.shape_for(config, launch.block_bytes, T, shared, most, narrow.Wide(17, stages), True)
            assert shape.together and shape.stages == stages
            for width, at in ((T, 0), (33, 5), (70, 100), (1, 7)) * 3:  # a race need not show in the first run
                part = slice(at, at + width)
                for y, e in zip(outputs(launch, ending, inputs, part, config=config, shape=shape), kept):
                    assert torch.equal(y, e[part]), (ending, shape, width)


@pytest.mark.parametrize("type_name", ("Q4_K", "Q8_0"))
def test_what_is_planned_has_the_bits_of_the_tile_of_8(type_name):
    """Two launches for 65 to 96 and 129 to 160 tokens, where tiles of 64 are planned."""
    launch = mm.fuse([mm.pack(random_raw(type_name, ROWS, COLUMNS), type_name, (ROWS, COLUMNS), "cuda")]).launches[0]
    inputs, config = random_inputs(), CONFIGS[0]
    shared, most = narrow.card(torch.cuda.current_device())[1:]
    hopper = torch.cuda.get_device_capability()[0] == 9
    for ending in ("rows", "silu", "gelu", "added"):
        narrowest = narrow.shape_for(config, launch.block_bytes, 8, shared, most, narrow.NEVER, hopper)
        kept = outputs(launch, ending, inputs, slice(0, T), config=config, shape=narrowest)
        for width, at in ((65, 0), (72, 100), (81, 3), (96, 7), (97, 9), (129, 0), (146, 40), (160, 32), (161, 31)):
            part = slice(at, at + width)
            for y, e in zip(outputs(launch, ending, inputs, part, config=config), kept):
                assert torch.equal(y, e[part]), (ending, width)


@pytest.mark.parametrize("config", CONFIGS, ids=("8 warps", "4 warps"))
@pytest.mark.parametrize("type_name", FORMS)
def test_wide_tiles_have_the_bits_of_the_tile_of_8(type_name, config):
    launch = mm.fuse([mm.pack(random_raw(type_name, ROWS, COLUMNS), type_name, (ROWS, COLUMNS), "cuda")]).launches[0]
    inputs = random_inputs()
    shared, most = narrow.card(torch.cuda.current_device())[1:]
    hopper = torch.cuda.get_device_capability()[0] == 9
    for ending in ("rows", "silu", "gelu", "added"):
        stages = 2 if ending == "rows" else 3
        own = narrow.Wide(17, stages) if ending != "added" else narrow.NEVER  # as `gluon.narrow` says of TOGETHER
        narrowest = narrow.shape_for(config, launch.block_bytes, 8, shared, most, narrow.NEVER, hopper)
        kept = outputs(launch, ending, inputs, slice(0, T), config=config, shape=narrowest)
        for width, at in ((T, 0), (33, 5), (32, 64), (70, 100), (7, 3)):
            for wide in {own, narrow.NEVER}:
                shape = narrow.shape_for(config, launch.block_bytes, width, shared, most, wide, hopper)
                part = slice(at, at + width)
                for y, e in zip(outputs(launch, ending, inputs, part, config=config, shape=shape), kept):
                    assert e.isfinite().all()
                    assert torch.equal(y, e[part]), (ending, shape, width)
