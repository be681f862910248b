"""`ggufspec compare --quantize`: the same file quantized here and by llama-quantize, byte by byte, and perplexity."""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ggufspec.errors import ConfigError
from ggufspec.gguf_file import open_gguf
from ggufspec.quant import policy
from ggufspec.quant.requantize import Options, make_plan, run_plan
from ggufspec.tools.bench.origin import sha256
from ggufspec.tools.bench.spec_table import grid
from ggufspec.tools.perplexity import chunk_logits, next_tokens, nll_of, open_target, text_chunks
from ggufspec.tools.settings import Settings

from .peers import IN_PROCESS, PeerError, is_url

N_CTX = 128  # tokens of a scored chunk
N_CHUNKS = 8


@dataclass
class Quantized:
    """One file type. `differing` names tensors whose type or bytes differ; perplexities are of our own runtime."""

    type: str
    n_bytes: tuple[int, int]  # ours, theirs
    sha256: tuple[str, str]
    n_tensors: int
    differing: list[str]
    perplexity: tuple[float, float]

    @property
    def is_same(self) -> bool:
        return self.sha256[0] == self.sha256[1]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_quantizer(peer: str, path: str | None) -> str:
    """The llama-quantize to run: the one named, one beside the peer's binary, or the one on the search path."""
    beside = None if peer == IN_PROCESS or is_url(peer) else str(Path(peer).with_name("llama-quantize"))
    for candidate in [path] if path is not None else [beside, "llama-quantize"]:
        found = shutil.which(candidate) if candidate is not None else None
        if found is not None:
            return found
    raise ConfigError(
        f"--quantize needs llama-quantize, but there is no program {path or 'of that name beside the peer or on PATH'}"
        "; give one with --llama-quantize PATH"
    )


def compare_quantized(settings: Settings, quantizer: str, types: Sequence[str], text: str) -> list[Quantized]:
    """One row a type. PeerError when llama-quantize fails."""
    assert settings.model.path is not None
    source = settings.model.path
    rows = []
    with tempfile.TemporaryDirectory(prefix="ggufspec-compare-") as folder:
        for name in types:
            ours, theirs = Path(folder, f"ours-{name}.gguf"), Path(folder, f"theirs-{name}.gguf")
            choices = policy.Choices(policy.file_type(name))
            run_plan(make_plan(open_gguf(source), Options(choices, allow_requantize=True)), ours)
            done = subprocess.run(
                [quantizer, "--allow-requantize", source, str(theirs), name], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise PeerError(f"{quantizer} {name}: {(done.stderr or done.stdout).strip()[-800:]}")
            if not theirs.exists():
                raise PeerError(f"{quantizer} {name}: ended well but wrote no file; expected a llama-quantize")
            hashes = sha256(str(ours), False), sha256(str(theirs), False)
            first = perplexity_of(settings, str(ours), text)
            second = first if hashes[0] == hashes[1] else perplexity_of(settings, str(theirs), text)
            rows.append(Quantized(
                name, (ours.stat().st_size, theirs.stat().st_size), hashes, len(open_gguf(ours).tensors),
                differing_tensors(ours, theirs), (first, second),
            ))  # fmt: skip
            ours.unlink()
            theirs.unlink()
    return rows


def differing_tensors(ours: Path, theirs: Path) -> list[str]:
    """Names of tensors that only one file has, or whose type, shape or bytes differ; in our file's order."""
    a, b = open_gguf(ours), open_gguf(theirs)
    out = []
    for name, info in a.tensors.items():
        other = b.tensors.get(name)
        same = other is not None and (other.type_id, other.shape) == (info.type_id, info.shape)
        if not same or not np.array_equal(a.read(name), b.read(name)):
            out.append(name)
    return out + [name for name in b.tensors if name not in a.tensors]


@torch.inference_mode()
def perplexity_of(settings: Settings, path: str, text: str) -> float:
    """Over the text's first chunks, as `ggufspec perplexity` counts it."""
    model_settings = replace(settings.model, path=path)
    settings = replace(settings, model=model_settings, context=replace(settings.context, n_ctx=N_CTX))
    model, tokenizer = open_target(settings)
    chunks = text_chunks(tokenizer, text, N_CTX, N_CHUNKS)
    nll = [
        nll_of(logits, next_tokens(chunk, logits.device))
        for chunk, logits in zip(chunks, chunk_logits(model, tokenizer, chunks, settings))
    ]
    return math.exp(float(np.concatenate(nll).mean()))


def table(rows: Sequence[Quantized]) -> str:
    heads = ("type", "bytes", "same", "tensors that differ", "perplexity here", "of llama-quantize's")
    body = []
    for row in rows:
        shown = ", ".join(row.differing[:3]) + (" ..." if len(row.differing) > 3 else "")
        differing = f"{len(row.differing)} of {row.n_tensors} {shown}".strip()
        sizes = f"{row.n_bytes[0]} / {row.n_bytes[1]}"
        body.append([row.type, sizes, "yes" if row.is_same else "NO", differing,
                     f"{row.perplexity[0]:.4f}", f"{row.perplexity[1]:.4f}"])  # fmt: skip
    return grid(heads, body, "quantized here and by llama-quantize")
