"""llama-perplexity's file of log-probabilities (`--kl-divergence-base`): its layout, written and read.

"_logits_"  int32 n_ctx  int32 n_vocab  int32 n_chunk  int32 tokens[n_chunk * n_ctx]
then per scored position: float32 scale, float32 least, uint16 q[n_vocab], padded to an even count
log p = scale * q + least; logits more than 16 below the largest count as 16 below
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ggufspec.errors import FileError

MAGIC = b"_logits_"
RANGE = np.float32(16.0)


@dataclass(frozen=True)
class LogitsFile:
    """An open file: its header, and where the records begin."""

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunk: int
    tokens: np.ndarray  # [n_chunk, n_ctx] int32
    offset: int

    @property
    def rows_per_chunk(self) -> int:
        return scored_rows(self.n_ctx)

    def chunk(self, i: int) -> np.ndarray:
        """Base log-probabilities of chunk i, float32 [rows, n_vocab]."""
        words = record_words(self.n_vocab)
        n = self.rows_per_chunk * words
        raw = np.fromfile(self.path, dtype="<u2", count=n, offset=self.offset + 2 * n * i)
        if len(raw) != n:
            raise FileError(f"{self.path}: chunk {i + 1} of {self.n_chunk} is cut off; write the file again")
        return decode(raw.reshape(-1, words), self.n_vocab)


def scored_rows(n_ctx: int) -> int:
    """Positions scored in a chunk: those after its first half, without the last."""
    return n_ctx - 1 - n_ctx // 2


def record_words(n_vocab: int) -> int:
    return 2 * ((n_vocab + 1) // 2) + 4


def write_header(file: BinaryIO, tokens: np.ndarray, n_vocab: int) -> None:
    """tokens [n_chunk, n_ctx]."""
    n_chunk, n_ctx = tokens.shape
    file.write(MAGIC + struct.pack("<3i", n_ctx, n_vocab, n_chunk))
    file.write(tokens.astype("<i4").tobytes())


def encode(logits: np.ndarray) -> np.ndarray:
    """Records uint16 [rows, record_words] of logits [rows, n_vocab] float32."""
    logits = logits.astype(np.float32)
    largest = logits.max(1, keepdims=True)
    least = np.maximum(logits.min(1, keepdims=True), largest - RANGE)
    log_sum = np.log(np.exp((logits - largest).astype(np.float64)).sum(1, keepdims=True)).astype(np.float32)
    scale = (largest - least) / np.float32(65535)
    out = np.zeros((len(logits), record_words(logits.shape[1])), dtype="<u2")
    head = np.concatenate((scale, least - largest - log_sum), 1).astype("<f4")
    out[:, :4] = head.view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint((np.float32(1) / scale) * (logits - least))
    out[:, 4 : 4 + logits.shape[1]] = np.where((scale > 0) & (logits > least), q, 0)
    return out


def decode(records: np.ndarray, n_vocab: int) -> np.ndarray:
    """Log-probabilities float32 [rows, n_vocab] of records uint16 [rows, record_words]."""
    head = np.ascontiguousarray(records[:, :4]).view("<f4")
    return head[:, :1] * records[:, 4 : 4 + n_vocab].astype(np.float32) + head[:, 1:]


def open_logits(path: str) -> LogitsFile:
    """Read the header. FileError if the file is not what it should be."""
    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            head = file.read(20)
            if len(head) < 20 or head[:8] != MAGIC:
                raise FileError(f"{path}: not a file of logits; write one with --kl-divergence-base and without "
                                "--kl-divergence")  # fmt: skip
            n_ctx, n_vocab, n_chunk = struct.unpack("<3i", head[8:])
            expected = 20 + 4 * n_ctx * n_chunk
            if min(n_ctx, n_vocab, n_chunk) < 1 or expected > size:
                raise FileError(f"{path}: header says {n_chunk} chunks of {n_ctx} tokens over {n_vocab} ids, which "
                                f"do not fit into {size} bytes")  # fmt: skip
            tokens = np.frombuffer(file.read(4 * n_ctx * n_chunk), dtype="<i4")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    expected += 2 * record_words(n_vocab) * scored_rows(n_ctx) * n_chunk
    if size < expected:
        raise FileError(
            f"{path}: {size} bytes, but {n_chunk} chunks take {expected}; the run that wrote it was cut off"
        )
    return LogitsFile(Path(path), n_ctx, n_vocab, n_chunk, tokens.reshape(n_chunk, n_ctx), 20 + 4 * len(tokens))
