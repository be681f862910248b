"""`ggufspec bench`: llama-bench's options, the order of its tests, its output formats, and what is timed."""

import csv
import io
import json
import re
import sqlite3

import pytest
import torch
from click.testing import CliRunner
from families import make_qwen35

from ggufspec import bundled
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model
from ggufspec.rows import prompt_rows
from ggufspec.tools.bench import command
from ggufspec.tools.bench.attach import Bench
from ggufspec.tools.bench.description import model_type, named
from ggufspec.tools.bench.outputs import FIELDS, test_text
from ggufspec.tools.bench.stepper import Stepper
from ggufspec.tools.bench.tests_options import parse
from ggufspec.tools.settings import ModelSettings, Settings

# llama-bench's csv header
HEADER = (
    "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,"
    "n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,n_gpu_layers,n_cpu_moe,split_mode,main_gpu,"
    "no_kv_offload,flash_attn,devices,tensor_split,tensor_buft_overrides,load_mode,lazy_mode,embeddings,no_op_offload,"
    "no_host,repack,fit_target,fit_min_ctx,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_qwen35(tmp_path_factory.mktemp("bench") / "m.gguf", seed=3))


def read(line):
    warnings = []
    return parse(line.split(), warnings.append), warnings


def bench(*args):
    result = CliRunner().invoke(command, list(args), standalone_mode=False, catch_exceptions=False)
    return result.stdout


def combinations(line):
    return [(t["n_ubatch"], t["type_k"], t["n_depth"], t["n_prompt"], t["n_gen"]) for t in read(line)[0].tests()]


def test_defaults_are_llama_benchs():
    options, warnings = read("")
    assert [(t["n_prompt"], t["n_gen"]) for t in options.tests()] == [(512, 0), (0, 128)]
    assert (options.repetitions, options.output, options.output_err, warnings) == (5, "md", "none", [])


def test_all_combinations_in_order():
    """Depth varies fastest, then the cache type, then the micro-batch; prompts stand before generations and pairs."""
    assert combinations("-p 8,16 -n 4 -pg 8,4 -ub 2,4 -ctk f16,q8_0 -d 0,32")[:8] == [
        (2, "f16", 0, 8, 0), (2, "f16", 0, 16, 0), (2, "f16", 0, 0, 4), (2, "f16", 0, 8, 4),
        (2, "f16", 32, 8, 0), (2, "f16", 32, 16, 0), (2, "f16", 32, 0, 4), (2, "f16", 32, 8, 4),
    ]  # fmt: skip
    assert len(combinations("-p 8,16 -n 4 -pg 8,4 -ub 2,4 -ctk f16,q8_0 -d 0,32")) == 32
    assert combinations("-p 8 -p 16 -n 0 -ub 2") == [(2, "f16", 0, 8, 0), (2, "f16", 0, 16, 0)]


@pytest.mark.parametrize(
    "line, message",
    [
        ("-p x", "error: invalid parameter for argument: -p"),
        ("-p -4", "expected 0 or more"),
        ("-zz 3", "error: invalid parameter for argument: -zz"),
        ("--n-promt 3", "did you mean --n-prompt"),
        ("-p", "expected a value"),
        ("-o xml", "expected one of csv, json, jsonl, md, sql"),
        ("-fa maybe", "expected one of auto"),
        ("-pg 5", "expected PROMPT,GENERATED"),
        ("-embd 1", "embeddings are measured like prompts"),
        ("-nkvo 1", "lies on the device of its layer"),
        ("-ot a=b", "whole layers are placed"),
        ("-hf a/b", "nothing is downloaded"),
        ("-sm diagonal", "expected one of none"),
        ("-ub 0", "expected 1 or more"),
    ],
)
def test_bad_command_lines(line, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read(line)
    assert "\n" not in str(caught.value)


def test_options_without_effect_say_so():
    _, warnings = read("-ncmoe 4 --poll 0 --prio 2 -lm auto")
    assert len(warnings) == 3 and all("has no effect here" in w for w in warnings)


def test_csv_has_llama_benchs_fields(model):
    rows = list(csv.DictReader(io.StringIO(out := bench("-m", model, "-p", "8", "-n", "2", "-r", "2", "-o", "csv"))))
    assert out.splitlines()[0] == HEADER == ",".join(FIELDS)
    assert [(r["n_prompt"], r["n_gen"]) for r in rows] == [("8", "0"), ("0", "2")]
    assert all(float(r["avg_ts"]) > 0 and int(r["avg_ns"]) > 0 and r["no_host"] == "0" for r in rows)


def test_json_jsonl_and_sql_agree(model):
    line = ["-m", model, "-p", "4", "-n", "0", "-r", "3", "-d", "0,8"]
    rows = json.loads(bench(*line, "-o", "json"))
    lines = [json.loads(text) for text in bench(*line, "-o", "jsonl").splitlines()]
    database = sqlite3.connect(":memory:")
    database.executescript(bench(*line, "-o", "sql"))
    stored = database.execute("SELECT n_depth, n_prompt, avg_ts FROM llama_bench ORDER BY n_depth").fetchall()
    assert [r["n_depth"] for r in rows] == [r["n_depth"] for r in lines] == [r[0] for r in stored] == [0, 8]
    for row in rows + lines:
        assert list(row) == [*FIELDS, "samples_ns", "samples_ts"]
        assert len(row["samples_ns"]) == 3 and row["no_kv_offload"] is False and row["flash_attn"] == -1
        assert row["samples_ts"][0] == pytest.approx(1e9 * 4 / row["samples_ns"][0])
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 3)


def test_markdown_table(model):
    """A column stands for what differs from its default; the numbers are mean and deviation."""
    lines = bench("-m", model, "-p", "8", "-n", "2", "-r", "2", "-ub", "4", "-t", "1").splitlines()
    names = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert names == ["model", "size", "params", "backend", "threads", "n_ubatch", "test", "t/s"]
    assert re.fullmatch(r"(\| [-:]+ )+\|", lines[1]) and len(lines[0]) == len(lines[1])
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[3:7] == ["CPU", "1", "4", "pp8"] and re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", cells[7])
    assert re.fullmatch(r"qwen35 \dM .*\(guessed\)", cells[0]) and cells[1].endswith("MiB")
    assert re.fullmatch(r"build: \S+ \(\d+\)", lines[-1])


def test_descriptions():
    assert [named(n) for n in (1, 7, 15, 14, 10, 18, 30, 0, 32, 99)] == [
        "F16", "Q8_0", "Q4_K - Medium", "Q4_K - Small", "Q2_K - Medium", "Q6_K", "IQ4_XS - 4.25 bpw", "all F32", "BF16",
        "type 99",
    ]  # fmt: skip
    assert model_type(open_gguf(bundled.target_path())) == "qwen35 32M Q4_K - Medium"


@pytest.mark.parametrize(
    "row, text",
    [((512, 0, 0), "pp512"), ((0, 128, 0), "tg128"), ((512, 128, 4096), "pp512+tg128 @ d4096")],
)
def test_names_of_tests(row, text):
    assert test_text(dict(zip(("n_prompt", "n_gen", "n_depth"), row))) == text


def test_the_stepper_computes_what_the_model_does(model):
    """Chunks, single steps and the return to a filled cache give the logits of one whole forward."""
    loaded = Bench.load(Settings(model=ModelSettings(path=model)), 1, 1, show_progress=False)
    tokens = torch.randint(0, loaded.model.n_vocab, (12,), generator=torch.Generator().manual_seed(1))
    whole = load_model(loaded.file)
    cache = whole.new_cache(1, 32, "f16", "f16")
    with torch.inference_mode():
        wanted = whole.forward(prompt_rows(tokens, 0, 0), cache, logits="all").logits[0]
    stepper = Stepper(loaded.model, 1, 32, "f16", "f16", n_ubatch=3, n_batch=8)
    stepper.prompt(tokens[:10])
    saved = stepper.save(0)
    for _ in range(2):
        stepper.restore(0, saved)
        for i in (10, 11):
            logits = stepper.step(tokens[i : i + 1], [0])
            torch.testing.assert_close(logits[0, 0], wanted[i], atol=2e-3, rtol=1e-3)
        assert stepper.n_past == [12]
