"""`ggufspec tokenize`: text to token ids, with llama-tokenize's options. Reads only the file's metadata."""

import re
import sys
from pathlib import Path

import click

from ggufspec.errors import ConfigError, FileError
from ggufspec.gguf_file import open_gguf
from ggufspec.tokenizer import Tokenizer

_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


@click.command(name="tokenize")
@click.option("-m", "--model", type=click.Path(), required=True, help="The GGUF file whose vocabulary to use.")
@click.option("-p", "--prompt", help="The text.")
@click.option("-f", "--file", "path", type=click.Path(), help="A file with the text, taken as it is.")
@click.option("--stdin", is_flag=True, help="Read the text from standard input.")
@click.option("--ids", is_flag=True, help="Print only the ids, as a list: [1, 2, 3].")
@click.option("--no-bos", is_flag=True, help="Don't put a BOS token in front, even if the vocabulary asks for one.")
@click.option("--no-parse-special", is_flag=True, help="Read the texts of control tokens as ordinary text.")
@click.option("--no-escape", is_flag=True, help=r"Don't turn \n, \t, \xHH... into the characters they stand for.")
@click.option("--show-count", is_flag=True, help="Print the number of tokens at the end.")
@click.option("--log-disable", is_flag=True, help="No warnings about the vocabulary on standard error.")
def command(
    model: str, prompt: str | None, path: str | None, stdin: bool, ids: bool, no_bos: bool, no_parse_special: bool,
    no_escape: bool, show_count: bool, log_disable: bool,
) -> None:  # fmt: skip
    """Turn text into token ids: one line a token, its id and its text."""
    text = _read(prompt, path, stdin)
    if not no_escape:
        text = unescape(text)
    if log_disable:
        import logging

        logging.disable(logging.WARNING)
    tokenizer = Tokenizer.from_metadata(open_gguf(model).metadata)
    tokens = tokenizer.encode(text.decode(errors="replace"), add_special=True, parse_special=not no_parse_special)
    if no_bos and tokenizer.add_bos:
        del tokens[0]
    if ids:
        click.echo(str(tokens))
    else:
        for token in tokens:
            click.echo(f"{token:6d} -> '".encode() + tokenizer.piece(token) + b"'")
    if show_count:
        click.echo(f"Total number of tokens: {len(tokens)}")


def _read(prompt: str | None, path: str | None, stdin: bool) -> bytes:
    given = [name for name, on in (("-p", prompt is not None), ("-f", path is not None), ("--stdin", stdin)) if on]
    if not given:
        raise ConfigError("must specify one of: --stdin, --file or --prompt")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given together: give one source of text")
    if prompt is not None:
        return prompt.encode(errors="surrogateescape")
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from None
    return sys.stdin.buffer.read()


def unescape(text: bytes) -> bytes:
    r"""Turn \n \r \t \' \" \\ and \xHH into bytes; any other backslash stays."""

    def one(match: re.Match[bytes]) -> bytes:
        body = match[1]
        return bytes([int(body[1:], 16)]) if body[:1] == b"x" else _ESCAPES[body]

    return re.sub(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", one, text)
