"""`ggufspec perplexity`: how well a model predicts a text, and how far it is from another one. As llama-perplexity.

The text is cut into chunks of `-c` tokens; each is read from an empty cache, its first token replaced by BOS if the
model wants one, and the second half is scored.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ggufspec.errors import ConfigError, FileError
from ggufspec.models import Model, load_model, read_config
from ggufspec.placement import devices_of
from ggufspec.rows import prompt_rows
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools import logits_file
from ggufspec.tools.command import OptionCommand
from ggufspec.tools.logits_file import LogitsFile
from ggufspec.tools.perplexity_stats import HEADER, Comparison, mean_and_error, perplexity_of
from ggufspec.tools.runtime import check_context, loading_bar, open_model_file, place, with_rope_options
from ggufspec.tools.settings import Settings
from ggufspec.unjoined import whole
from ggufspec.weights import Weights

log = logging.getLogger(__name__)

LEAST_LOG_P = -16.0  # base probabilities at or below this count as zero


def open_target(settings: Settings) -> tuple[Model, Tokenizer]:
    if settings.model.path is None:
        raise ConfigError("--model is required")
    if settings.common.threads > 0:
        torch.set_num_threads(settings.common.threads)
    check_context(settings.context)
    file = open_model_file(settings.model.path, settings.model.overrides)
    config = with_rope_options(read_config(file), settings.context)
    if settings.model.split_mode in ("row", "tensor") and len(devices_of(settings.model.devices)) > 1:
        log.warning("--split-mode %s takes a process a device, and perplexity runs in one: whole layers are split",
                    settings.model.split_mode)  # fmt: skip
    with loading_bar(file.n_bytes, True) as progress:
        model = load_model(file, place(settings.model, config), config=config, weights=Weights(file, progress))
    return model, Tokenizer.from_metadata(file.metadata)


def text_chunks(tokenizer: Tokenizer, text: str, n_ctx: int, n_chunks: int) -> np.ndarray:
    """int32 [chunks, n_ctx] of the text's tokens; the rest of the text is left out."""
    if n_ctx < 4:
        raise ConfigError(f"-c {n_ctx}: expected at least 4 tokens a chunk")
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    if len(ids) < 2 * n_ctx:
        raise ConfigError(
            f"you need at least {2 * n_ctx} tokens to evaluate perplexity with a context of {n_ctx}; the text has "
            f"{len(ids)}"
        )
    found = len(ids) // n_ctx
    n = found if n_chunks < 0 else min(found, n_chunks)
    if n == 0:
        raise ConfigError("--chunks 0: nothing to score")
    return np.array(ids[: n * n_ctx], dtype=np.int32).reshape(n, n_ctx)


def chunk_logits(model: Model, tokenizer: Tokenizer, chunks: np.ndarray, settings: Settings) -> Iterator[Tensor]:
    """Per chunk the logits of its scored positions, float32 [n_ctx - 1 - n_ctx // 2, V] on the model's device."""
    n_ctx = chunks.shape[1]
    context = settings.context
    n_ubatch = min(context.n_ubatch or context.n_batch, context.n_batch)
    cache = model.new_cache(1, -(-n_ctx // 256) * 256, context.type_k, context.type_v)
    first = n_ctx // 2
    borders = sorted({*range(0, first, n_ubatch), *range(first, n_ctx, n_ubatch), n_ctx})
    for chunk in chunks:
        tokens = torch.from_numpy(chunk.astype(np.int64)).to(model.device)
        if tokenizer.add_bos and tokenizer.bos is not None:
            tokens[0] = tokenizer.bos
        cache.reset(0)
        scored = []
        for start, end in zip(borders, borders[1:]):
            rows = prompt_rows(tokens[start:end], 0, start)
            output = model.forward(rows, cache, logits="all" if start >= first else "none")
            if output.logits is not None:
                scored.append(whole(output.logits)[0])
        yield torch.cat(scored)[:-1]


def next_tokens(chunk: np.ndarray, device: torch.device) -> Tensor:
    """The token after each scored position, int64."""
    return torch.from_numpy(chunk[len(chunk) // 2 + 1 :].astype(np.int64)).to(device)


def nll_of(logits: Tensor, targets: Tensor) -> np.ndarray:
    """-ln p(target) per row, float64."""
    log_p = torch.log_softmax(logits.double(), 1).gather(1, targets[:, None])[:, 0]
    return (-log_p).cpu().numpy()


def compare(logits: Tensor, targets: Tensor, base: np.ndarray) -> Comparison:
    """One chunk against base log-probabilities float32 [rows, V]."""
    log_p = torch.log_softmax(logits.double(), 1)
    log_base = torch.from_numpy(base).to(logits.device).double()
    p_base = torch.where(log_base > LEAST_LOG_P, log_base.exp(), 0.0)
    kld = (p_base * (log_base - log_p)).sum(1)
    own, other = log_p.gather(1, targets[:, None])[:, 0], log_base.gather(1, targets[:, None])[:, 0]
    parts = (-own, -other, kld, own.exp() - other.exp(), logits.argmax(1) == log_base.argmax(1))
    return Comparison(*(part.cpu().numpy() for part in parts))


@torch.inference_mode()
def run(settings: Settings) -> None:
    options = settings.perplexity
    if options.kl_divergence:
        if options.logits_file is None:
            raise ConfigError("--kl-divergence needs the base model's logits: --kl-divergence-base FNAME")
        divergence(settings, logits_file.open_logits(options.logits_file))
    else:
        perplexity(settings)


def perplexity(settings: Settings) -> None:
    if not settings.cli.prompt:
        raise ConfigError("there is no text to score: give one with -f or -p")
    model, tokenizer = open_target(settings)
    chunks = text_chunks(tokenizer, settings.cli.prompt, settings.context.n_ctx, settings.perplexity.n_chunks)
    n_ctx = chunks.shape[1]
    print(f"perplexity: calculating perplexity over {len(chunks)} chunks, n_ctx={n_ctx}", file=sys.stderr)
    path = settings.perplexity.logits_file
    nll = np.zeros(0)
    try:
        with whole_file(path) if path else nullcontext() as out:
            if out is not None:
                logits_file.write_header(out, chunks, model.n_vocab)
            logits_of = chunk_logits(model, tokenizer, chunks, settings)
            for i, logits in enumerate(_with_bar(logits_of, len(chunks))):
                nll = np.concatenate((nll, nll_of(logits, next_tokens(chunks[i], model.device))))
                if out is not None:
                    out.write(logits_file.encode(logits.float().cpu().numpy()).tobytes())
                tqdm.write(_running(i, n_ctx, nll, settings.perplexity.output_type), end="")
    except OSError as error:
        if path is None or isinstance(error, BrokenPipeError):  # of standard output
            raise
        raise FileError(f"--kl-divergence-base {path}: {error.strerror}; nothing was kept of it") from None
    ppl, error_ = perplexity_of(nll)
    print(f"\nFinal estimate: PPL = {ppl:.4f} +/- {error_:.5f}")


@contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file that stands under its name once all of it is written; a device or pipe is written as it is."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as out:
            yield out
        return
    part = f"{path}.part"
    try:
        with open(part, "wb") as out:
            yield out
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def _running(i: int, n_ctx: int, nll: np.ndarray, output_type: int) -> str:
    mean, error = mean_and_error(nll)
    if output_type == 0:
        return f"[{i + 1}]{np.exp(mean):.4f},"
    return f"{i * n_ctx:8d}  {np.exp(mean):.4f}  {mean:4f}  {error:4f}\n"


def divergence(settings: Settings, base: LogitsFile) -> None:
    model, tokenizer = open_target(settings)
    if base.n_vocab != model.n_vocab:
        raise ConfigError(
            f"{base.path} was written by a model with {base.n_vocab} tokens; this one has {model.n_vocab}"
        )
    if base.tokens.max() >= model.n_vocab or base.tokens.min() < 0:
        raise FileError(f"{base.path}: token {base.tokens.max()} is outside the vocabulary of {model.n_vocab}")
    n = base.n_chunk if settings.perplexity.n_chunks < 0 else min(base.n_chunk, settings.perplexity.n_chunks)
    chunks = base.tokens[:n]
    total: Comparison | None = None
    print(f"\n{HEADER}")
    for i, logits in enumerate(_with_bar(chunk_logits(model, tokenizer, chunks, settings), n)):
        part = compare(logits, next_tokens(chunks[i], model.device), base.chunk(i))
        total = part if total is None else _joined(total, part)
        tqdm.write(total.chunk_line(i + 1))
    assert total is not None
    print(f"\n{total.report()}")


def _joined(a: Comparison, b: Comparison) -> Comparison:
    return Comparison(*(np.concatenate((x, y)) for x, y in zip(vars(a).values(), vars(b).values())))


def _with_bar(chunks: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    return iter(tqdm(chunks, total=n, desc="scoring", unit="chunk", leave=False, disable=None))


command = OptionCommand(
    "perplexity", run, "Score the second half of every chunk of a text; compare with another model's logits."
)
