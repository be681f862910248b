"""Tuned configs of the narrow matmul: one JSON file a compute capability, found by `ggufspec bench kernels --tune`.

An entry says which config was quickest for a type's matrix of `rows` x 256 * `blocks`. A launch takes the entry of its
type that is nearest in shape (in powers of two); cards and types without entries take a rule (`matmul.cuda`).
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from math import log2


@dataclass(frozen=True)
class Entry:
    """A tuned shape and its config (see `matmul.cuda.Config`)."""

    type_name: str
    rows: int
    blocks: int
    config: dict[str, int]


def file_name(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}.json"


@functools.cache
def entries(capability: tuple[int, int]) -> tuple[Entry, ...]:
    """All entries for a capability; none when it has no file."""
    file = resources.files(__package__).joinpath(file_name(capability))
    if not file.is_file():
        return ()
    return tuple(
        Entry(e["type"], e["rows"], e["blocks"], e["config"]) for e in json.loads(file.read_text())["entries"]
    )


def nearest(capability: tuple[int, int], type_name: str, rows: int, blocks: int) -> dict[str, int] | None:
    """The config of the type's tuned shape nearest to `rows` x 256 * `blocks`."""
    own = [e for e in entries(capability) if e.type_name == type_name]
    if not own:
        return None
    return min(own, key=lambda e: abs(log2(rows / e.rows)) + abs(log2(blocks / e.blocks))).config


def table(device: str, capability: tuple[int, int], found: list[Entry]) -> str:
    """A file's text."""
    lines = ",\n".join(
        "  " + json.dumps({"type": e.type_name, "rows": e.rows, "blocks": e.blocks, "config": e.config}) for e in found
    )
    return f'{{"device": {json.dumps(device)}, "capability": {list(capability)}, "entries": [\n{lines}\n]}}\n'
