"""What `measure.py` makes of its measurements, on any machine; the measurements themselves at tiny sizes."""

import argparse
import json
import sys
import time
from pathlib import Path

import drafted
import measure
import pytest
import serving_rate
from crowd import STEPS_BEFORE, Crowd, Window, expected_length
from families import make_dflash, make_qwen35
from measure import Report, depth_rows, run_part, server_rows
from session import Session, Table

from ggufspec.adaptive import adaptive_for
from ggufspec.tools.bench.attach import Bench, parse_drafter
from ggufspec.tools.settings import ModelSettings, Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from two_engines import replayed  # noqa: E402


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    make_qwen35(folder / "t.gguf", seed=3)
    make_dflash(folder / "ds.gguf", kind="dspark", seed=3)
    made = Bench.load(Settings(model=ModelSettings(path=str(folder / "t.gguf"))), 3, 256, show_progress=False)
    made.dspark = parse_drafter(f"dspark={folder / 'ds.gguf'}")
    return made


def crowd_of(bench, ahead, kind="dspark"):
    """ahead: with captured steps, one step ahead of the host, as on a GPU."""
    choice = bench.dspark if kind == "dspark" else parse_drafter("mtp")
    engine = bench.engine(bench.load_drafter(choice, 5), ignore_eos=True)
    engine.decoder.ahead = ahead
    return Crowd(replayed(engine) if ahead else engine)


# -- live streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["dspark", "mtp"])
def test_a_window_holds_steps_of_its_own_setting_alone(bench, ahead, kind):
    """Lengths and acceptance change between windows, streams join; no step of another setting is counted."""
    crowd = crowd_of(bench, ahead, kind)
    for n_streams in (1, 3):
        crowd.grow(n_streams)
        for n, right in ((2, 1.0), (0, 1.0), (crowd.most, 0.0), (crowd.most, 1.0), (1, 0.0)):
            crowd.use(n, [right] * crowd.most)
            crowd.run(1, STEPS_BEFORE - 1)
            before = n_captured(crowd)
            window = crowd.run(4, 0)
            assert n_captured(crowd) == before  # nothing is captured while it is timed
            assert (window.n_streams, window.n_steps, window.widths) == (n_streams, 4, {n: 4})
            assert window.n_tokens == n_streams * 4 * (1 + right * n)
            assert window.drawn_length == window.length([right] * crowd.most) == 1 + right * n
            assert window.rate([right] * crowd.most) == pytest.approx(window.drawn_rate)
    crowd.end()
    assert crowd.engine.idle


@pytest.mark.parametrize("ahead", [False, True])
def test_streams_begin_every_window_at_their_prompts_ends(bench, ahead):
    crowd = crowd_of(bench, ahead)
    crowd.grow(2)
    for _ in range(8):  # 8 windows of 42 tokens would not fit 256
        crowd.use(crowd.most, [1.0] * crowd.most)
        assert crowd.room() == 256 - 32 - 1 and [s.n_past for s in crowd.engine.slots[:2]] == [32, 32]
        crowd.run(4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_policy_has_its_times_and_decides(bench, ahead):
    crowd = crowd_of(bench, ahead)
    policy = adaptive_for(crowd.engine.drafter)
    crowd.grow(2)
    rates = [0.0] * crowd.most
    crowd.use(None, rates, policy)
    crowd.take_times()
    assert all(policy.costs.known(2, 1, n) for n in policy.widths if n) and policy.costs.known(2, 0, 0)
    assert not policy.forced and policy.n_steps > 0
    crowd.use(None, rates, policy)
    before, chosen = n_captured(crowd), crowd.run(10, 0).widths
    assert n_captured(crowd) == before
    assert sum(chosen.values()) == 10 and set(chosen) <= set(policy.widths)  # which: the machine decides
    crowd.use(3, rates)
    assert crowd.run(2).widths == {3: 2}


def n_captured(crowd):
    graphs = crowd.engine.decoder.graphs
    return 0 if graphs is None else len(graphs.captured)


def window(seconds, widths, n_tokens=None, n_streams=2):
    n_steps = sum(widths.values())
    return Window(n_streams, n_steps, n_tokens or n_streams * n_steps, seconds, widths, 1.0, 2.0, 0.5)


def test_rates_at_the_acceptance_asked_for():
    """Half of the steps drafted 3 tokens that are right with 1/2, 1/4, 1/8; the others were plain ones."""
    rates = [0.5, 0.25, 0.125]
    both = window(0.5, {3: 10}, 36).joined(window(0.3, {0: 10}, 20))
    assert (both.n_steps, both.widths, both.drafted, both.step_ms) == (20, {3: 10, 0: 10}, 1.5, pytest.approx(40))
    assert expected_length(rates, 3) == 1.875 and both.length(rates) == pytest.approx((1.875 + 1) / 2)
    assert both.rate(rates) == pytest.approx(2 * 1.4375 / 0.04)
    assert both.drawn_rate == pytest.approx(56 / 0.8) and both.drawn_length == pytest.approx(56 / 40)
    assert window(1.0, {0: 4}).joined(window(1.0, {0: 1})).draft_ms == 1.0


# -- tables ------------------------------------------------------------------------------------------------------


def test_the_table_of_lengths():
    rates = [0.8, 0.6]
    row = drafted.window_row("mtp", 2, rates, window(0.6, {0: 100}, 100, 1), window(0.8, {2: 100}, 250, 1))
    shown = dict(zip(drafted.SWEEP_HEADS, drafted.sweep_row(row)))
    assert shown["length"] == "2.400" and shown["drawn"] == "2.500" and shown["step ms"] == "8.00"
    assert shown["plain ms"] == "6.00" and shown["ms/token"] == "3.33" and shown["decode x"] == "1.80"
    assert shown["tok/s"] == "300.0" and shown["drawn tok/s"] == "312.5"


def test_auto_against_the_best_fixed_length():
    rates = [0.9, 0.81]
    cells = {
        "plain": window(0.10, {0: 10}), "n=0": window(0.11, {0: 10}), "n=1": window(0.12, {1: 10}),
        "n=2": window(0.14, {2: 10}), "auto": window(0.15, {2: 9, 0: 1}), "at first": window(0.13, {0: 10}),
    }  # fmt: skip
    found = drafted.adaptive_cell("mtp", "code", rates, cells)
    assert found["best"] == "n=2" and found["streams"] == 2 and found["drafted"] == pytest.approx(1.8)
    assert found["of_best"] == pytest.approx(((9 * 2.71 + 1) / 0.15) / (10 * 2.71 / 0.14))
    assert found["of_plain"] == pytest.approx(((9 * 2.71 + 1) / 0.15) / (10 / 0.10))
    shown = drafted.adaptive_row(found)
    heads = (*drafted.ADAPTIVE_HEADS, "n=0", "n=1", "n=2", *drafted.ADAPTIVE_LAST)
    assert len(shown) == len(heads)
    named = dict(zip(heads, shown))
    assert (named["plain"], named["n=0"], named["n=2"], named["acceptance"]) == ("200", "182", "387", "code 0.9")
    slow = drafted.adaptive_cell("mtp", "prose", [0.1, 0.01], cells | {"n=2": window(0.5, {2: 10})})
    assert slow["best"] == "plain"  # no drafts at all is a fixed length too


def test_depths_are_compared_with_depth_0_of_the_same_round():
    samples = {("q8_0", 0): [100.0, 50.0, 80.0], ("f16", 0): [120.0], ("q8_0", 32768): [90.0, 46.0, 70.0]}
    rows = [{"type_k": kind, "n_depth": at, "samples_ts": found} for (kind, at), found in samples.items()]
    assert depth_rows(rows) == [
        ["f16", "0", "120.0", "1.000"], ["q8_0", "0", "80.0", "1.000"], ["q8_0", "32768", "70.0", "0.900"]
    ]  # fmt: skip


def load(streams, together, median=50.0):
    return {"streams": streams, "together_median": together, "stream_median": median, "total": 10.0,
            "first_ms_median": 3.0, "accepted": 0.4}  # fmt: skip


def test_servers_are_compared_with_plain_ones_of_as_many_streams():
    found = {"plain": [load(1, 100.0), load(24, 40.0)], "mtp": [load(1, 150.0), load(24, None)]}
    rows = [dict(zip(measure.SERVER_HEADS, row)) for row in server_rows(found)]
    assert [row["x plain"] for row in rows] == ["1.00", "1.00", "1.50", "1.25"]
    assert rows[3]["a stream, all decoding"] == "50.0 *"  # they never decoded together: from first to last token


def test_figures_of_streams():
    """The first stream has 20 tokens before the second begins; each has one every 1/64 s."""
    early = {"times": [i / 64 for i in range(1, 61)], "counts": [1] * 60}
    late = {"times": [(20 + i) / 64 for i in range(1, 61)], "counts": [1] * 60}
    for one in (early, late):
        one.update(rate=99.0, first_s=one["times"][0], tokens=60, timings={"draft_n": 70, "draft_n_accepted": 28})
    found = serving_rate.figures([early, late], 1.25)
    assert found["together_median"] == 64.0 and found["together_s"] == 39 / 64
    assert found["accepted"] == pytest.approx(0.4) and found["total"] == 96.0
    assert found["first_ms_median"] == 1000 * 11 / 64
    late["times"] = [t + 1.0 for t in late["times"]]
    apart = serving_rate.figures([early, late], 2.25)
    assert apart["together_median"] is None
    both = serving_rate.median_of([found, apart, apart])
    assert both["seconds"] == 2.25 and both["together_median"] == 64.0 and both["rates"] == [99.0] * 6


def test_tables_as_text_and_markdown():
    rows = [["a|b", "1"]]
    table = Table("T", ["name", "x"], rows)
    rows.append(["c"])  # the part goes on with its list
    more = Table("T", ["name", "x"], rows)
    assert table.markdown() == "T\n\n| name | x |\n|---|---|\n| a\\|b | 1 |" and len(table.rows) == 1
    assert more.markdown().endswith("| c |  |") and more.after(table).rows == (("c",),)
    changed = Table("T", ["name", "x"], [["a", "2"], ["c"]])
    assert changed.after(table) is changed


# -- what stays of a run -----------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    options = argparse.Namespace(smoke=True, out=tmp_path, target="t", q8="q", dspark="d", dflash2="e", drafters="mtp")
    return Session(options, is_bundled=True)


def test_every_measurement_is_on_disk_before_the_next(session, monkeypatch, tmp_path):
    seen = []

    def part(session, data):
        """A part."""
        for i in range(3):
            data["n"] = i
            yield Table("T", ("i",), [[str(k)] for k in range(i + 1)])
            seen.append((json.loads((tmp_path / "x.json").read_text())["n"], (tmp_path / "tables.md").read_text()))

    monkeypatch.setattr(measure, "PARTS", {"x": part})
    assert run_part("x", session, 60)
    assert [n for n, _ in seen] == [0, 1, 2]
    assert seen[0][1] == "## x: A part.\n\nNot finished.\n\nT\n\n| i |\n|---|\n| 0 |\n"
    assert (tmp_path / "tables.md").read_text() == "## x: A part.\n\nT\n\n| i |\n|---|\n| 0 |\n| 1 |\n| 2 |\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tables.md", "x.json", "x.md", "x.txt"]


@pytest.mark.parametrize("how", ["slow", "stuck", "fails"])
def test_what_was_found_stays(session, monkeypatch, tmp_path, how):
    def part(session, data):
        data["found"] = 1
        yield Table("T", ("i",), [["1"]])
        if how == "fails":
            raise RuntimeError("the card fell off")
        if how == "stuck":
            time.sleep(20)
        time.sleep(0.12)
        yield "second"
        yield "third"

    monkeypatch.setattr(measure, "PARTS", {"x": part})
    start = time.monotonic()
    assert not run_part("x", session, 0.1)
    assert time.monotonic() - start < 10
    data, said = json.loads((tmp_path / "x.json").read_text()), (tmp_path / "x.txt").read_text()
    assert data["found"] == 1 and data["is_whole"] is False and "| 1 |" in (tmp_path / "x.md").read_text()
    word = {"slow": "the limit of 0.1 s is over", "stuck": "1.5 times the limit", "fails": "the card fell off"}[how]
    assert word in said and "third" not in said


def test_tables_of_all_parts_in_the_folder(tmp_path):
    for name in ("server", "spec"):  # the order of PARTS, not of the runs
        report = Report(name, f"about {name}", tmp_path)
        report.say(Table("T", ("i",), [[name]]))
        report.data["is_whole"] = True
        report.write()
    text = (tmp_path / "tables.md").read_text()
    assert text.index("## spec: about spec") < text.index("## server: about server")


@pytest.mark.slow
def test_parts_at_tiny_sizes(session, tmp_path):
    for name in ("width", "batched", "prefill", "depth", "sweep", "adaptive", "server", "server_auto"):
        assert run_part(name, session, 120), (tmp_path / f"{name}.txt").read_text()
    for name, modes in (("server", ("plain", "dspark,n=7", "mtp,n=1")), ("server_auto", ("plain", "dspark,n=auto"))):
        found = json.loads((tmp_path / f"{name}.json").read_text())["found"]
        assert {mode: len(loads) for mode, loads in found.items()} == {mode: 2 for mode in modes}
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    longest = {"dflash2": 7, "dspark": 7, "mtp": 8}
    assert {(row["drafter"], row["n"]) for row in rows} == {(d, n) for d, m in longest.items() for n in range(1, m + 1)}
