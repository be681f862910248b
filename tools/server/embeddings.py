"""/v1/embeddings and /embedding: pooled hidden rows of a prompt."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .answer import Answer, Step
from .errors import ApiError, read_object
from .prompts import read_prompts
from .respond import Chunk, respond
from .state import ServerState
from .worker import Update


async def embeddings(http: HttpRequest, state: ServerState) -> Response:
    return await _embeddings(http, state, openai=False)


async def embeddings_openai(http: HttpRequest, state: ServerState) -> Response:
    return await _embeddings(http, state, openai=True)


async def _embeddings(http: HttpRequest, state: ServerState, openai: bool) -> Response:
    config = state.config
    if not config.embeddings:
        raise ApiError("This server does not support embeddings. Start it with `--embeddings`", 501)
    if openai and (config.pooling or "none") == "none":
        raise ApiError("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    body = await read_object(http)
    name = "input" if "input" in body else "content"
    if name not in body:
        raise ApiError('"input" or "content" must be provided')
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise ApiError('The format to return the embeddings in. Can be either "float" or "base64"')
    prompts = await asyncio.to_thread(read_prompts, body, state.model.tokenizer, name)
    if any(not prompt for prompt in prompts):
        raise ApiError("Input content cannot be empty")
    task = state.reader.read({})
    answers = [Answer(i, task, prompt, state.model.tokenizer) for i, prompt in enumerate(prompts)]
    requests = [state.request(prompt, task, want_embedding=True) for prompt in prompts]
    form = EmbeddingForm(state, openai, encoding == "base64")
    return await respond(http, state.worker, answers, requests, form, config.timeout_s)


class EmbeddingForm:
    stream = False
    done_mark = False

    def __init__(self, state: ServerState, openai: bool, as_base64: bool):
        self.state = state
        self.openai = openai
        self.as_base64 = as_base64

    def whole(self, answers: Sequence[Answer]) -> Any:
        config = self.state.config
        rows = [pool(embedding_rows(a), config.pooling or "none", config.embd_normalize) for a in answers]
        if not self.openai:
            return [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
        data = []
        for i, row in enumerate(rows):
            value: Any = row[0].tolist()
            item = {"embedding": value, "index": i, "object": "embedding"}
            if self.as_base64:
                item["embedding"] = base64.b64encode(row[0].astype("<f4").tobytes()).decode()
                item["encoding_format"] = "base64"
            data.append(item)
        n = sum(len(answer.prompt) for answer in answers)
        usage = {"prompt_tokens": n, "total_tokens": n}
        return {"model": self.state.name, "object": "list", "usage": usage, "data": data}

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        return ()

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        return ()

    def last(self, answer: Answer) -> Iterable[Chunk]:
        return ()

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        return ()

    def failed(self, error: ApiError) -> Chunk:
        return error.body()


def embedding_rows(answer: Answer) -> np.ndarray:
    """[n, D] float32 rows of a finished embedding job."""
    assert answer.job is not None
    return np.asarray(answer.job.embedding, dtype=np.float32)


def pool(rows: np.ndarray, pooling: str, normalize: int) -> np.ndarray:
    """[n, D] rows to [1, D] (`mean`, `cls`, `last`), or [n, D] for `none`.

    `normalize`: -1 none, 0 by the largest absolute value to int16's range, 2 L2, otherwise the p-norm.
    """
    picked = {
        "none": lambda: rows,
        "mean": lambda: rows.mean(axis=0, keepdims=True, dtype=np.float64),
        "cls": lambda: rows[:1],
        "last": lambda: rows[-1:],
    }[pooling]()
    if normalize < 0 or pooling == "none":
        return picked.astype(np.float32)
    if normalize == 0:
        norm = np.abs(picked).max(axis=1, keepdims=True) / 32760.0
    else:
        norm = (np.abs(picked.astype(np.float64)) ** normalize).sum(axis=1, keepdims=True) ** (1 / normalize)
    return np.where(norm > 0, picked / np.where(norm > 0, norm, 1), 0.0).astype(np.float32)
