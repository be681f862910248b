"""GGUF files in real sizes that are headers alone: what stands behind the header is a hole in the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ggufspec.gguf_write import DEFAULT_ALIGNMENT, _header, _padded
from ggufspec.tools.synth import plan
from ggufspec.tools.synth_models import changed, make_recipe


def write_header(path: Path, kind: str, type_text: str = "q4_k_m", **sizes: Any) -> Path:
    """A synthetic target, dspark or dflash2 model of `sizes` (default: 27B) without its weights."""
    recipe = make_recipe(kind, changed(kind, **sizes), None)
    entries = plan(recipe, type_text)
    header = _header(path, recipe.keys, entries, DEFAULT_ALIGNMENT, 3)
    path.write_bytes(header)
    os.truncate(path, len(header) + sum(_padded(entry.n_bytes, DEFAULT_ALIGNMENT) for entry in entries))
    return path
