"""`ggufspec cli` on a small random model: raw completions, chats, Ctrl-C, and what goes wrong."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import families
import pytest
import torch
from small_vocabulary import byte_bpe

from ggufspec.engine import Engine
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_write import Key
from ggufspec.job import Request
from ggufspec.models import load_model, read_config
from ggufspec.sampling import SamplingParams
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools.main import run
from ggufspec.tools.runtime import check_shift
from ggufspec.tools.settings import ContextSettings

N_CTX = 768
HOT = ("-n", "30", "--temp", "3", "--no-display-prompt")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model that walks through the printable characters: its text is valid and never ends by itself."""
    return str(families.make_qwen35(tmp_path_factory.mktemp("cli") / "m.gguf", seed=3, follow=1.5))


def expected(path, prompt, n, **sampling):
    """The text by the engine alone."""
    file = open_gguf(path)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    engine = Engine(load_model(file), tokenizer, n_ctx=N_CTX)
    ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
    request = Request(ids, SamplingParams(**sampling), n_predict=n, parse_special_out=False)
    return "".join(event.text for event in engine.generate(request))


def ggufspec(capsys, monkeypatch, *argv, stdin=""):
    """(status, stdout, stderr) of one command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    status = run(argv)
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def cli(capsys, monkeypatch, path):
    def call(*argv, stdin=""):
        return ggufspec(capsys, monkeypatch, "cli", "-m", path, "-c", str(N_CTX), *argv, stdin=stdin)

    return call


def test_completion_is_the_engines_text(cli, path):
    status, out, err = cli("-p", "Hello", "-n", "24", "--temp", "0")
    assert status == 0
    assert out.rstrip("\n") == "Hello" + expected(path, "Hello", 24, temperature=0.0)
    assert re.search(r"prompt eval time = +[\d.]+ ms / +5 tokens", err)
    assert re.search(r" eval time = +[\d.]+ ms / +23 runs", err)


def test_a_seed_is_a_text_with_or_without_drafts(cli, path):
    texts = []
    for more in ([], ["--spec-type", "draft-mtp"], ["--spec-type", "ngram-simple", "--spec-draft-n-max", "5"]):
        status, out, err = cli("-p", "Hello", *HOT, "--seed", "7", *more)
        assert status == 0
        texts.append(out)
        assert ("draft-mtp: #calls" in err) == ("draft-mtp" in more)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].rstrip("\n") == expected(path, "Hello", 30, temperature=3.0, seed=7).rstrip("\n")
    assert cli("-p", "Hello", *HOT, "--seed", "8")[1] != texts[0]


def test_prompt_from_a_file_with_escapes(cli, tmp_path):
    (tmp_path / "p.txt").write_text("a\\tb\n\n")
    _, out, _ = cli("-f", str(tmp_path / "p.txt"), "-n", "1", "--temp", "0")
    assert out.startswith("a\tb\n")
    assert cli("-f", str(tmp_path / "p.txt"), "-n", "1", "--temp", "0", "--no-escape")[1].startswith("a\\tb\n")


def test_grammar_bias_and_reverse_prompt(cli):
    grammar = ("-n", "30", "--grammar", 'root ::= "yes" | "no"', "--temp", "0", "--no-display-prompt")
    _, out, _ = cli("-p", "x", *grammar)
    assert out in ("yes [end of text]\n", "no [end of text]\n")
    _, out, _ = cli("-p", "x", "-n", "5", "-l", "33+1000", "--no-display-prompt", "--temp", "0")
    assert len(set(out.rstrip("\n"))) == 1
    text = cli("-p", "Hello", "-n", "24", "--temp", "0", "--no-display-prompt")[1]
    cut = text[6:9]
    assert cli("-p", "Hello", "-n", "24", "--temp", "0", "--no-display-prompt", "-r", cut)[1] == text[:6] + "\n"


def test_a_grammar_and_drafts(cli):
    """Constrained text, sampled with penalties, is the same with drafts."""
    argv = ("-p", "x", "-n", "40", "--grammar", 'root ::= ([a-z]{2,5} " " [0-9]+ ", ")+', "--temp", "2", "--seed", "5",
            "--repeat-penalty", "1.2", "--no-display-prompt")  # fmt: skip
    plain = cli(*argv)[1]
    assert re.fullmatch(r"([a-z]{2,5} \d+, )*[a-z]{0,5}( \d*)?,?\n", plain) and len(plain) >= 40
    assert cli(*argv, "--spec-type", "draft-mtp")[1] == plain
    assert cli(*argv, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1")[1] == plain


def test_no_tokens_asked_for_are_no_tokens(cli):
    assert cli("-p", "Hello", "-n", "0")[:2] == (0, "Hello\n")
    assert cli("-p", "Hello", "-n", "0", "--no-display-prompt")[1] == "\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_log_file_is_told_once(cli):
    warns = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "0")
    status, out, err = cli("-p", "x", "-n", "3", *warns, "--log-file", "/dev/full")
    assert status == 0 and out.startswith("x") and "Traceback" not in err
    assert err.count("--log-file /dev/full: No space left on device; the log ends here") == 1


def test_a_context_below_nothing(capsys, monkeypatch, path):
    status, _, err = ggufspec(capsys, monkeypatch, "cli", "-m", path, "-p", "x", "-c", "-7")
    assert (status, err) == (1, "error: --ctx-size: invalid value -7; expected 0 or more\n")


def test_what_has_no_effect_says_so(cli):
    status, out, err = cli("-p", "x", "-n", "1", "-ngl", "99", "-c", "100000", "-dev", "none")
    assert status == 0 and "no usable GPU found" not in err  # none was asked for
    assert err.count("exceeds the training context") == 1
    grammar = ("--grammar", 'root ::= "a"', "--json-schema", '{"const": 7}')
    status, out, err = cli("-p", "x", "-n", "9", "--no-display-prompt", *grammar)
    assert status == 0 and out == "7 [end of text]\n" and "--grammar has no effect beside --json-schema" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_layers_without_a_gpu(cli):
    assert "no usable GPU found, --gpu-layers option will be ignored" in cli("-p", "x", "-n", "1", "-ngl", "99")[2]
    assert "no usable GPU" not in cli("-p", "x", "-n", "1", "-ngl", "0")[2]


def test_generation_ends_where_the_context_does(cli):
    status, out, err = cli("-p", "Hi", "-c", "256", "--temp", "0", "--ignore-eos", "--no-display-prompt")
    assert status == 0
    assert re.search(r"total time = +[\d.]+ ms / +256 tokens", err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-p", "x" * 3000], "prompt is too long (3000 tokens, max 764): raise --ctx-size"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--grammar", "root ::= foo"], "undefined rule 'foo'"),
        (["-p", "x", "-l", "999999+1"], "token 999999 is outside the vocabulary"),
        (["-p", "x", "--spec-type", "draft-dspark"], "draft-dspark"),
        (["-p", "x", "-ctk", "q4_0", "-dev", "CUDA77"], "CUDA"),
        (["-p", "x", "-b", "0"], "--batch-size: invalid value 0; expected 1 or more"),
        (["-p", "x", "-ub", "-1"], "--ubatch-size: invalid value -1; expected 0 or more"),
        (["--chat-template-file", "/nonexistent"], "--chat-template-file /nonexistent: No such file or directory"),
        (["--hlep"], "did you mean --help?"),
    ],
)
def test_errors_are_one_line(cli, argv, message):
    status, out, err = cli(*argv)
    assert status == 1 and out == ""
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith("error")


def test_missing_model(capsys, monkeypatch):
    status, out, err = ggufspec(capsys, monkeypatch, "cli", "-m", "/nonexistent.gguf", "-p", "x")
    assert status == 1 and "/nonexistent.gguf" in err and "Traceback" not in err


def test_without_a_model_the_bundled_one_runs(capsys, monkeypatch):
    argv = ("cli", "-p", "def add(a, b):", "-n", "6", "--temp", "0", "-c", "256")
    status, out, err = ggufspec(capsys, monkeypatch, *argv)
    assert status == 0 and out.startswith("def add(a, b):") and len(out) > 16 and "draft-mtp" in err
    for kind in ("draft-dspark", "draft-dflash"):
        assert ggufspec(capsys, monkeypatch, *argv, "--spec-type", kind)[1] == out


def test_unknown_command(capsys, monkeypatch):
    status, _, err = ggufspec(capsys, monkeypatch, "clii")
    assert status == 2 and "did you mean cli?" in err


def test_chat_with_history_and_commands(cli):
    lines = ["Hello", "More \\", "of it", "/regen", "/clear", "Hello", "/help", "", "/e"]
    status, out, err = cli("-n", "12", "--temp", "0", "--no-show-timings", stdin="\n".join(lines) + "\n")
    assert status == 0 and out.endswith("Exiting...\n")
    answers = [part.strip() for part in out.split("\n> ")[1:]]
    first, second, again, cleared, anew, listed = answers[:6]
    assert first == anew and second == again
    assert cleared == "The conversation is forgotten."
    assert "/regen" in listed and "model: " in err


def test_first_message_system_and_single_turn(cli, path, tmp_path):
    file = tmp_path / "transcript.txt"
    status, out, _ = cli("-cnv", "-st", "-sys", "Be short.", "-p", "Hello", "-n", "10", "--temp", "0", "-o", str(file))
    prompt = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answer = expected(path, prompt, 10, temperature=0.0)
    assert status == 0 and answer in out and re.search(r"\[ Prompt: [\d.]+ t/s \| Generation: [\d.]+ t/s \]", out)
    assert file.read_text() == f"system: Be short.\n\nuser: Hello\n\nassistant: {answer}\n"


def test_read_puts_a_file_before_the_message(cli, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("remember")
    out_file = tmp_path / "transcript.txt"
    stdin = f"/read {note}\n/read {tmp_path}/none\nHi\n"
    status, out, _ = cli("-n", "4", "--temp", "0", "-o", str(out_file), stdin=stdin)
    assert status == 0 and "No such file" in out
    assert f"user: --- File: {note} ---\nremember\nHi" in out_file.read_text()


def test_a_message_that_does_not_fit_is_taken_back(cli):
    status, out, _ = cli("-n", "4", "--temp", "0", "--no-show-timings", stdin="x" * 2000 + "\nHi\n/exit\n")
    assert status == 0 and "exceeds the available context size" in out
    assert len([part for part in out.split("\n> ") if part.strip()]) >= 2


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_thoughts_are_marked(cli):
    grammar = 'root ::= "thought" "</think>" "answer"'
    argv = ("-n", "40", "--temp", "0", "--chat-template", THINKING, "--grammar", grammar, "--no-show-timings")
    _, out, _ = cli(*argv, "-st", stdin="Hi\n")
    assert "[Start thinking]\nthought\n[End thinking]\n\nanswer\n" in out
    budget = ("--reasoning-budget", "3", "--reasoning-budget-message", "...")
    free = ("-n", "12", "--temp", "0", "--chat-template", THINKING, "--no-show-timings", "-st", *budget)
    _, out, _ = cli(*free, stdin="Hi\n")
    assert re.search(r"\[Start thinking\]\n[^\n]{3}\.\.\.\n+\[End thinking\]\n\n.", out)
    _, out, _ = cli(*argv, "-st", "--reasoning-format", "none", stdin="Hi\n")
    assert "[Start thinking]" not in out and "thought</think>answer" in out


def test_model_without_template(capsys, monkeypatch, tmp_path):
    keys = [key for key in byte_bpe(families.Sizes().n_vocab, "qwen2") if key.name != "tokenizer.chat_template"]
    made = families.make_qwen3(tmp_path / "p.gguf", vocabulary=keys)
    status, _, err = ggufspec(capsys, monkeypatch, "cli", "-m", str(made), "-c", "256")
    assert status == 1 and "has no chat template" in err


def test_values_of_the_file_stand_where_the_user_said_nothing(capsys, monkeypatch, tmp_path):
    keys = [Key("general.sampling.temp", "f32", 0.0), Key("general.sampling.top_k", "i32", 1)]
    made = str(families.make_qwen35(tmp_path / "s.gguf", seed=3, follow=4.0, keys=_as_keys(keys)))
    argv = ("cli", "-m", made, "-c", str(N_CTX), "-p", "Hello", "-n", "16", "--no-display-prompt")
    greedy = ggufspec(capsys, monkeypatch, *argv)[1]
    assert greedy == ggufspec(capsys, monkeypatch, *argv, "--temp", "0")[1]
    hot = ("--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "3")
    assert ggufspec(capsys, monkeypatch, *argv, *hot)[1] != greedy


def _as_keys(keys):
    return {key.name: (key.type, key.value) for key in keys}


def start(*argv, **more):
    return subprocess.Popen([sys.executable, "-c", "from ggufspec.tools.main import main; main()", *argv],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)  # fmt: skip


def wait_for_text(process, n=8):
    text = b""
    while len(text) < n:
        text += os.read(process.stdout.fileno(), 64)
    return text


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_the_answer_and_the_program(path, presses):
    with start("cli", "-m", path, "-c", "4096", "-p", "Hello", "--ignore-eos", "-t", "1") as process:
        wait_for_text(process)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.0 if presses == 2 else 0.2)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and b"Traceback" not in err
    if presses == 1:
        assert b"eval time" in err


def test_ctrl_c_ends_an_answer_but_not_the_chat(path):
    with start("cli", "-m", path, "-c", "4096", "-cnv", "-p", "Hello", "--ignore-eos", "-t", "1",
               stdin=subprocess.PIPE) as process:  # fmt: skip
        wait_for_text(process, 40)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/exit\n", timeout=60)
    assert process.returncode == 0 and out.endswith(b"Exiting...\n") and b"Traceback" not in err


def test_a_pipe_closed_amid_the_answer_ends_it_quietly(path):
    with start("cli", "-m", path, "-c", "4096", "-p", "Hello", "--ignore-eos", "-t", "1") as process:
        wait_for_text(process)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(60)
    assert process.returncode == 141 and b"Traceback" not in err and b"error" not in err


def test_context_shift_is_off_with_recurrent_layers_and_refused_elsewhere(path, caplog):
    config, context = read_config(open_gguf(path)), ContextSettings(context_shift=True)
    check_shift(context, config)
    assert "--context-shift has no effect here" in caplog.text
    with pytest.raises(ConfigError, match="--context-shift is not supported"):
        check_shift(context, replace(config, architecture="qwen3"))
    check_shift(ContextSettings(), replace(config, architecture="qwen3"))
