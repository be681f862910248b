"""Which products of a tensor split get joints: the start of a chain that all ranks can run, an even number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ggufspec import joints
from ggufspec.kernels.matmul.cuda import Config
from ggufspec.models.layers import Addition
from ggufspec.parallel import WHOLE, Shard

OWN, FIRST = Config(ST=4), Config(WM=8)
KIND = ((9, 0), 228 << 10, 227 << 10)


def addition(shard: Shard, config: Config = OWN, **what: Any) -> Addition:
    return Addition(SimpleNamespace(launches=(SimpleNamespace(config=config),)), shard, **what)  # type: ignore[arg-type]


def layer(*additions: Addition) -> Any:
    return SimpleNamespace(additions=additions)


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Shard:
    """The second of two ranks; the first one's products can all be joined."""
    monkeypatch.setattr(joints.dist, "all_gather_object", gathered)
    monkeypatch.setattr(joints, "kind", lambda device: KIND)
    link = SimpleNamespace(boxes=torch.tensor([100, 200]))
    return Shard(1, (1.0, 1.0), link=link)  # type: ignore[arg-type]


def gathered(into: list, own: tuple, group: Any = None) -> None:
    into[:] = [(KIND, [FIRST] * 8), own]


def halves(layers: list[Any]) -> list[int | None]:
    return [a.joint.half if a.joint is not None else None for layer in layers for a in layer.additions]


def test_all_but_the_last_in_turn_and_an_even_number(shard: Shard) -> None:
    layers = [layer(addition(shard), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, shard) == 4  # of six: no norm follows the last, and five is odd
    assert halves(layers) == [0, 1, 0, 1, None, None]
    joint = layers[0].additions[0].joint
    assert (joint.rank, joint.size, joint.config) == (1, 2, FIRST) and joint.boxes is shard.link.boxes  # type: ignore


def test_what_every_rank_computes_whole_is_passed_over(shard: Shard) -> None:
    layers = [layer(addition(WHOLE), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, shard) == 2
    assert halves(layers) == [None, 0, None, 1, None, None]


@pytest.mark.parametrize("bar", ["bias", "post_norm", "launches"])
def test_a_chain_ends_where_another_launch_comes_between(shard: Shard, bar: str) -> None:
    barred = addition(shard)
    if bar == "launches":
        barred.weight.launches *= 2  # type: ignore[misc]
    else:
        setattr(barred, bar, object())
    layers = [layer(addition(shard), addition(shard)), layer(barred, addition(shard)), layer(addition(shard)) ]
    assert joints.assign(layers, shard) == 2
    assert halves(layers) == [0, 1, None, None, None]


def test_what_one_rank_cannot_do_none_does(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(into: list, own: tuple, group: Any = None) -> None:
        into[:] = [(KIND, [FIRST] * 3), own]

    monkeypatch.setattr(joints.dist, "all_gather_object", few)
    layers = [layer(addition(shard), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, shard) == 2


@pytest.mark.parametrize("own", [None, ((9, 0), 100 << 10, 99 << 10), ((8, 0), *KIND[1:])])
def test_cards_of_two_kinds_join_none(shard: Shard, monkeypatch: pytest.MonkeyPatch, own: Any) -> None:
    monkeypatch.setattr(joints, "kind", lambda device: own)
    layers = [layer(addition(shard), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, shard) == 0
    assert halves(layers) == [None] * 6


def test_cards_without_the_kernel_join_none(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(into: list, own: tuple, group: Any = None) -> None:
        into[:] = [own, own]

    monkeypatch.setattr(joints.dist, "all_gather_object", alike)
    layers = [layer(addition(shard), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, shard) == 4
    monkeypatch.setattr(joints, "kind", lambda device: None)
    assert joints.assign(layers[:], shard) == 0
    assert joints.runs_narrow(torch.device("cpu")) is False


def test_without_memory_that_ranks_map_there_are_none(shard: Shard) -> None:
    layers = [layer(addition(shard), addition(shard)) for _ in range(3)]
    assert joints.assign(layers, Shard(1, (1.0, 1.0))) == joints.assign(layers, WHOLE) == 0
    assert halves(layers) == [None] * 6
