"""OpenAI's shapes: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ggufspec.chat_parse import Delta

from .answer import Answer, Step, usage
from .chat import ChatPrompt, read_chat
from .errors import ApiError, read_object
from .fields import Task
from .native import final, run_completion, set_grammar
from .prompts import read_prompts
from .respond import Chunk, JsonResponse
from .state import BUILD_INFO, ServerState, random_id
from .worker import Update


class _Envelope:
    """Keys that every object of one answer shares."""

    def __init__(self, state: ServerState, task: Task, kind: str):
        self.state = state
        self.task = task
        self.stream = task.stream
        self.kind = kind
        self.id = f"chatcmpl-{random_id()}"
        self.created = int(time.time())

    def wrap(self, choices: list[dict[str, Any]], kind: str = "", **more: Any) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self.created,
            "id": self.id,
            "model": self.state.name,
            "system_fingerprint": BUILD_INFO,
            "object": kind or self.kind,
            **more,
        }

    def verbose(self, answer: Answer) -> dict[str, Any]:
        return {"__verbose": final(self.state, answer, with_text=True)} if self.task.verbose else {}

    def failed(self, error: ApiError) -> Chunk:
        return error.body()


class TextForm(_Envelope):
    """/v1/completions."""

    done_mark = True

    def __init__(self, state: ServerState, task: Task):
        super().__init__(state, task, "text_completion")

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        if self.task.return_progress:
            yield self._choice(answer, "", []) | {
                "prompt_progress": answer.progress(update.n_prompt_done, update.prompt_ms)
            }

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        chunk = self._choice(answer, step.text, step.probs)
        if self.task.timings_per_token:
            chunk["timings"] = answer.timings
        yield chunk

    def last(self, answer: Answer) -> Iterable[Chunk]:
        yield self._choice(
            answer, "", [], answer.finish_reason, usage=usage(answer), timings=answer.timings, **self.verbose(answer)
        )

    def _choice(
        self, answer: Answer, text: str, probs: list[dict[str, Any]], reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"text": text, "index": answer.index, "logprobs": {"content": probs} if probs else None}
        return self.wrap([choice | {"finish_reason": reason}], **more)

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        return ()

    def whole(self, answers: Sequence[Answer]) -> Any:
        choices = [
            {
                "text": answer.text + answer.rest,
                "index": answer.index,
                "logprobs": {"content": answer.probs} if answer.probs else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        first = answers[0]
        return self.wrap(choices, usage=usage(first), timings=first.timings, **self.verbose(first))


async def completions(http: HttpRequest, state: ServerState) -> Response:
    body = await read_object(http)
    prompts = await asyncio.to_thread(read_prompts, body, state.model.tokenizer)
    task = state.reader.read(body)
    set_grammar(state, task, body)
    return await run_completion(http, state, task, prompts, TextForm(state, task))


class ChatForm(_Envelope):
    """/v1/chat/completions."""

    done_mark = True

    def __init__(self, state: ServerState, task: Task, chat: ChatPrompt, n_answers: int):
        super().__init__(state, task, "chat.completion.chunk" if task.stream else "chat.completion")
        self.chat = chat
        self.outputs = [chat.new_parser() for _ in range(n_answers)]
        self._begun = [False] * n_answers
        self._probs: list[list[dict[str, Any]]] = [[] for _ in range(n_answers)]

    # -- stream ----------------------------------------------------------------------------------------------

    def prompt(self, answer: Answer, update: Update) -> Iterable[Chunk]:
        if not self.task.return_progress:
            return
        done = [answer.n_cached] if answer.start_of_progress() else []
        for n in [*done, update.n_prompt_done]:
            progress = answer.progress(n, update.prompt_ms if n > answer.n_cached else 0)
            yield self._chunk(answer, _ROLE, timed=True) | {"prompt_progress": progress}

    def delta(self, answer: Answer, step: Step) -> Iterable[Chunk]:
        yield from self._begin(answer)
        probs = self._probs[answer.index]
        probs += step.probs
        yield from self._deltas(answer, self.outputs[answer.index].feed(step.text))

    def _begin(self, answer: Answer) -> Iterable[Chunk]:
        if not self._begun[answer.index]:
            self._begun[answer.index] = True
            yield self._chunk(answer, _ROLE)

    def _deltas(self, answer: Answer, deltas: Sequence[Delta]) -> Iterable[Chunk]:
        probs = self._probs[answer.index]
        for i, delta in enumerate(deltas):
            chunk = self._chunk(answer, delta.as_openai(), timed=True)
            if probs and i == len(deltas) - 1:  # all tokens since the last visible change
                chunk["choices"][0]["logprobs"] = {"content": list(probs)}
                probs.clear()
            yield chunk

    def last(self, answer: Answer) -> Iterable[Chunk]:
        yield from self._begin(answer)
        output = self.outputs[answer.index]
        yield from self._deltas(answer, output.finish())
        chunk = self._chunk(answer, {}, finish_reason(answer, output.message.tool_calls))
        probs = self._probs[answer.index]
        if probs:
            chunk["choices"][0]["logprobs"] = {"content": list(probs)}
        if not self.task.include_usage:
            chunk |= {**self.verbose(answer), "timings": answer.timings}
        yield chunk

    def end(self, answers: Sequence[Answer]) -> Iterable[Chunk]:
        if self.task.include_usage:
            first = answers[0]
            yield self.wrap([], usage=usage(first), **self.verbose(first), timings=first.timings)

    def _chunk(
        self, answer: Answer, delta: dict[str, Any], reason: str | None = None, timed: bool = False
    ) -> dict[str, Any]:
        chunk = self.wrap([{"finish_reason": reason, "index": answer.index, "delta": delta}])
        if timed and self.task.timings_per_token:
            chunk["timings"] = answer.timings
        return chunk

    # -- whole -----------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer]) -> Any:
        choices = []
        for answer in answers:
            output = self.outputs[answer.index]
            output.feed(answer.text)
            output.finish()
            message = output.message.as_openai()
            message["content"] = self.chat.prefill + message["content"]
            if self.chat.prefill_thoughts:
                message["reasoning_content"] = self.chat.prefill_thoughts + message.get("reasoning_content", "")
            reason = finish_reason(answer, output.message.tool_calls)
            choice = {"finish_reason": reason, "index": answer.index, "message": message}
            if answer.probs:
                choice["logprobs"] = {"content": answer.probs}
            choices.append(choice)
        first = answers[0]
        return self.wrap(choices, usage=usage(first), **self.verbose(first), timings=first.timings)


_ROLE = {"role": "assistant", "content": None}


def finish_reason(answer: Answer, tool_calls: Sequence[Any]) -> str:
    return "tool_calls" if tool_calls and answer.finish_reason == "stop" else answer.finish_reason


async def chat_completions(http: HttpRequest, state: ServerState) -> Response:
    body = await read_object(http)
    chat = await asyncio.to_thread(read_chat, state, body)
    task = chat.task
    return await run_completion(http, state, task, [chat.tokens], ChatForm(state, task, chat, task.n_cmpl))


async def chat_input_tokens(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, await read_object(http))
    return JsonResponse({"input_tokens": len(chat.tokens), "object": "response.input_tokens"})


async def apply_template(http: HttpRequest, state: ServerState) -> Response:
    chat = await asyncio.to_thread(read_chat, state, await read_object(http))
    return JsonResponse({"prompt": chat.text})


async def control(http: HttpRequest, state: ServerState) -> Response:
    """End the reasoning of a running request; none can be found here unless it asked for `reasoning_control`."""
    body = await read_object(http)
    if not isinstance(body.get("id"), str):
        raise ApiError("missing completion id")
    if body.get("action") != "reasoning_end":
        raise ApiError("unknown control action")
    return JsonResponse({"success": False, "message": "no active completion for this id"})
