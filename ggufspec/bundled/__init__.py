"""The small trained family that ships inside the package: a target with its MTP block, and two drafters for it."""

from __future__ import annotations

from pathlib import Path

from ..errors import FileError

_FILES = {"target": "tiny-target.gguf", "dspark": "tiny-dspark.gguf", "dflash2": "tiny-dflash2.gguf"}


def path(name: str) -> Path:
    """The path of bundled file `target`, `dspark` or `dflash2`. FileError when the installation lacks it."""
    found = Path(__file__).with_name(_FILES[name])
    if not found.is_file():
        raise FileError(f"{found}: the bundled model {name} is missing; install the package again")
    return found


def target_path() -> Path:
    """The target: qwen35, 31 M parameters, vocabulary 4096, MTP block included."""
    return path("target")
