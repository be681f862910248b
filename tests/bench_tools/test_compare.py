"""`ggufspec compare`: the bundled family here and in llama.cpp, and how differences are told."""

import json
import re
import shutil
import sys

import pytest
from click.testing import CliRunner
from families import make_qwen35

from ggufspec.errors import ConfigError, GgufspecError
from ggufspec.gguf_file import open_gguf
from ggufspec.tools.bench.attach import Bench
from ggufspec.tools.compare import command, is_same, table, to_f16
from ggufspec.tools.compare.peers import PeerError, PeerSettings, check_peer, open_peer
from ggufspec.tools.compare.sides import Difference, Row, run_ours
from ggufspec.tools.settings import ModelSettings, Settings


def compare(*args):
    return CliRunner().invoke(command, ["-t", "1", *args], standalone_mode=False, catch_exceptions=False)


def row(**changes):
    made = Row("mtp", 3, 2, [], (100, 100), (50, 51), 40, [10.0, 12.0], [20.0, 20.0])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_row_adds_up():
    made = row()
    assert made.rates == (0.5, 0.51) and made.points == pytest.approx(-1) and made.n_equal == 2
    made = row(accepted=(19, 0))
    assert made.lengths == (38 / 19, 1.0)  # 40 tokens of 2 streams: 38 came from steps
    mean, low, high = made.ratio()
    assert mean == pytest.approx((0.5 * 0.6) ** 0.5) and 0.5 <= low <= mean <= high <= 0.6


def test_one_pair_has_no_interval():
    """Of one pair nothing can be said about spread; a width of nothing would claim the opposite."""
    one = row(ours_per_second=[10.0], theirs_per_second=[20.0])
    assert "0.500x (one pair)" in table.text([one]) and one.as_dict()["speed_ratio"] == {"mean": 0.5}
    assert re.search(r"0\.548x \(0\.\d{3}-0\.\d{3}\)", table.text([row()]))


def test_what_counts_as_the_same():
    tie = Difference(0, 3, [(1, -0.7), (2, -0.7)], [(2, -0.7000), (1, -0.7004)])
    real = Difference(0, 3, [(1, -0.7), (2, -0.7)], [(2, -0.5), (1, -0.9)])
    assert is_same(row()) and is_same(row(differences=[tie]))
    assert not is_same(row(differences=[real])) and not is_same(row(accepted=(50, 53)))
    text = table.text([row(differences=[real])])
    assert "mtp n=3, prompt 0, token 3: NOT a tie, gap 0.4" in text and "2: -0.5000  1: -0.9000" in text


def test_peers_that_are_not_there():
    with pytest.raises(ConfigError, match="--peer /nowhere/llama-server: no such program"):
        check_peer("/nowhere/llama-server")
    for url in ("http://127.0.0.1:9", "http://127.0.0.1:9/v1"):
        with pytest.raises(ConfigError, match=f"--peer {url}: no llama-server answers there .Connection refused.; st"):
            check_peer(url)
    with open_peer("http://127.0.0.1:9", PeerSettings("m", 256, 1)) as server, pytest.raises(PeerError, match="answer"):
        server.complete([1], 1)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--n-max", "0"), "--n-max and n= of --drafter: found 0, expected numbers from 1 on"),
        (("--drafter", "mtp,n=-2"), "found -2, expected numbers from 1 on"),
        (("--drafter", "mtp,synth-len=2"), "drafts accepted at random .* cannot be compared"),
        (("--spec-synth-len", "2"), "drafts accepted at random .* cannot be compared"),
        (("--json", "/nowhere/o.json"), "/nowhere/o.json: cannot be written: there is no folder /nowhere"),
        (("--quantize", "Q9_9"), "invalid ftype 'Q9_9'"),
        (("--quantize", "Q8_0", "--json", "/"), "/: cannot be written: is a directory"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message, monkeypatch):
    from ggufspec.tools import compare as module

    monkeypatch.setattr(module, "check_peer", lambda peer: peer)
    monkeypatch.setattr(module, "origin", lambda *_: pytest.fail("files were read"))
    with pytest.raises(GgufspecError, match=message):
        compare(*options)


@pytest.mark.peer
def test_options_of_drafters_go_to_both_sides(tmp_path):
    """Least confidence and the drafter's cache types: the same drafts on both sides, other ones than without."""
    def drafted(*options):
        out = compare("--drafter", "mtp,n=3", "--no-plain", "-n", "16", "--n-prompts", "1", "--workload", "code",
                      *options, "--json", str(tmp_path / "o.json"))  # fmt: skip
        assert out.return_value == 0, out.stdout
        ours, theirs = json.loads((tmp_path / "o.json").read_text())["rows"][0]["drafted"]
        assert ours == theirs
        return ours

    assert drafted("--spec-draft-p-min", "0.6") < drafted("-ctkd", "q8_0", "-ctvd", "q8_0")


def test_f16_copies_hold_the_quantized_values(tmp_path):
    made = make_qwen35(tmp_path / "q.gguf", type="Q8_0", seed=2)
    to_f16(str(made), tmp_path / "f.gguf")
    before, after = open_gguf(made), open_gguf(tmp_path / "f.gguf")
    types = {t.layout.name for t in after.tensors.values()}
    assert types <= {"F16", "F32"} and before.tensors.keys() == after.tensors.keys()
    kinds = {t.layout.name for t in before.tensors.values()}
    assert "Q8_0" in kinds and after.metadata["general.file_type"] == 1


def test_a_binary_that_fails_shows_its_log(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho cannot load model: $2 >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match="did not start: cannot load model: m.gguf"):
        open_peer(check_peer(str(program)), PeerSettings("m.gguf", 256, 1))


@pytest.mark.peer
def test_the_bundled_family_says_and_accepts_the_same(tmp_path):
    """Tokens equal, acceptance within 2 points, for MTP, DSpark and DFlash2; the table and the JSON say so."""
    out = compare(
        "--drafter", "mtp,n=2", "--drafter", "dspark", "--drafter", "dflash2", "-n", "20", "--n-prompts", "1",
        "--workload", "json", "--json", str(tmp_path / "o.json"),
    )  # fmt: skip
    assert out.return_value == 0, out.stdout
    assert "all 1 prompts are the same tokens on both sides" in out.stdout
    assert re.search(r"tiny-target\.gguf is compared as F16", out.stdout)
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [r["name"] for r in rows] == ["plain", "mtp", "dspark", "dflash2"]
    for r in rows:
        assert r["n_equal"] == r["n_prompts"] == 1
        assert abs(r["points"]) <= 2 and (r["accepted"][1] > 0) == (r["name"] != "plain")


@pytest.mark.peer
def test_a_running_server_is_taken_as_it_is(tmp_path):
    """A URL: its own model and drafter; without one named here, the plain runs are compared."""
    model = str(make_qwen35(tmp_path / "m.gguf", seed=3, follow=1.5))
    with open_peer("xllamacpp", PeerSettings(model, 512, 1)) as server:
        out = compare("-m", model, "--peer", server.address, "-n", "8", "--n-prompts", "1", "--workload", "prose")
        bench = Bench.load(Settings(model=ModelSettings(path=model)), 1, 256, show_progress=False)
        answer = server.complete([70, 71, 72], 6, 5)
    assert "1/1" in out.stdout and out.return_value == 0
    ours = run_ours(bench.engine(None, ignore_eos=False), [70, 71, 72], 6, 5)
    assert ours.tokens == answer.tokens and len(ours.top) == 6
    assert [t for t, _ in ours.top[0][:2]] == [t for t, _ in answer.top[0][:2]]


@pytest.mark.peer
def test_a_difference_is_found_and_explained(tmp_path):
    """A peer with other weights: the first token that differs, with both sides' likeliest ones."""
    ours, theirs = (str(make_qwen35(tmp_path / f"{i}.gguf", seed=i, follow=1.5)) for i in (3, 4))
    with open_peer("xllamacpp", PeerSettings(theirs, 512, 1)) as server:
        out = compare("-m", ours, "--peer", server.address, "-n", "8", "--n-prompts", "1", "--workload", "prose")
    assert out.return_value == 1 and "0/1" in out.stdout
    assert re.search(r"plain n=0, prompt 0, token \d: NOT a tie", out.stdout)
    assert re.search(r"here +\d+: -?\d+\.\d{4}  \d", out.stdout)
    assert re.search(r"llama\.cpp +\d+: -?\d+\.\d{4}  \d", out.stdout)


def quantizer(folder, then=""):
    """A program with llama-quantize's command line: ours, and `then` done to its output."""
    program = folder / "llama-quantize"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom ggufspec.tools.main import run\n"
        f"status = run(['quantize', *sys.argv[1:]])\n{then}\nsys.exit(status)\n"
    )
    program.chmod(0o755)
    return str(program)


def test_equal_quantizers(tmp_path):
    model = str(make_qwen35(tmp_path / "m.gguf", seed=3))
    out = compare("-m", model, "--quantize", "Q8_0,Q4_0", "--llama-quantize", quantizer(tmp_path), "--json",
                  str(tmp_path / "o.json"))  # fmt: skip
    assert out.return_value == 0, out.stdout
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [r["type"] for r in rows] == ["Q8_0", "Q4_0"]
    for r in rows:
        assert r["sha256"][0] == r["sha256"][1] and not r["differing"] and r["perplexity"][0] == r["perplexity"][1] > 1


def test_quantizers_that_differ(tmp_path):
    """One byte of one tensor: found, named, and scored on its own."""
    model = str(make_qwen35(tmp_path / "m.gguf", seed=3))
    flip = (
        "from ggufspec.gguf_file import open_gguf\n"
        "at = open_gguf(sys.argv[3]).tensors['output.weight'].offset\n"
        "data = bytearray(open(sys.argv[3], 'rb').read()); data[at + 5] ^= 64; open(sys.argv[3], 'wb').write(data)"
    )
    out = compare("-m", model, "--quantize", "Q8_0", "--llama-quantize", quantizer(tmp_path, flip), "--json",
                  str(tmp_path / "o.json"))  # fmt: skip
    assert out.return_value == 1 and "NO" in out.stdout
    (r,) = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert r["differing"] == ["output.weight"] and r["perplexity"][0] != r["perplexity"][1]


def test_a_missing_or_failing_quantizer(tmp_path):
    model = str(make_qwen35(tmp_path / "m.gguf", seed=3))
    with pytest.raises(ConfigError, match="--quantize needs llama-quantize, but there is no program /nowhere"):
        compare("-m", model, "--quantize", "Q8_0", "--llama-quantize", "/nowhere")
    with pytest.raises(PeerError, match="/true Q8_0: ended well but wrote no file"):
        compare("-m", model, "--quantize", "Q8_0", "--llama-quantize", shutil.which("true"))
    failing = quantizer(tmp_path, "print('out of luck', file=sys.stderr); status = 3")
    with pytest.raises(PeerError, match="out of luck"):
        compare("-m", model, "--quantize", "Q8_0", "--llama-quantize", failing)
