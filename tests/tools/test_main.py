"""The root command: the table of commands, and what a user sees when something is wrong."""

import importlib
import os
import subprocess
import sys

import click
import families
import pytest

from ggufspec.errors import FileError
from ggufspec.tools import main


def test_every_listed_command_loads():
    table = main.commands
    for name in table.list_commands(click.Context(table)):
        command = table.get_command(click.Context(table), name)
        assert isinstance(command, click.Command)
    assert {"cli", "server", "perplexity", "quantize", "inspect"} <= set(table.list_commands(click.Context(table)))


def test_no_command_shows_the_help(capsys):
    assert main.run([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("Usage: ggufspec") and "perplexity" in shown.err


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_asleep_unless_told_otherwise(monkeypatch, given):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(main, "run", lambda argv: 0)
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


def test_help_needs_neither_torch_nor_a_command_module():
    code = (
        "import sys; from ggufspec.tools.main import run; status = run(['--help']);"
        "assert status == 0; assert 'torch' not in sys.modules, 'torch'; assert 'ggufspec.tools.cli' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (FileError("m.gguf: cut off"), 1, "error: m.gguf: cut off"),
        (FileError("error: invalid argument: -x"), 1, "error: invalid argument: -x"),
        (ModuleNotFoundError("no", name="xllamacpp"), 1, "error: ggufspec cli needs the package xllamacpp"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 1, "error: standard output: No space left on device"),
        (OSError(13, "Permission denied", "x.json"), 1, "error: x.json: Permission denied"),
    ],
)
def test_errors_become_one_line(monkeypatch, capsys, raised, status, line):
    def load(name):
        raise raised

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(main.signal, "signal", lambda *args: None)
    with monkeypatch.context() as keep:
        keep.setattr(sys, "stdout", sys.stdout)
        assert main.run(["cli"]) == status
    assert capsys.readouterr().err.strip().startswith(line)


def test_a_programming_error_is_not_hidden(monkeypatch):
    def load(name):
        raise ZeroDivisionError

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ZeroDivisionError):
        main.run(["cli"])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["inspect"], "error: Missing argument 'FILE' (see ggufspec inspect --help)"),
        (["tokenize", "--frob"], "error: No such option '--frob' (see ggufspec tokenize --help)"),
        (["quantize", "a.gguf", "b.gguf", "Q9_K"], "error: invalid ftype 'Q9_K', expected one of Q8_0, "),
        (["quantize", "a.gguf", "Q8_0", "--imatrix", "/nonexistent"], "error: failed to load imatrix"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, argv, line):
    assert main.run(argv) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(line) and shown.count("\n") == 1


def test_a_full_standard_output_is_one_line():
    code = "from ggufspec.tools.main import main; main(['inspect', '--help'])"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["server", "--help"],
        ["inspect", "m.gguf"],
        ["tokenize", "-m", "m.gguf", "-p", "a"],
        ["quantize", "m.gguf", "out.gguf", "Q8_0"],
        ["cli", "-m", "m.gguf", "-p", "a", "-n", "3", "-c", "64"],
        ["perplexity", "-m", "m.gguf", "-f", "text", "-c", "8"],
    ],
    ids=lambda argv: argv[0],
)
def test_nobody_reads_the_output(tmp_path, argv):
    """`ggufspec ... | head`: no word, and the status of a tool that SIGPIPE ended; no file half written."""
    families.make_qwen35(tmp_path / "m.gguf")
    (tmp_path / "text").write_text("0123456789" * 4)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec.tools.main", *argv],
            stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, cwd=tmp_path,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 141, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "Exception", "rror", "pipe")), done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"m.gguf", "text"}
