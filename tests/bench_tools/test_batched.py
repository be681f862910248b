"""`ggufspec bench batched`: llama-batched-bench's combinations, counts and rows."""

import json
import re

import pytest
from click.testing import CliRunner
from families import make_qwen35

from ggufspec.errors import ConfigError
from ggufspec.tools.bench import command
from ggufspec.tools.bench.batched import figures, n_kv

KEYS = (
    "n_kv_max n_batch n_ubatch flash_attn is_pp_shared n_gpu_layers n_threads n_threads_batch pp tg pl n_kv t_pp "
    "speed_pp t_tg speed_tg t speed"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_qwen35(tmp_path_factory.mktemp("batched") / "m.gguf", seed=3))


def batched(*args):
    result = CliRunner().invoke(command, ["batched", *args], standalone_mode=False, catch_exceptions=False)
    return result.stdout


def test_rows(model):
    out = batched("-m", model, "-npp", "4,8", "-ntg", "2", "-npl", "1,3", "-c", "30")
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert lines[0] == (
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
    )
    assert set(lines[1]) == {"|", "-"} and len(lines[1]) == len(lines[0])
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:4] for row in rows] == [[4, 2, 1, 6], [4, 2, 3, 18], [8, 2, 1, 10], [8, 2, 3, 30]]
    assert all(len(line) == len(lines[0]) for line in lines[2:])
    assert re.search(r"main: n_kv_max = 30, n_batch = 2048, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0", out)


def test_what_does_not_fit_is_left_out(model):
    out = batched("-m", model, "-npp", "4", "-ntg", "2", "-npl", "1,3", "-c", "17")
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 3
    shared = ("-npp", "8", "-ntg", "2", "-npl", "3", "-c", "14", "-pps")
    assert len([line for line in batched("-m", model, *shared).splitlines() if line.startswith("|")]) == 2
    assert len([line for line in batched("-m", model, *shared, "-kvu").splitlines() if line.startswith("|")]) == 3


def test_nothing_that_fits_is_said(model):
    line = ["batched", "-m", model, "-npp", "8", "-ntg", "2", "-npl", "1", "-c", "9"]
    result = CliRunner().invoke(command, line, standalone_mode=False, catch_exceptions=False)
    assert "warn: nothing to run: every combination needs more than the 9 tokens of -c" in result.stderr


@pytest.mark.parametrize("flags", [(), ("-pps",), ("-tgs",), ("-pps", "-tgs")])
def test_json_lines(model, flags):
    line = json.loads(
        batched("-m", model, "-npp", "6", "-ntg", "2", "-npl", "2", "--output-format", "jsonl", *flags).splitlines()[-1]
    )
    assert list(line) == KEYS
    shared = "-pps" in flags
    assert line["n_kv"] == 16 and line["is_pp_shared"] == int(shared)
    assert line["speed_pp"] == pytest.approx((6 if shared else 12) / line["t_pp"])
    assert line["speed_tg"] == pytest.approx(4 / line["t_tg"]) and line["t"] == line["t_pp"] + line["t_tg"]


def test_figures():
    row = figures(100, 10, 4, shared=False, t_pp=2.0, t_tg=1.0)
    assert (row["speed_pp"], row["speed_tg"], row["n_kv"], row["speed"]) == (200, 40, 440, 440 / 3)
    assert n_kv(100, 10, 4, shared=True) == 440 and n_kv(100, 10, 4, shared=True, unified=True) == 140
    for unified in (False, True):  # a shared prompt is computed once, however its cells are counted
        row = figures(100, 10, 4, shared=True, t_pp=2.0, t_tg=1.0, unified=unified)
        assert (row["speed_pp"], row["speed"], row["n_kv"]) == (50, 140 / 3, 140 if unified else 440)


def test_counts_are_required(model):
    with pytest.raises(ConfigError, match="-npp: expected one or more numbers"):
        batched("-m", model, "-ntg", "2", "-npl", "1")
