"""Tensor and layer splits on logical CPU devices: the tokens of one device, whatever the split and the drafter."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from running import run_ranks
from streams import DRAFTERS, SAMPLINGS

from ggufspec import bundled
from ggufspec.errors import ConfigError, PlacementError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import read_config
from ggufspec.parallel import Cut, Shard
from ggufspec.placement import Placement, place_layers, resolve, shares_of, shown
from ggufspec.tools.options import parse
from ggufspec.tools.runtime import check_devices, devices_in_split, drafter_owner, start_ranks

WORKER = Path(__file__).with_name("rank_worker.py")
N_SHORT, N_LONG = 8, 24  # tokens of a stream


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """What one device makes of every stream, for a number of tokens."""
    return cache(lambda n: run_ranks(WORKER, [1.0], tmp_path_factory.mktemp("alone") / "out", str(n))[0])


def shares_in(text: str) -> list[float]:
    """The shares of the ranks that `-ts TEXT` starts: a device with share 0 takes no part."""
    names = ",".join(f"CPU{i}" for i in range(text.count(",") + 1))
    settings = parse("cli", ["-m", "x", "-sm", "tensor", "--device", names, "-ts", text])
    return [share for _, share in devices_in_split(settings.model)]


@pytest.mark.parametrize("shares", ["1,1", "4,6,6", "6,6,4", "1,0,2", "1,1,1,1"])
def test_ranks_emit_the_tokens_of_one_device(shares: str, alone: Callable[[int], dict], tmp_path: Path) -> None:
    """Plain and every drafter, greedy and sampled."""
    expected = alone(N_SHORT)["tokens"]
    assert len(expected) == sum(map(len, SAMPLINGS.values()))
    assert all(len(tokens) == N_SHORT for tokens in expected.values())
    for result in run_ranks(WORKER, shares_in(shares), tmp_path / "out", str(N_SHORT)):
        assert result["tokens"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["1,1", "4,6,6", "6,6,4", "1,0,2", "1,1,1,1"])
def test_ranks_go_on_emitting_them(shares: str, alone: Callable[[int], dict], tmp_path: Path) -> None:
    for result in run_ranks(WORKER, shares_in(shares), tmp_path / "out", str(N_LONG)):
        assert result["tokens"] == alone(N_LONG)["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "owner"), [("1,1", 1), ("6,6,4", 0)], ids=str)
def test_a_drafter_on_one_rank_drafts_for_all(shares: str, owner: int, alone: Callable[[int], dict], tmp_path: Path
                                              ) -> None:
    """The tokens of one device, and as many accepted drafts: every rank was given those of the owner. Steps are
    launched before the results of the ones before are read."""
    expected = alone(N_LONG)
    for result in run_ranks(WORKER, shares_in(shares), tmp_path / "out", str(N_LONG), str(owner), "ahead"):
        assert result["tokens"] == expected["tokens"]
        assert result["accepted"] == expected["accepted"]
        assert all(result["accepted"][f"{name} 0"] > 0 for name in DRAFTERS if name.startswith("draft-"))


def test_who_owns_a_drafter() -> None:
    """The rank of the named device, whatever its place in the list; the first for a device outside the split."""
    def owner(*arguments: str) -> int | None:
        return drafter_owner(parse("cli", ["-m", "x", "-sm", "tensor", *arguments]))

    devices = ("--device", "CPU0,CPU1,CPU2")
    assert owner(*devices) is None
    assert owner(*devices, "--device-draft", "CPU1") == 1
    assert owner(*devices, "-ts", "1,0,2", "--device-draft", "CPU2") == 1
    assert owner(*devices, "-ts", "1,0,2", "--device-draft", "CPU1") == 0
    assert owner(*devices, "-ngld", "0") == 0


def test_bounds_are_whole_units_and_cover_everything() -> None:
    for shares in ((1.0, 1.0), (4.0, 6.0, 6.0), (6.0, 6.0, 4.0), (1.0, 2.0)):
        for n, granularity in ((4, 1), (16, 2), (17408, 256), (248320, 64)):
            ranges = Shard(0, shares).bounds(n, granularity)
            if ranges is None:
                continue
            assert ranges[0][0] == 0 and ranges[-1][1] == n
            assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
            assert all(start % granularity == 0 and stop > start for start, stop in ranges)
    assert Shard(0, (4.0, 6.0, 6.0)).bounds(16, 1) == [(0, 4), (4, 10), (10, 16)]


def test_what_cannot_be_cut_is_mirrored() -> None:
    assert Cut.of(Shard(2, (1.0, 1.0, 1.0)), 2) == Cut(0, 2, True)
    assert Cut.of(Shard(1, (1.0, 1.0)), 2) == Cut(1, 2, False)


def test_layers_go_where_llama_cpp_puts_them() -> None:
    """64 layers, ratios 4,6,6: 17 layers, 24, and 23 with the output."""
    devices = [torch.device("cuda", i) for i in range(3)]
    placement = place_layers(devices, 64, 64, tensor_split=(4.0, 6.0, 6.0))
    counts = [sum(d == device for d in placement.layers) for device in devices]
    assert counts == [17, 24, 23] and placement.output == devices[2]
    partly = place_layers(devices, 64, 64, gpu_layers=10, tensor_split=(1.0, 1.0, 0.0))
    assert sum(d.type == "cpu" for d in partly.layers) == 55 and partly.output == devices[1]
    alone = place_layers(devices, 64, 64, split="none", main_gpu=1, tensor_split=(1.0, 1.0))
    assert set(alone.layers) == {devices[1]}
    none = place_layers(devices, 64, 64, split="none", main_gpu=-1)
    assert {none.embedding.type, none.output.type, *(d.type for d in none.layers)} == {"cpu"}
    with pytest.raises(PlacementError, match="main_gpu: 7"):
        place_layers(devices, 64, 64, split="none", main_gpu=7)
    with pytest.raises(PlacementError, match="negative share"):
        place_layers(devices, 64, 64, tensor_split=(1.0, -1.0))


def test_a_placement_in_words() -> None:
    one, two, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    assert shown(place_layers([one, two], 64, 64, tensor_split=(1.0, 1.0))) == (
        "layers 0 to 32 on CUDA0, 33 to 63 and the output on CUDA1"
    )
    assert shown(Placement(cpu, (cpu, two), one)) == "layers 0 on CPU0, 1 on CUDA1, the output on CUDA0"


def test_shares_say_nothing_or_what_they_mean() -> None:
    """One device has everything, whatever the shares; those missing at the end are 0, and zeros beyond do not count."""
    assert shares_of((1.0, 1.0), 1) == shares_of((0.0, 0.0), 2) == shares_of((), 3) == ()
    assert shares_of((1.0,), 3) == shares_of((1.0, 0.0, 0.0, 0.0), 3) == (1.0, 0.0, 0.0)
    for wrong in ((math.nan, 1.0), (math.inf, 1.0), (1e308, 1e308)):
        with pytest.raises(PlacementError, match="expected ratios"):
            shares_of(wrong, 2)
    with pytest.raises(PlacementError, match="4 shares for 3 devices"):
        shares_of((1.0,) * 4, 3)


def in_split(*arguments: str) -> list[tuple[str, float]]:
    return devices_in_split(parse("cli", ["-m", "x", "-sm", "tensor", *arguments]).model)


def test_the_devices_of_a_tensor_split() -> None:
    devices = ("--device", "CPU0,CPU1,CPU2")
    assert in_split(*devices) == in_split(*devices, "-ts", "0,0,0") == [("CPU0", 1), ("CPU1", 1), ("CPU2", 1)]
    assert in_split(*devices, "-ts", "1,0,2,0") == [("CPU0", 1), ("CPU2", 2)]
    assert in_split("--device", "CPU0", "-ts", "1,1") == [("CPU0", 1)]


@pytest.mark.parametrize("shares", ["nan,1", "inf,1", "1e308,1e308"])
def test_shares_are_numbers_with_a_sum(shares: str) -> None:
    with pytest.raises(ConfigError, match="expected ratios such as 4,6,6"):
        in_split("--device", "CPU0,CPU1", "-ts", shares)


def test_devices_that_a_tensor_split_cannot_have() -> None:
    first, second, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    check_devices([first, second])
    check_devices([cpu, cpu])  # logical devices
    with pytest.raises(ConfigError, match="CUDA0,CPU0 are not of one kind"):
        check_devices([first, cpu])
    with pytest.raises(ConfigError, match="named twice in CUDA0,CUDA1,CUDA0"):
        check_devices([first, second, first])


def test_a_tensor_split_leaves_no_layer_on_the_processor() -> None:
    """`-ngl` is not passed over: none is the CPU alone, some cannot be had."""
    config = read_config(open_gguf(bundled.target_path()))
    line = ["-m", "x", "--device", "CPU0,CPU1", "-sm", "tensor", "-ngl"]
    assert start_ranks(parse("cli", [*line, "0"]), config) is None
    for n in (1, config.block_count):
        with pytest.raises(PlacementError, match=f"-ngl {n}: --split-mode tensor has all"):
            start_ranks(parse("cli", [*line, str(n)]), config)


@pytest.mark.parametrize("name", ["meta", "mps"])
def test_devices_of_other_kinds_are_refused(name: str) -> None:
    with pytest.raises(PlacementError, match="not supported; expected cpu, CUDA0"):
        resolve(name)


@pytest.mark.parametrize("shares", ["1", "3", "1,2", "0,1", "5,0", "0"])
@pytest.mark.parametrize("split", ["layer", "tensor", "none"])
def test_shares_change_nothing_on_one_device(shares: str, split: str) -> None:
    """A command line that was written for several GPUs runs on one as if there were none."""
    one, numbers = torch.device("cuda", 0), tuple(map(float, shares.split(",")))
    want = place_layers([one], 64, 64, split=split)
    assert place_layers([one], 64, 64, split=split, tensor_split=numbers) == want and set(want.layers) == {one}
    model = parse("cli", ["-m", "x", "--device", "CPU0", "-sm", split, "-ts", shares]).model
    assert devices_in_split(model) == [("CPU0", 1.0)]
    for devices in ([one], [one, torch.device("cuda", 1)]):
        with pytest.raises(PlacementError, match="negative share"):
            place_layers(devices, 64, 64, split="layer", tensor_split=(-1.0, 2.0))


COMMAND = [
    sys.executable, "-c", "from ggufspec.tools.main import main; main()", "cli", "-m", str(bundled.target_path()),
    "-p", "import os", "--temp", "0", "-c", "512", "--no-display-prompt", "--device", "CPU0,CPU1",
]  # fmt: skip


@pytest.mark.slow
def test_the_command_starts_its_own_ranks() -> None:
    texts = [
        subprocess.run([*COMMAND, "-n", "16", *extra], capture_output=True, timeout=300, check=True).stdout
        for extra in (
            ["-sm", "none"], ["-sm", "layer"], ["-sm", "tensor", "-ts", "1,1", "--spec-type", "draft-mtp"],
            ["-sm", "tensor", "--spec-type", "draft-mtp", "--device-draft", "CPU1"],
            ["--device", "CPU0,CPU1,CPU2", "-sm", "tensor", "-ts", "1,0,2"],
        )
    ]
    assert all(text == texts[0] for text in texts) and len(texts[0]) > 10


@pytest.mark.slow
def test_a_dead_rank_ends_all_within_ten_seconds() -> None:
    command = [*COMMAND, "-n", "-1", "--ignore-eos", "-sm", "tensor", "-ts", "1,1"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert leader.stdout is not None and leader.stderr is not None
    leader.stdout.read(20)
    children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(leader.pid)], capture_output=True, text=True)
    follower = next(line.split()[0] for line in children.stdout.splitlines() if "ggufspec.tools.rank" in line)
    os.kill(int(follower), signal.SIGKILL)
    start = time.monotonic()
    leader.wait(30)
    assert time.monotonic() - start < 10 and leader.returncode != 0
    assert b"rank 1 ended" in leader.stderr.read()
