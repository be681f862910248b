"""Prompt forms of completions and embeddings: text, ids, a mix of both, or a list of these."""

from __future__ import annotations

from typing import Any

from .errors import ApiError, missing_key

_FORMS = (
    '"{name}" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)


def read_prompts(body: dict[str, Any], tokenizer: Any, name: str = "prompt") -> list[list[int]]:
    """The token lists of one prompt or several. BOS is added as the vocabulary asks."""
    if name not in body:
        raise missing_key(name)
    value = body[name]
    if isinstance(value, list) and not value:
        raise ApiError(f'"{name}" must not be empty')
    if isinstance(value, list) and not _is_mixed(value):
        return [_one(item, tokenizer, name) for item in value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [_one(item, tokenizer, name) for item in value]
    return [_one(value, tokenizer, name)]


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mixed(value: list[Any]) -> bool:
    return all(_is_token(item) or isinstance(item, str) for item in value)


def _one(value: Any, tokenizer: Any, name: str) -> list[int]:
    if isinstance(value, str):
        return tokenizer.encode(value, add_special=True, parse_special=True)
    if isinstance(value, list) and _is_mixed(value):
        return tokenize_mixed(value, tokenizer, add_special=True, parse_special=True)
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise ApiError("Multimodal data provided, but model does not support multimodal requests.")
        return tokenizer.encode(value["prompt_string"], add_special=True, parse_special=True)
    raise ApiError(_FORMS.format(name=name))


def tokenize_mixed(value: list[Any], tokenizer: Any, add_special: bool, parse_special: bool) -> list[int]:
    """Texts and ids in one sequence; BOS goes in front of a text that comes first, never elsewhere."""
    out: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            out += tokenizer.encode(item, add_special=add_special and i == 0, parse_special=parse_special)
        else:
            out.append(item)
    return out
