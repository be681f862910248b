"""llama-server's own endpoints: /completion, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ggufspec.errors import GgufspecError
from ggufspec.grammar import GrammarSpec, GrammarState, Trigger
from ggufspec.job import Request
from ggufspec.sampling.bind import bind, reads_vocabulary

from .answer import Answer, Step
from .errors import ApiError, read_object, type_error
from .fields import Task
from .prompts import read_prompts, tokenize_mixed
from .respond import Chunk, Form, JsonResponse, respond
from .state import ServerState
from .worker import Update


class NativeForm:
    """/completion and /infill."""

    done_mark = False

    def __init__(self, state: ServerState, task: Task):
        self.state = state
        self.task = task
        self.stream = task.stream

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        if not self.task.return_progress:
            return
        done = [answer.n_cached] if answer.start_of_progress() else []
        for n in [*done, update.n_prompt_done]:
            chunk = self._partial(answer, Step(tokens=[0]), 0)
            chunk["prompt_progress"] = answer.progress(n, update.prompt_ms if n > answer.n_cached else 0)
            yield chunk

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        chunk = self._partial(answer, step, answer.n_decoded)
        if step.probs:
            chunk["completion_probabilities"] = step.probs
        yield chunk

    def _partial(self, answer: Answer, step: Step, n_decoded: int) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": answer.index,
            "content": step.text,
            "tokens": step.tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": n_decoded,
            "tokens_evaluated": len(answer.prompt),
        }
        if self.task.timings_per_token:
            chunk["timings"] = answer.timings
        return chunk

    def last(self, answer: Answer) -> Iterable[Chunk]:
        yield self._select(final(self.state, answer, with_text=False))

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        return ()

    def whole(self, answers: Sequence[Answer]) -> Any:
        results = [self._select(final(self.state, answer, with_text=True)) for answer in answers]
        return results if len(results) > 1 else results[0]

    def failed(self, error: ApiError) -> Chunk:
        return error.body()

    def _select(self, result: dict[str, Any]) -> dict[str, Any]:
        """Only the `response_fields`; `a/b` reaches inside, the whole path is the key."""
        if not self.task.response_fields:
            return result
        out = {}
        for path in self.task.response_fields:
            value: Any = result
            for part in path.split("/"):
                value = value.get(part, KeyError) if isinstance(value, dict) else KeyError
            if value is not KeyError:
                out[path] = value
        return out


def final(state: ServerState, answer: Answer, with_text: bool) -> dict[str, Any]:
    """The native result object; a stream's last chunk has no text, for it was sent already."""
    task = answer.task
    result: dict[str, Any] = {
        "index": answer.index,
        "content": answer.text + answer.rest if with_text else "",
        "tokens": answer.tokens if with_text and task.return_tokens else [],
        "id_slot": answer.id_slot,
        "stop": True,
        "model": state.name,
        "tokens_predicted": answer.n_decoded,
        "tokens_evaluated": len(answer.prompt),
        "generation_settings": task.settings(),
        "prompt": state.model.tokenizer.decode(answer.prompt),
        "has_new_line": answer.has_new_line,
        "truncated": answer.truncated,
        "stop_type": answer.stop_kind,
        "stopping_word": answer.stopping_word,
        "tokens_cached": max(len(answer.prompt) + answer.n_decoded - 1, 0),
        "timings": answer.timings,
    }
    if with_text and answer.probs:
        result["completion_probabilities"] = answer.probs
    return result


async def run_completion(
    http: HttpRequest, state: ServerState, task: Task, prompts: list[list[int]], form: Form
) -> Response:
    """Submit every prompt `n` times and answer in this form."""
    await prepare(state, task)
    answers: list[Answer] = []
    requests: list[Request | None] = []
    for prompt in prompts:
        for i in range(task.n_cmpl):
            answers.append(Answer(len(answers), task, prompt, state.model.tokenizer))
            requests.append(state.request(prompt, task, seed_offset=i))
    return await respond(http, state.worker, answers, requests, form, state.config.timeout_s)


async def completion(http: HttpRequest, state: ServerState) -> Response:
    body = await read_object(http)
    prompts = await asyncio.to_thread(read_prompts, body, state.model.tokenizer)
    task = state.reader.read(body)
    set_grammar(state, task, body)
    return await run_completion(http, state, task, prompts, NativeForm(state, task))


def set_grammar(state: ServerState, task: Task, body: dict[str, Any]) -> None:
    """`grammar` (GBNF) wins over `json_schema`; values of another type are ignored, as llama-server does.

    With `grammar_lazy` the grammar waits for one of `grammar_triggers`.
    """
    text, schema = body.get("grammar"), body.get("json_schema")
    triggers = read_triggers(state, task, body.get("grammar_triggers", []))
    lazy = (task.grammar_lazy, triggers if task.grammar_lazy else ())
    if isinstance(text, str) and text:
        task.grammar_text, task.grammar = text, GrammarSpec("gbnf", text, *lazy)
    elif isinstance(schema, dict) or schema is True:
        task.grammar = GrammarSpec("json_schema", json.dumps(schema), *lazy)
        task.grammar_text = task.grammar.text


TRIGGER_KINDS: tuple[Literal["token", "word", "pattern", "pattern_full"], ...] = (
    "token", "word", "pattern", "pattern_full",
)  # fmt: skip


def read_triggers(state: ServerState, task: Task, value: Any) -> tuple[Trigger, ...]:
    """`[{"type": 0..3, "value": text, "token": id of type 0}, ...]`, shown in the task as llama-server shows them.

    A word that is one token counts as that token, and must be among `preserved_tokens`.
    """
    tokenizer = state.model.tokenizer
    task.grammar_triggers = []
    if not isinstance(value, list):
        raise ApiError(f"Field 'grammar_triggers': {type_error('array', value)}")
    out = []
    for item in value:
        kind, text = (item.get("type"), item.get("value")) if isinstance(item, dict) else (None, None)
        if not isinstance(kind, int) or not 0 <= kind < len(TRIGGER_KINDS) or not isinstance(text, str):
            raise ApiError(
                "Field 'grammar_triggers': expected objects with a type from 0 to 3 (token, word, pattern, "
                f"pattern_full) and a text as value, but got {json.dumps(item, ensure_ascii=False)[:80]}"
            )
        ids = [item.get("token")] if kind == 0 else []
        if kind == 1:
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
            kind = 0 if len(ids) == 1 else 1
            if kind == 0 and ids[0] not in task.preserved_tokens:
                raise ApiError(
                    f"Field 'grammar_triggers': Grammar trigger word should be marked as preserved token: {text}"
                )
        if kind == 0 and not (isinstance(ids[0], int) and 0 <= ids[0] < tokenizer.n_vocab):
            raise ApiError(f"Field 'grammar_triggers': 'token' must be a token's id for type 0, but got {ids[0]!r}")
        out.append(Trigger(TRIGGER_KINDS[kind], ids[0] if kind == 0 else text))
        task.grammar_triggers.append({"type": kind, "value": text} | ({"token": ids[0]} if kind == 0 else {}))
    return tuple(out)


async def prepare(state: ServerState, task: Task) -> None:
    """What takes long and is kept, off the event loop and off the engine's thread: running streams go on.

    A grammar is compiled once, so that a bad one is a 400 at once; DRY looks its breakers up in the vocabulary.
    """
    if reads_vocabulary(task.sampling):
        await asyncio.to_thread(bind, task.sampling, state.model.tokenizer)
    if task.grammar is None:
        return
    try:
        await asyncio.to_thread(GrammarState.start, task.grammar, state.model.tokenizer)
    except GgufspecError as e:
        raise ApiError(f"Failed to initialize samplers: failed to parse grammar: {e}") from None


async def tokenize(http: HttpRequest, state: ServerState) -> Response:
    return await asyncio.to_thread(_tokenize, await read_object(http), state.model.tokenizer)


def _tokenize(body: dict[str, Any], tokenizer: Any) -> Response:
    content = body.get("content", "")
    special = _flag(body, "add_special", False)
    parse = _flag(body, "parse_special", True)
    if isinstance(content, list) and all(isinstance(x, str | int) and x is not True for x in content):
        ids = tokenize_mixed(content, tokenizer, special, parse)
    elif isinstance(content, str):
        ids = tokenizer.encode(content, add_special=special, parse_special=parse) if content else []
    else:
        raise ApiError(type_error("string", content))
    if not _flag(body, "with_pieces", False):
        return JsonResponse({"tokens": ids})
    return JsonResponse({"tokens": [{"id": i, "piece": _piece(tokenizer.piece(i))} for i in ids]})


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    return value if isinstance(value, bool) else default


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _token(value: Any) -> int:
    """A token id written as any number."""
    if not isinstance(value, int | float):
        raise ApiError(type_error("number", value))
    return int(value)


async def detokenize(http: HttpRequest, state: ServerState) -> Response:
    return await asyncio.to_thread(_detokenize, await read_object(http), state.model.tokenizer)


def _detokenize(body: dict[str, Any], tokenizer: Any) -> Response:
    tokens = body.get("tokens", [])
    if not isinstance(tokens, list):
        raise ApiError(type_error("array", tokens))
    if set(map(type, tokens)) - {int}:
        tokens = [_token(token) for token in tokens]
    return JsonResponse({"content": tokenizer.decode(tokens)})
