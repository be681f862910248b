"""How option values are read: llama.cpp's rules (C++ `stoi` and `stof`, CSV lists, fixed words).

Each reader takes the text and returns the value; ValueError carries the reason.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Reader = Callable[[str], Any]

_INTEGER = re.compile(r"\s*([+-]?\d+)")
_NUMBER = re.compile(r"\s*([+-]?(?:inf(?:inity)?|nan|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))", re.IGNORECASE)


def integer(text: str) -> int:
    """C++ `stoi`: leading blanks and trailing junk are accepted."""
    match = _INTEGER.match(text)
    if not match or not -(2**31) <= int(match.group(1)) < 2**31:
        raise ValueError(f"stoi: expected an integer, but got {text!r}")
    return int(match.group(1))


def seed(text: str) -> int:
    """C++ `stoul`, cut to 32 bits: -1 is 4294967295."""
    match = _INTEGER.match(text)
    if not match:
        raise ValueError(f"stoul: expected an integer, but got {text!r}")
    return int(match.group(1)) & 0xFFFFFFFF


def number(text: str) -> float:
    """C++ `stof`."""
    match = _NUMBER.match(text)
    if not match:
        raise ValueError(f"stof: expected a number, but got {text!r}")
    return float(match.group(1))


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, in a few words."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def text(value: str) -> str:
    return value


def at_least(least: int, read: Reader = integer) -> Reader:
    def parse(value: str) -> Any:
        found = read(value)
        if not found >= least:
            raise ValueError(f"invalid value {value}: expected {least} or more")
        return found

    return parse


def between(low: float, high: float, read: Reader = integer) -> Reader:
    def parse(value: str) -> Any:
        found = read(value)
        if not low <= found <= high:
            raise ValueError(f"invalid value {value}: expected {low} to {high}")
        return found

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in words:
            raise ValueError(f"invalid value {value!r}: expected one of {', '.join(words)}")
        return value

    return parse


def on_off(name: str) -> Callable[[str], bool]:
    def parse(value: str) -> bool:
        if value not in ("on", "enabled", "true", "1", "off", "disabled", "false", "0"):
            raise ValueError(f"unknown value for {name}: '{value}' (expected on or off)")
        return value in ("on", "enabled", "true", "1")

    return parse


def on_off_auto(name: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value in ("auto", "-1"):
            return "auto"
        if value not in ("on", "enabled", "true", "1", "off", "disabled", "false", "0"):
            raise ValueError(f"unknown value for {name}: '{value}' (expected on, off or auto)")
        return "on" if value in ("on", "enabled", "true", "1") else "off"

    return parse


def csv_list(value: str) -> tuple[str, ...]:
    """A comma list with CSV quoting: `"a,b"` keeps its comma, `""` inside is a quote."""
    try:
        return tuple(item for row in csv.reader([value], strict=True) for item in row if item)
    except csv.Error as error:
        raise ValueError(f"invalid list {value!r}: {error}") from None


def device_list(value: str) -> tuple[str, ...]:
    names = tuple(name for name in value.split(",") if name)
    if not names:
        raise ValueError("no devices given: expected names from --list-devices, or none")
    return ("none",) if "none" in names else names


def gpu_layers(value: str) -> int:
    return {"auto": -1, "all": -2}[value] if value in ("auto", "all") else integer(value)


def tensor_split(value: str) -> tuple[float, ...] | str:
    """Shares, or `auto`."""
    if value == "auto":
        return value
    parts = [part for part in re.split("[,/]", value) if part]
    if len(parts) >= 16:
        raise ValueError(f"got {len(parts)} input configs, but system only has 16 devices")
    shares = tuple(number(part) for part in parts)
    if any(share < 0 for share in shares):
        raise ValueError(f"invalid value {value!r}: a share is negative")
    if not math.isfinite(sum(shares)):
        raise ValueError(f"invalid value {value!r}: expected ratios such as 4,6,6")
    return shares


def number_list(value: str) -> tuple[float, ...]:
    found = tuple(number(part) for part in value.split(",") if part)
    if not found or not all(0 < item < float("inf") for item in found):
        raise ValueError(f"invalid value {value!r}: expected positive numbers separated by commas")
    return found


def integer_list(value: str) -> tuple[int, ...]:
    return tuple(integer(part) for part in value.split(",") if part)


def tensor_overrides(value: str) -> tuple[tuple[str, str], ...]:
    out = []
    for item in value.split(","):
        regex, sign, buffer = item.rpartition("=")
        if not sign or not regex or not buffer:
            raise ValueError(f"invalid value {item!r}: expected REGEX=BUFFER")
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"{regex!r} is not a regular expression: {error}") from None
        out.append((regex, buffer))
    return tuple(out)


def key_overrides(value: str) -> tuple[tuple[str, Any], ...]:
    return tuple(_key_override(item) for item in csv_list(value))


def _key_override(item: str) -> tuple[str, Any]:
    """`KEY=TYPE:VALUE` with llama.cpp's four types."""
    key, sign, rest = item.partition("=")
    kind, colon, text = rest.partition(":")
    if sign and colon and 0 < len(key) < 128:
        if kind == "int" and re.fullmatch(r"[+-]?\d+", text):
            return key, int(text)
        if kind == "float" and _NUMBER.fullmatch(text):
            return key, float(text)
        if kind == "bool" and text in ("true", "false"):
            return key, text == "true"
        if kind == "str" and len(text.encode()) <= 127:
            return key, text
    raise ValueError(f"Invalid type for KV override: {item} (expected KEY=int|float|bool|str:VALUE)")


def logit_bias(value: str) -> tuple[tuple[int, float], ...]:
    """`ID+BIAS` or `ID-BIAS`."""
    match = re.fullmatch(r"(\d+)([+-])(.+)", value)
    if not match:
        raise ValueError(f"invalid input format {value!r}: expected TOKEN_ID(+/-)BIAS, such as 15043-1")
    return ((int(match[1]), number(match[3]) * (1 if match[2] == "+" else -1)),)


def json_object(value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, but got {type(found).__name__}")
    return found


def json_text(value: str) -> str:
    """JSON kept as text; mistakes are fatal at once."""
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    return value


def file_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"failed to open file '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"file '{path}' is not UTF-8 text") from None


def prompt_file(path: str) -> str:
    """A text file without its final newline."""
    return file_text(path).removesuffix("\n")


def of_file(read: Reader) -> Reader:
    return lambda path: read(file_text(path))


def existing_directory(path: str) -> str:
    if not Path(path).is_dir():
        raise ValueError(f"not a directory: {path}")
    return path


def appended(read: Reader) -> Callable[[str], Sequence[Any]]:
    """For options whose single values add up to a list."""
    return lambda value: (read(value),)


_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])")
_PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescaped(value: str) -> str:
    r"""`\n \r \t \' \" \\ \xHH` resolved; other pairs stay as they are. Bytes that are no UTF-8 become U+FFFD."""

    def one(match: re.Match[bytes]) -> bytes:
        found = match.group(1)
        return bytes([int(found[1:], 16)]) if found[:1] == b"x" and len(found) == 3 else _PLAIN[found]

    return _ESCAPE.sub(one, value.encode(errors="surrogatepass")).decode(errors="replace")
