"""`ggufspec tokenize` prints what llama-tokenize prints."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ggufspec.tools.main import run
from ggufspec.tools.tokenize import command, unescape

from .vocabularies import byte_bpe, sentencepiece, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "bpe": str(write_model(folder / "bpe.gguf", byte_bpe("qwen2"))),
        "spm": str(write_model(folder / "spm.gguf", sentencepiece())),
    }


def out(*arguments: str, stdin: bytes | None = None) -> bytes:
    result = CliRunner().invoke(command, arguments, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout_bytes


def test_lines_and_ids(models: dict[str, str]) -> None:
    ids = out("-m", models["spm"], "-p", "a<s>", "--ids").decode()
    assert ids.startswith("[1, ") and ids.endswith(", 1]\n")
    without = out("-m", models["spm"], "-p", "a<s>", "--ids", "--no-bos").decode()
    assert without == "[" + ids.removeprefix("[1, ")
    lines = out("-m", models["spm"], "-p", "a<s>", "--show-count").decode().splitlines()
    assert lines[0] == "     1 -> '<s>'" and lines[-1] == f"Total number of tokens: {len(lines) - 1}"
    plain = out("-m", models["spm"], "-p", "<s>", "--no-parse-special", "--no-bos", "--ids").decode()
    assert plain != "[1]\n"


def test_pieces_are_bytes(models: dict[str, str]) -> None:
    raw = out("-m", models["bpe"], "-p", "\U00012345")
    assert b"\xf0" in raw and b"\xef\xbf\xbd" not in raw


def test_sources(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\\n\n")
    ids = [out("-m", models["bpe"], "--ids", *more, stdin=b"a\\n\n") for more in (["-f", str(path)], ["--stdin"])]
    assert ids[0] == ids[1] == out("-m", models["bpe"], "--ids", "-p", "a\n\n")
    kept = out("-m", models["bpe"], "--ids", "--no-escape", "-p", "a\\n")
    assert kept != out("-m", models["bpe"], "--ids", "-p", "a\\n")


def test_escapes() -> None:
    assert unescape(rb"\n\t\r\\n\"\'\x41\xc3\xa9\q\x4") == b"\n\t\r\\n\"'A\xc3\xa9\\q\\x4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "MODEL"], "must specify one of"),
        (["-m", "MODEL", "-p", "a", "--stdin"], "-p and --stdin"),
        (["-m", "MODEL", "-f", "/nowhere/at/all"], "/nowhere/at/all: No such file"),
        (["-m", "/nowhere/at/all", "-p", "a"], "/nowhere/at/all"),
    ],
)
def test_one_line_errors(
    models: dict[str, str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tokenize", *(models["bpe"] if word == "MODEL" else word for word in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
