"""Where figures come from: machine, versions, the exact command, and the files' hashes."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ggufspec import __version__
from ggufspec.errors import FileError

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "xllamacpp")


def check_output(*paths: str | None) -> None:
    """FileError for a file that could not be written at the end, before anything is measured. Creates nothing."""
    for path in paths:
        if path is None:
            continue
        folder = Path(path).absolute().parent
        if Path(path).is_dir():
            reason = "is a directory, expected a file name"
        elif not folder.is_dir():
            reason = f"there is no folder {folder}"
        elif not os.access(path if Path(path).exists() else folder, os.W_OK):
            reason = "permission denied"
        else:
            continue
        raise FileError(f"{path}: cannot be written: {reason}")


def origin(files: Iterable[str], show_progress: bool = True) -> dict[str, Any]:
    """Everything a reader needs to make the same table again. Hashing large files takes a while."""
    return {
        "command": command_line(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ggufspec": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version(name)) is not None},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "n_threads": torch.get_num_threads(),
        "gpus": gpus(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "files": [file_facts(path, show_progress) for path in dict.fromkeys(files)],
    }


def command_line() -> str:
    return shlex.join(["ggufspec", *sys.argv[1:]])


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as the system gives it, and how many processors there are."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return name


def gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name} ({p.total_memory >> 20} MiB)" for p in found]


def file_facts(path: str, show_progress: bool = True) -> dict[str, Any]:
    return {"name": Path(path).name, "bytes": os.path.getsize(path), "sha256": sha256(path, show_progress)}


@cache
def sha256(path: str, show_progress: bool = True) -> str:
    """The file's digest. FileError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file, tqdm(
            total=os.path.getsize(path), unit="B", unit_scale=True, desc=f"hashing {Path(path).name}", leave=False,
            disable=None if show_progress else True, delay=1,
        ) as bar:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
                bar.update(len(chunk))
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people: lines above a table."""
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    machine = "; ".join(facts["gpus"]) or f"{facts['cpu']}, {facts['n_threads']} threads"
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    return [
        f"command  {facts['command']}",
        f"machine  {machine} ({facts['system']})",
        f"versions ggufspec {facts['ggufspec']}, Python {facts['python']}, {packages}{cuda}",
        *(f"file     {f['name']} ({f['bytes']} bytes, sha256 {f['sha256']})" for f in facts["files"]),
        f"time     {facts['time']}",
    ]
