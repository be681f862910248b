"""Small files to quantize, and importance matrices for them in both formats."""

import struct
from pathlib import Path

import numpy as np

from ggufspec.gguf_write import Entry, Key, write_gguf, write_split
from ggufspec.quant import layouts
from ggufspec.quant.quantize import quantize

N_COLUMNS = 512


def shapes(n_blocks: int = 3) -> dict[str, tuple[int, ...]]:
    """A drafter-like file: matrices, norms, a column, narrow tables, an index table, experts."""
    out: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, N_COLUMNS), "output.weight": (40, N_COLUMNS), "output_norm.weight": (N_COLUMNS,),
        "markov_w1.weight": (40, 96), "conf_proj.weight": (1, N_COLUMNS), "d2t": (40,),
        "odd.weight": (6, 50), "experts.weight": (3, 8, N_COLUMNS),
    }  # fmt: skip
    for i in range(n_blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down"):
            out[f"blk.{i}.{name}.weight"] = (24, N_COLUMNS)
        out[f"blk.{i}.attn_norm.weight"] = (N_COLUMNS,)
        out[f"blk.{i}.attn_conv_base"] = (2, 2, N_COLUMNS)
    return out


def keys(n_blocks: int = 3) -> list[Key]:
    return [
        Key("general.architecture", "str", "dflash"), Key("general.file_type", "u32", 1),
        Key("dflash.block_count", "u32", n_blocks), Key("dflash.attention.head_count", "u32", 8),
        Key("dflash.attention.head_count_kv", "u32", 2), Key("tokenizer.ggml.tokens", "arr[str]", ["a", "ü", ""]),
    ]  # fmt: skip


def weights(n_blocks: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 4096, shape) if name == "d2t" else rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(n_blocks).items()
    }


def stored(name: str, data: np.ndarray, kind: str) -> tuple[Entry, np.ndarray]:
    if name == "d2t":
        return Entry(name, data.shape, layouts.I64), data.astype(np.int64)
    layout = layouts.BY_NAME[kind] if name.endswith(".weight") and max(data.shape[:-1], default=1) > 1 else layouts.F32
    if data.shape[-1] % layout.n_elements or "norm" in name:
        layout = layouts.F32
    return Entry(name, data.shape, layout), quantize(data, layout.name)


def make_file(path: Path, kind: str = "F32", data: dict[str, np.ndarray] | None = None, n_blocks: int = 3) -> Path:
    pairs = [stored(name, x, kind) for name, x in (data or weights(n_blocks)).items()]
    write_gguf(path, keys(n_blocks), [e for e, _ in pairs], (raw for _, raw in pairs))
    return path


def make_split(prefix: Path, n_shards: int = 3) -> Path:
    pairs = [stored(name, x, "F16") for name, x in weights().items()]
    parts = [pairs[i::n_shards] for i in range(n_shards)]
    write_split(prefix, keys(), [[e for e, _ in part] for part in parts], (raw for part in parts for _, raw in part))
    return prefix.with_name(f"{prefix.name}-00001-of-{n_shards:05d}.gguf")


def importance(data: dict[str, np.ndarray], seed: int = 9) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums [experts, columns] and counts [experts] for every matrix but token_embd."""
    rng, out = np.random.default_rng(seed), {}
    for name, x in data.items():
        if name.endswith(".weight") and x.ndim > 1 and name != "token_embd.weight":
            n = x.shape[0] if x.ndim == 3 else 1
            counts = rng.integers(1, 50, n).astype(np.float32)
            out[name] = rng.uniform(0.01, 9, (n, x.shape[-1])).astype(np.float32) * counts[:, None], counts
    return out


def write_imatrix(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]], **drop: bool) -> Path:
    head = [
        Key("general.type", "str", "imatrix"), Key("imatrix.datasets", "arr[str]", ["calibration.txt"]),
        Key("imatrix.chunk_count", "u32", 12), Key("imatrix.chunk_size", "u32", 512),
    ]  # fmt: skip
    head = [key for key in head if not drop.get(key.name.removeprefix("imatrix."))]
    tensors, chunks = [], []
    for name, (sums, counts) in entries.items():
        tensors += [
            Entry(f"{name}.in_sum2", sums.shape, layouts.F32),
            Entry(f"{name}.counts", (len(counts), 1), layouts.F32),
        ]
        chunks += [sums, counts]
    write_gguf(path, head, tensors, chunks)
    return path


def write_legacy_imatrix(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]], tail: bool = True) -> Path:
    out = struct.pack("<i", len(entries))
    for name, (sums, counts) in entries.items():
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", int(counts[0]), sums.size) + sums.tobytes()
    if tail:
        out += struct.pack("<ii", 7, 8) + b"wiki.txt"
    path.write_bytes(out)
    return path
