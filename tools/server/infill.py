"""/infill: fill-in-the-middle prompts, laid out as llama-server does."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .errors import ApiError, read_object, type_error
from .native import NativeForm, run_completion, set_grammar
from .state import ServerState


async def infill(http: HttpRequest, state: ServerState) -> Response:
    tokenizer = state.model.tokenizer
    missing = [
        f"{what} token is missing. "
        for what, token in (
            ("prefix", tokenizer.ids.fim_pre),
            ("suffix", tokenizer.ids.fim_suf),
            ("middle", tokenizer.ids.fim_mid),
        )
        if token is None
    ]
    if missing:
        raise ApiError(f"Infill is not supported by this model: {''.join(missing)}", 501)
    body = await read_object(http)
    for key in ("input_prefix", "input_suffix"):
        if key not in body:
            raise ApiError(f'"{key}" is required')
    task = state.reader.read(body)
    set_grammar(state, task, body)
    prompt = infill_prompt(state, body)
    return await run_completion(http, state, task, [prompt], NativeForm(state, task))


def infill_prompt(state: ServerState, body: dict[str, Any]) -> list[int]:
    """[repository] [extra files] PREFIX prefix + prompt SUFFIX suffix MIDDLE, within a batch's budget."""
    model = state.model
    tokenizer, ids = model.tokenizer, model.tokenizer.ids

    def encode(text: Any, special: bool = False) -> list[int]:
        if not isinstance(text, str):
            raise ApiError(type_error("string", text))
        return tokenizer.encode(text, add_special=False, parse_special=special)

    extras = body.get("input_extra", [])
    if not isinstance(extras, list):
        raise ApiError('"input_extra" must be an array of {"filename": string, "text": string}')
    chunks: list[int] = []
    if ids.fim_rep is not None:
        chunks += [ids.fim_rep, *encode("myproject\n")]
    for extra in extras:
        if not isinstance(extra, dict) or not isinstance(extra.get("text"), str):
            raise ApiError('extra_context chunk must contain a "text" field with a string value')
        if "filename" in extra and not isinstance(extra["filename"], str):
            raise ApiError('extra_context chunk must contain a "filename" field with a string value')
        if ids.fim_sep is not None:
            chunks += [ids.fim_sep, *encode(extra.get("filename", "tmp") + "\n")]
        else:
            chunks += encode("\n\n--- snippet ---\n\n")
        chunks += encode(extra["text"])
    if ids.fim_sep is not None:
        chunks += [ids.fim_sep, *encode("filename\n")]
    prefix, suffix = encode(body["input_prefix"]), encode(body["input_suffix"])
    prompt = encode(body.get("prompt", ""), special=True)
    n_batch = model.n_batch
    prefix = prefix[max(0, len(prefix) - 3 * (n_batch // 4)) :]
    suffix = suffix[: max(0, n_batch // 4 - (2 + len(prompt)))]
    before = [ids.fim_pre, *prefix, *prompt]
    after = [ids.fim_suf, *suffix]
    core = [*after, *before] if state.config.spm_infill else [*before, *after]
    bos = [ids.bos] if tokenizer.add_bos else []
    n_predict = body.get("n_predict")
    reserve = n_predict if isinstance(n_predict, int) and n_predict > 0 else 0
    room = max(0, model.engine.n_ctx - n_batch - 2 * reserve)
    return [*bos, *chunks[max(0, len(chunks) - room) :], *core, ids.fim_mid]
