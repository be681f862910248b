"""Prompts to measure with: the package's own, by workload, or the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ggufspec.chat import load_templates
from ggufspec.errors import ConfigError, FileError
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools.option_values import reason

WORKLOADS = ("code", "json", "prose", "chat")


@dataclass(frozen=True)
class Prompt:
    """`chat`: the text is a user's message, which goes through the model's chat template if it has one."""

    workload: str
    text: str
    chat: bool = False


def own_prompts() -> list[Prompt]:
    """The prompts in the package: four for each workload."""
    return _from_objects(json.loads(files(__package__).joinpath("prompts.json").read_text()), "prompts.json")


def read_prompts(path: str) -> list[Prompt]:
    """A JSON list or JSON lines of {"prompt", "workload", "chat"}; any other text is one prompt.

    FileError when the file cannot be read, ConfigError for an entry without a prompt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"--prompts {path}: cannot be read ({reason(error)}); expected a text file, or .json or .jsonl of prompts"
        ) from None
    if Path(path).suffix in (".json", ".jsonl"):
        try:
            lines = [line for line in text.splitlines() if line.strip()]
            objects = json.loads(text) if Path(path).suffix == ".json" else [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise FileError(f"--prompts {path}: not JSON (line {error.lineno}: {error.msg})") from None
        return _from_objects(objects, path)
    if not text.strip():
        raise ConfigError(f"--prompts {path}: the file is empty; expected a prompt, or .json/.jsonl entries")
    return [Prompt(Path(path).stem, text)]


def _from_objects(objects: Any, path: str) -> list[Prompt]:
    if not isinstance(objects, list) or not objects:
        raise ConfigError(f"{path}: expected a non-empty list of prompts")
    out = []
    for i, entry in enumerate(objects):
        entry = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
            raise ConfigError(f'{path}: entry {i + 1} has no "prompt"; expected {{"prompt": text, "workload": name}}')
        out.append(Prompt(str(entry.get("workload", Path(path).stem)), entry["prompt"], bool(entry.get("chat"))))
    return out


def choose(prompts: Sequence[Prompt], workloads: Sequence[str], n_each: int) -> dict[str, list[Prompt]]:
    """At most `n_each` prompts of each workload asked for (none asked for: all), in the order of `prompts`."""
    by_name: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_name.setdefault(prompt.workload, []).append(prompt)
    unknown = [name for name in workloads if name not in by_name]
    if unknown:
        raise ConfigError(f"--workload {unknown[0]}: there are no such prompts; expected {', '.join(by_name)}")
    return {name: found[:n_each] for name, found in by_name.items() if not workloads or name in workloads}


def encode(prompt: Prompt, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> list[int]:
    """Token ids as the model is to see them."""
    return tokenizer.encode(written(prompt, tokenizer, metadata), add_special=True, parse_special=True)


def written(prompt: Prompt, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> str:
    """The prompt's text, through the file's chat template where prompt and file have one."""
    if not (prompt.chat and "tokenizer.chat_template" in metadata):
        return prompt.text
    templates = load_templates(metadata, tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos))
    return templates.default.render([{"role": "user", "content": prompt.text}])
