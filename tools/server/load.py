"""From settings to everything a server needs: the engine, the chat template, the file's facts, the defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ggufspec.chat import load_templates
from ggufspec.errors import ConfigError, UnsupportedError
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.models import Config
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools import model_defaults
from ggufspec.tools.option_values import reason
from ggufspec.tools.runtime import Runtime, open_runtime
from ggufspec.tools.settings import ChatSettings, Settings
from ggufspec.tools.warm_up import warm_up

from .fields import Task
from .state import Loaded, ModelInfo

# general.file_type as llama.cpp spells it
FILE_TYPES = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K - Medium",
    11: "Q3_K - Small", 12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium",
    16: "Q5_K - Small", 17: "Q5_K - Medium", 18: "Q6_K", 21: "Q2_K - Small", 25: "IQ4_NL - 4.5 bpw",
    30: "IQ4_XS - 4.25 bpw", 32: "BF16",
}  # fmt: skip
VOCABULARY_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6, "gemma4": 2}


def load(settings: Settings) -> Loaded:
    """GgufspecError with one line when something does not fit."""
    if settings.model.path is None:
        raise ConfigError("--model is required: give a GGUF file with -m")
    runtime = open_runtime(settings)
    warm_up(runtime)
    return loaded(runtime)


def loaded(runtime: Runtime) -> Loaded:
    """What the server needs to know of a running engine."""
    settings, tokenizer = runtime.settings, runtime.tokenizer
    templates = load_templates(
        runtime.file.metadata, tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos), *_override(settings.chat)
    )
    drafters = () if runtime.drafter is None else runtime.drafter.name.split(",")
    draft_path = None if runtime.drafter is None else settings.speculative.model
    files = [runtime.file] if draft_path is None else [runtime.file, open_gguf(draft_path)]
    return Loaded(
        runtime.engine,
        tokenizer,
        templates,
        replace(model_info(runtime.file, runtime.config, tokenizer), digest=digest_of(files, runtime.config)),
        default_task(settings, runtime.file, ",".join(["none", *drafters])),
        settings.context.n_batch,
    )


def _override(chat: ChatSettings) -> tuple[str | None, str]:
    """The template the command line gives instead of the file's, and the option it came from."""
    if chat.template_file is not None:
        try:
            return Path(chat.template_file).read_text(), "--chat-template-file"
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--chat-template-file {chat.template_file}: cannot be read ({reason(e)})") from None
    return chat.template, "--chat-template"


def model_info(file: GGUFFile, config: Config, tokenizer: Tokenizer) -> ModelInfo:
    number = file.get("general.file_type", int, None)
    return ModelInfo(
        path=str(file.path),
        ftype=FILE_TYPES.get(number, f"type {number}") if number is not None else "unknown",
        n_ctx_train=config.context_length,
        n_vocab=tokenizer.n_vocab,
        n_embd=config.embedding_length,
        n_params=sum(tensor.n_elements for tensor in file.tensors.values()),
        n_bytes=file.n_bytes,
        vocab_type=VOCABULARY_TYPES.get(file.get("tokenizer.ggml.model", str), 0),
    )


def digest_of(files: Sequence[GGUFFile], config: Config) -> str:
    """Of what a slot's caches depend on: the beginning of every tensor of target and drafter, and the target's numbers
    as the options left them."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=8)
    for file in files:
        for name, tensor in sorted(file.tensors.items()):
            digest.update(f"{name} {tensor.type_name} {tensor.shape}".encode())
            with suppress(UnsupportedError):  # of a block that nothing here runs
                digest.update(file.read(name).reshape(-1)[:64].tobytes())
    return digest.hexdigest()


def default_task(settings: Settings, file: GGUFFile, speculative_types: str) -> Task:
    """What a request gets for the fields it does not set."""
    grammar = model_defaults.grammar_of(settings)
    return Task(
        sampling=model_defaults.sampling_of(settings, file.metadata),
        grammar=grammar,
        grammar_text="" if grammar is None else grammar.text,
        n_predict=settings.context.n_predict,
        stop=list(settings.chat.reverse_prompts),
        cache_prompt=settings.server.cache_prompt,
        sse_ping_interval=settings.server.sse_ping_interval_s,
        reasoning_format=settings.chat.reasoning_format,
        speculative_types=speculative_types,
    )
