"""`ggufspec bench spec`: streams at constant width, figures from runs, drafters in turn, the page."""

import json
import re
import xml.dom.minidom
from dataclasses import replace

import pytest
from click.testing import CliRunner
from families import make_dflash, make_qwen35

from ggufspec.drafters.synth import rates_of_length
from ggufspec.engine import EngineStats
from ggufspec.errors import ConfigError, FileError, PlacementError
from ggufspec.sampling import SamplingParams
from ggufspec.tools.bench import command, plots, report, spec_table
from ggufspec.tools.bench.attach import Bench, default_drafters, natural_n_max, parse_drafter, set_width
from ggufspec.tools.bench.origin import origin
from ggufspec.tools.bench.report import page
from ggufspec.tools.bench.spec import Plan, measure
from ggufspec.tools.bench.steady import Run, accept_at_random, run_streams
from ggufspec.tools.bench.summary import Pair, Spread, parity_text, summarize
from ggufspec.tools.bench.workloads import WORKLOADS, choose, own_prompts, read_prompts
from ggufspec.tools.settings import ModelSettings, Settings

PROMPTS = [list(range(5, 17)), list(range(40, 49)), list(range(20, 44))]
GREEDY = SamplingParams(temperature=0.0, seed=1)
ORIGIN = origin([])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spec")
    make_qwen35(folder / "t.gguf", seed=3, follow=1.5)
    make_dflash(folder / "ds.gguf", kind="dspark", follow=1.5, seed=3)
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return Bench.load(Settings(model=ModelSettings(path=str(folder / "t.gguf"))), 3, 256, show_progress=False)


def drafted(bench, folder, kind="mtp", n_max=3):
    choice = parse_drafter(kind if kind == "mtp" else f"{kind}={folder / 'ds.gguf'}")
    return bench.engine(bench.load_drafter(choice, n_max), ignore_eos=True)


def test_streams_keep_their_width(bench, folder):
    """Every step decodes all streams and drafts the full width; all have their tokens at the end."""
    engine = drafted(bench, folder)
    run = run_streams(engine, PROMPTS, 20, [GREEDY] * 3)
    assert min(len(t) for t in run.tokens) >= 20
    assert run.stats.n_slots_decoded == 3 * run.stats.n_decode == run.stats.n_drafts
    assert run.stats.draft_n == 3 * 3 * run.stats.n_decode
    assert sum(run.n_tokens) == run.stats.n_drafts + run.stats.draft_n_accepted
    assert [len(t) - 1 for t in run.tokens] == run.n_tokens or sum(run.n_tokens) < sum(map(len, run.tokens))
    assert engine.idle and 0 < run.stats.draft_n_accepted


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_leave_the_streams_alone(bench, folder, kind, temperature):
    sampling = [replace(GREEDY, temperature=temperature, seed=7 + i) for i in range(3)]
    plain = run_streams(bench.engine(None, ignore_eos=True), PROMPTS, 16, sampling)
    other = run_streams(drafted(bench, folder, kind), PROMPTS, 16, sampling)
    assert parity_text([Pair(plain, other)], False) == "equal"
    other.tokens[1][5] += 1
    assert parity_text([Pair(plain, other)], False).startswith("1 of 3 differ (stream 1, token 5: ")


def test_synthetic_acceptance_has_the_length_asked_for(bench, folder):
    engine = drafted(bench, folder, "dspark", 5)
    accept_at_random(engine, rates_of_length(3.0, 5))
    n_drafts = n_accepted = 0
    seen = set()
    for nth in range(3):
        stats = run_streams(engine, PROMPTS, 80, [replace(GREEDY, seed=i) for i in range(3)], nth).stats
        n_drafts, n_accepted = n_drafts + stats.n_drafts, n_accepted + stats.draft_n_accepted
        seen.add((stats.n_decode, *stats.accepted_at))
    assert 1 + n_accepted / n_drafts == pytest.approx(3.0, abs=0.3)
    assert len(seen) == 3  # another run, other random numbers


def test_too_little_room_is_refused(bench):
    with pytest.raises(ConfigError, match="3 slots of 256 tokens"):
        run_streams(bench.engine(None, ignore_eos=True), PROMPTS, 250, [GREEDY] * 3)


def test_a_tensor_split_is_refused(folder, monkeypatch):
    from ggufspec.tools.bench import attach

    monkeypatch.setattr(attach, "devices_of", lambda names: ["cuda:0", "cuda:1"])
    settings = Settings(model=ModelSettings(path=str(folder / "t.gguf"), split_mode="tensor"))
    with pytest.raises(PlacementError, match="--split-mode tensor over 2 devices takes a process a device"):
        Bench.load(settings, 1, 256, show_progress=False)


def test_a_width_is_the_drafters_own(bench, folder):
    """A block drafter set to n drafts what one loaded with n drafts."""
    wide = drafted(bench, folder, "dspark", 7)
    assert set_width(wide, 3) == 3 and set_width(wide, 99) == wide.drafter.backbone.config.n_limit
    set_width(wide, 3)
    a = run_streams(wide, PROMPTS, 24, [GREEDY] * 3)
    b = run_streams(drafted(bench, folder, "dspark", 3), PROMPTS, 24, [GREEDY] * 3)
    assert (a.stats.draft_n, a.stats.accepted_at) == (b.stats.draft_n, b.stats.accepted_at)


def fake(ms, n, steps=10, **stats):
    counts = EngineStats(n_decode=steps, n_drafts=steps, **stats)
    return Run([n], ms, 5.0, counts, [list(range(n + 1))])


def test_summary_of_known_runs():
    drafts = dict(draft_n=30, draft_n_accepted=12, accepted_at=[8, 3, 1], draft_ms=20.0, verify_ms=60.0, sample_ms=5.0)
    pairs = [Pair(fake(200.0, 20, 20), fake(ms, 22, **drafts)) for ms in (100.0, 110.0, 121.0)]
    cell = summarize(pairs, drafter="x", n_max=3, temperature=0, n_streams=1, workload="code", is_synthetic=False)
    assert cell.mean_length == pytest.approx(2.2) and cell.accept_rate == pytest.approx(0.4)
    assert cell.accepted_per_position == pytest.approx([0.8, 0.3, 0.1])
    assert (cell.draft_ms.median, cell.verify_ms.median, cell.sample_ms.median) == (2.0, 6.0, 0.5)
    assert cell.step_ms == Spread(11.0, 10.5, 11.55) and cell.host_ms.median == pytest.approx(2.5)
    assert cell.decode_speedup.median == pytest.approx(10 / (110 / 22))
    assert cell.wall_speedup.median == pytest.approx((205 / 21) / (115 / 23))
    assert cell.stream_tokens_per_second.median == pytest.approx(1000 * 22 / 110) and cell.parity == "equal"


@pytest.mark.slow
def test_measure_every_combination(bench, folder):
    choices = [parse_drafter("mtp"), parse_drafter(f"dspark={folder / 'ds.gguf'},synth-len=2.5")]
    plan = Plan(choices, [2, 4], [1.0], [1, 3], {"a": PROMPTS[:2], "b": PROMPTS[2:]}, 4, 1, GREEDY, True)
    kept = []
    results = measure(bench, plan, show_progress=False, on_drafter=lambda r: kept.append(len(r.cells)))
    key = [(c.drafter, c.n_max, c.temperature, c.n_streams, c.workload) for c in results.cells]
    assert len(key) == len(set(key)) == 2 * 2 * 2 * 3 and kept == [12, 24]
    assert {c.parity for c in results.cells if c.drafter == "mtp"} == {"equal"}
    assert {c.parity for c in results.cells if c.drafter == "dspark"} == {"synthetic"}
    assert [(p["n_max"], p["temperature"], p["result"]) for p in results.parity] == [(2, 0, "equal"), (4, 0, "equal")]
    for cell in results.cells:
        rates = cell.accepted_per_position
        assert len(rates) == cell.n_max and rates == sorted(rates, reverse=True)
        assert cell.mean_length == pytest.approx(1 + sum(rates))
        assert cell.n_runs == {"a": 1 if cell.n_streams > 1 else 2, "b": 1}.get(cell.workload, cell.n_runs)


def test_lengths_decided_before_every_step(bench, folder):
    """A fixed length and `auto` in one sweep: the same streams, lengths that vary, nothing left behind for others."""
    choice = parse_drafter(f"dspark={folder / 'ds.gguf'}")
    plan = Plan([choice], [2, "auto", 3], [0.0], [1, 2], {"a": PROMPTS[:2]}, 16, 1, GREEDY, True)
    cells = measure(bench, plan, show_progress=False).cells
    assert [(c.n_max, c.n_streams) for c in cells] == [(n, np) for n in (2, "auto", 3) for np in (1, 2)]
    assert {c.parity for c in cells} == {"equal"}
    for cell in cells:
        fixed = isinstance(cell.n_max, int)
        most = natural_n_max(choice)
        assert cell.drafted_per_step == cell.n_max if fixed else 0 <= cell.drafted_per_step <= most, cell
        assert spec_table.length(cell) == (str(cell.n_max) if fixed else f"auto ({cell.drafted_per_step:.1f})")
    drawn = page({"origin": ORIGIN, "n_tokens": 16, "repetitions": 1, "seed": 1, "parity": [], "split": [],
                  "cells": [c.as_dict() for c in cells]})  # fmt: skip
    assert "dspark auto" in drawn and "Decode speedup against draft length" in drawn


def test_rates_change_under_a_step_that_is_kept(bench, folder):
    """The tensor that a captured step reads stays where it is."""
    engine = drafted(bench, folder, "dspark")
    accept_at_random(engine, [1.0, 1.0, 1.0])
    place = engine.decoder.synthetic.conditional.data_ptr()
    assert run_streams(engine, PROMPTS[:1], 20, [GREEDY]).stats.accepted_at[2] > 0
    accept_at_random(engine, [0.0, 0.0, 0.0])
    assert engine.decoder.synthetic.conditional.data_ptr() == place
    assert run_streams(engine, PROMPTS[:1], 20, [GREEDY]).stats.draft_n_accepted == 0


def test_the_command_writes_table_json_and_page(folder, tmp_path):
    out = CliRunner().invoke(
        command,
        ["spec", "-m", str(folder / "t.gguf"), "--drafter", "mtp,n=2", "--drafter", f"{folder / 'ds.gguf'},n=3", "-n",
         "5", "-r", "1", "--n-prompts", "1", "-np", "1,2", "--workload", "code,chat", "--split", "-c", "512",
         "--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html")],
        standalone_mode=False, catch_exceptions=False,
    )  # fmt: skip
    assert out.return_value == 0 and re.search(r"file +t\.gguf \(\d+ bytes, sha256 [0-9a-f]{64}\)", out.stdout)
    data = json.loads((tmp_path / "o.json").read_text())
    assert {c["drafter"] for c in data["cells"]} == {"mtp", "draft-dspark"} and len(data["cells"]) == 12
    assert all(c["parity"] == "equal" for c in data["cells"])
    for cell in data["cells"]:  # every length, temperature and number of streams has its line of positions
        shares = " +".join(f"{share:.3f}" for share in cell["accepted_per_position"])
        line = rf"^{cell['drafter']} +{cell['n_max']} +0 +{cell['n_streams']} +{shares}$".replace(".", r"\.")
        assert cell["workload"] != "all" or re.search(line, out.stdout, re.M), line
    for entry in data["split"]:
        assert {"matmul", "head", "attention"} <= set(entry["verify"]) and "gdn" in entry["verify"]
    page = (tmp_path / "o.html").read_text()
    assert "Plots are of temperature 0 and, where streams are not an axis, of\n1 at once; a step in parts" in page
    assert not re.search(r"https?:|<script|@import|url\(", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) == 9
    for picture in pictures:
        xml.dom.minidom.parseString(picture)


def test_differing_streams_fail_the_command(folder, monkeypatch):
    from ggufspec.tools.bench import spec

    monkeypatch.setattr(spec, "parity_text", lambda pairs, synthetic: "1 of 1 differ (somewhere)")
    out = CliRunner().invoke(
        command,
        ["spec", "-m", str(folder / "t.gguf"), "-n", "4", "-r", "1", "--n-prompts", "1", "--workload", "code"],
        standalone_mode=False, catch_exceptions=False,
    )  # fmt: skip
    assert out.return_value == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("mtp,n", "is not one of n="),
        ("mtp,m=3", "is not one of n="),
        ("mtp,n=three", "expected numbers"),
        ("/nowhere.gguf", "--drafter /nowhere.gguf: neither a drafter nor a file; expected TYPE, TYPE=FILE or FILE"),
        ("foo,n=3", "--drafter foo: neither a drafter nor a file"),
        ("mtp,p-min=7", "--drafter mtp,p-min=7: p-min is a probability; expected 0 to 1"),
        ("mtp,n=auto,m=3", "is not one of n="),
    ],
)
def test_bad_drafters(text, message):
    from ggufspec.errors import GgufspecError

    with pytest.raises(GgufspecError, match=re.escape(message)):
        parse_drafter(text)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_files_that_cannot_be_written_are_refused_first(option, monkeypatch):
    from ggufspec.tools.bench import spec

    monkeypatch.setattr(spec.Bench, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(FileError, match="/nowhere/o: cannot be written: there is no folder /nowhere"):
        CliRunner().invoke(command, ["spec", option, "/nowhere/o"], standalone_mode=False, catch_exceptions=False)


def test_a_length_without_measure_is_lowered(folder):
    """Room is made for what a step can draft, not for what was asked for."""
    out = CliRunner().invoke(
        command,
        ["spec", "-m", str(folder / "t.gguf"), "-n", "4", "-r", "1", "--n-prompts", "1", "--workload", "code",
         "--n-max", "1000000000"], standalone_mode=False, catch_exceptions=False,
    )  # fmt: skip
    assert out.return_value == 0 and re.search(r"^mtp +16 ", out.stdout, re.M), out.stdout


def test_drafters_by_file_and_by_default(folder, bench):
    found = parse_drafter(f"{folder / 'ds.gguf'},n=5,synth-rates=0.5/0.25/0.1/0.1/0")
    assert (found.kind, found.n_max, found.synth_rates) == ("draft-dspark", 5, (0.5, 0.25, 0.1, 0.1, 0.0))
    assert found.rates(5) == [0.5, 0.25, 0.1, 0.1, 0.0]
    assert parse_drafter("mtp,synth-p=0.5").rates(3) == [0.5, 0.25, 0.125]
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        parse_drafter("mtp,synth-p=1.5").rates(1)
    assert [c.kind for c in default_drafters(bench.file, False)] == ["draft-mtp"]
    with pytest.raises(ConfigError, match="an ordinary model; write draft-simple="):
        parse_drafter(str(make_qwen35(folder / "plain.gguf", mtp=False)))


def test_llama_cpps_options_reach_the_bench(folder, monkeypatch):
    """Spelled as for the server: drafter, lengths, synthetic acceptance; what has no effect says so."""
    from ggufspec.tools.bench import spec

    seen = {}

    def stop(bench, plan, **rest):
        seen.update(plan=plan, bench=bench)
        raise ConfigError("enough")

    monkeypatch.setattr(spec, "measure", stop)
    line = (
        f"-m {folder / 't.gguf'} --spec-type draft-mtp,draft-dspark -md {folder / 'ds.gguf'} --spec-draft-n-max 2 "
        "--spec-synth-len 2.5 -ctk q8_0 --spec-draft-p-min 0.1 --top-k 7 --n_predict 6 --grammar x --parallel 2"
    )
    with pytest.raises(ConfigError, match="enough"):
        CliRunner().invoke(command, ["spec", *line.split()], standalone_mode=False, catch_exceptions=False)
    plan, bench = seen["plan"], seen["bench"]
    assert [(c.kind, c.synth_length) for c in plan.drafters] == [("draft-mtp", 2.5), ("draft-dspark", 2.5)]
    assert (plan.n_max, plan.n_tokens, plan.streams, plan.ignore_eos, plan.sampling.top_k) == ([2], 6, [2], True, 7)
    assert bench.settings.context.type_k == "q8_0" and bench.n_slots == 2
    assert bench.load_drafter(plan.drafters[0], 2).options.p_min == 0.1
    assert spec.command.unread(bench.settings) == ["--grammar"]


def test_workloads(tmp_path):
    prompts = own_prompts()
    assert set(choose(prompts, (), 4)) == set(WORKLOADS) and all(len(p) == 4 for p in choose(prompts, (), 4).values())
    assert list(choose(prompts, ("json",), 2)) == ["json"] and len(choose(prompts, ("json",), 2)["json"]) == 2
    with pytest.raises(ConfigError, match="--workload poems: there are no such prompts; expected code, json"):
        choose(prompts, ("poems",), 1)
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a", "workload": "w"}\n\n{"prompt": "b"}\n')
    assert [(p.workload, p.text) for p in read_prompts(str(own))] == [("w", "a"), ("own", "b")]
    own.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match='entry 1 has no "prompt"'):
        read_prompts(str(own))
    with pytest.raises(FileError, match=r"--prompts nope: cannot be read \(No such file or directory\); expected a te"):
        read_prompts("nope")
    text = tmp_path / "poem.txt"
    text.write_text("Roses")
    assert [(p.workload, p.text) for p in read_prompts(str(text))] == [("poem", "Roses")]


def made_cell(n, workload, speedup, n_streams=1, drafter="mtp"):
    """A cell as `--json` has it, in which everything measured is the speedup."""
    measured = {"median": speedup, "low": speedup, "high": speedup}
    times = {f"{name}_ms": measured for name in ("draft", "verify", "sample", "host", "plain_step")}
    rates = ("tokens_per_second", "stream_tokens_per_second", "plain_tokens_per_second",
             "plain_stream_tokens_per_second")  # fmt: skip
    return {"drafter": drafter, "n_max": n, "temperature": 0.0, "n_streams": n_streams, "workload": workload,
            "decode_speedup": measured, "mean_length": 1.5, "accepted_per_position": [0.5] * n, **times,
            **dict.fromkeys(rates, measured)}  # fmt: skip


def test_throughput_has_one_line_a_drafter():
    """At every number of streams its quickest length, which need not be the same."""
    cells = [made_cell(1, "code", 2.0, 1), made_cell(2, "code", 3.0, 1), made_cell(1, "code", 5.0, 8),
             made_cell(2, "code", 4.0, 8), made_cell(7, "code", 1.5, 1, "dspark")]  # fmt: skip
    picture = dict(report.figures({"cells": cells, "split": []}))["Tokens a second of all streams together"]
    assert picture.count("<polyline") == 3 and "mtp, quickest n" in picture and "dspark n=7" in picture
    assert "<title>3</title>" in picture and "<title>5</title>" in picture and "<title>4</title>" not in picture


def test_one_run_claims_no_spread():
    assert Spread.of([2.0]).text(unit="x") == "2.00x" and "±" in Spread.of([2.0, 2.5]).text()
    one = {"median": 2.0, "low": 2.0, "high": 2.0}
    assert report.spread(one, 1) == "2.0" and report.spread(one | {"high": 3.0}, 1) == "2.0 ±0.5"


def test_a_long_legend_is_all_inside():
    names = [f"part {i}" for i in range(24)]
    document = xml.dom.minidom.parseString(plots.bars({"g": dict.fromkeys(names, 1.0)}, "ms", stacked=True))
    places = [float(t.getAttribute("y")) for t in document.getElementsByTagName("text")]
    assert max(places) < plots.HEIGHT
    assert len(set(plots.cycle(16))) == 16  # as many as a step has parts


def test_workloads_are_shown_at_each_drafters_quickest_length():
    """Not at the longest one measured, and the length is told."""
    cells = [made_cell(n, w, s) for n, s in ((1, 1.5), (2, 1.8), (3, 1.1)) for w in ("code", "all")]
    shown = dict(report.figures({"cells": cells, "split": []}))
    bars = shown["Decode speedup by workload, every drafter at its quickest length"]
    assert "mtp n=2" in bars and "mtp n=1" not in bars and "mtp n=3" not in bars


def test_plots_place_values():
    """Higher values stand higher, stacked bars end where the next one begins, labels are escaped."""
    picture = plots.lines({"a<b": [(1, 1.0), (2, 3.0)]}, "n", "x", reference=1.0)
    document = xml.dom.minidom.parseString(picture)
    low, high = (float(c.getAttribute("cy")) for c in document.getElementsByTagName("circle"))
    assert high < low and "a&lt;b" in picture
    crowded = plots.bars({f"drafter {i}": {"x": 1.0} for i in range(20)}, "ms")
    assert crowded.count("rotate(-35") == 20 and "rotate" not in plots.bars({"one": {"x": 1.0}}, "ms")
    stacked = xml.dom.minidom.parseString(plots.bars({"g": {"one": 2.0, "two": 1.0}}, "ms", stacked=True))
    first, second = stacked.getElementsByTagName("rect")[:2]
    y, height = (float(second.getAttribute(name)) for name in ("y", "height"))
    assert y + height == pytest.approx(float(first.getAttribute("y")), abs=0.11)
    assert float(first.getAttribute("height")) == pytest.approx(2 * height, abs=0.2)
