"""A layer split over logical CPU devices: the tokens of one device, whatever the shares, the drafter and its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from streams import DRAFTERS, SAMPLINGS, answer, make_drafter

from ggufspec import bundled
from ggufspec.engine import Engine
from ggufspec.gguf_file import open_gguf
from ggufspec.models import Model, load_model, read_config
from ggufspec.placement import device_name, devices_of
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools.options import parse
from ggufspec.tools.runtime import place
from ggufspec.weights import Weights

N_TOKENS = 10
N_UBATCH = 8  # the prompt is several chunks
FILE = open_gguf(bundled.target_path())
CONFIG = read_config(FILE)
TOKENIZER = Tokenizer.from_metadata(FILE.metadata)


def loaded(shares: str) -> tuple[Model, Weights, list[torch.device]]:
    """The target as `-ts SHARES` puts it on as many CPU devices, and these."""
    names = [f"CPU{i}" for i in range(shares.count(",") + 1)]
    model = parse("cli", ["-m", "x", "-sm", "layer", "--device", ",".join(names), "-ts", shares]).model
    weights = Weights(FILE)
    return load_model(FILE, place(model, CONFIG), weights=weights), weights, devices_of(model.devices)


def streams(model: Model, weights: Weights, names: Sequence[str] = tuple(DRAFTERS), device: torch.device | None = None
            ) -> dict[str, list[int]]:
    """The tokens of drafters' streams; device: the drafters'."""
    found = {}
    for name in names:
        drafter = make_drafter(name, FILE, model, weights, 256, device)
        for sampling in SAMPLINGS[name]:
            engine = Engine(model, TOKENIZER, drafter=drafter, n_ctx=256, n_ubatch=N_UBATCH)
            if drafter is not None:
                drafter.reset(0)
            found[f"{name} {sampling.temperature}"] = answer(engine, TOKENIZER, sampling, N_TOKENS)
            assert not name.startswith("draft-") or engine.stats.draft_n > 0
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    model, weights, _ = loaded("1")
    assert len(model.stages) == 1
    return streams(model, weights)


@pytest.mark.parametrize(
    ("shares", "places"),
    [
        ("1,1", "00000111 1"), ("4,6,6", "00011112 2"), ("6,6,4", "00001111 2"), ("1,0,2", "00002222 2"),
        ("1,1,1,1", "00011222 3"),
    ],
)
def test_the_tokens_of_one_device(shares: str, places: str, alone: dict[str, list[int]]) -> None:
    """Plain and every drafter, greedy and sampled, with the output; the drafters with a model on the first device too.

    places: the devices of the layers and of the output.
    """
    model, weights, devices = loaded(shares)
    found = [str(devices.index(device)) for device in [*(layer.device for layer in model.layers), model.device]]
    assert "".join([*found[:-1], " ", found[-1]]) == places
    assert len(model.stages) == len(set(places[:-2]))
    assert streams(model, weights) == alone
    drafting = [name for name in DRAFTERS if name.startswith("draft-")]
    elsewhere = streams(model, weights, drafting, devices[0])
    assert elsewhere == {key: alone[key] for key in elsewhere}


def test_logical_devices_have_their_names() -> None:
    assert [device_name(device) for device in devices_of(("CPU0", "cpu", "CPU2"))] == ["CPU0", "CPU0", "CPU2"]
