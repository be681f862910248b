"""What stands where a request says nothing: the command line's values, and the file's own where that is
silent too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggufspec.errors import ConfigError
from ggufspec.grammar import GrammarSpec
from ggufspec.sampling import SamplingParams, sampler_letters, sampler_names
from ggufspec.tools.settings import Settings

log = logging.getLogger(__name__)

# key after `general.sampling.`: field of SamplingParams, type
KEYS: dict[str, tuple[str, type]] = {
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def sampling_of(settings: Settings, metadata: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters with the file's values for what the user did not give. ConfigError for a bad
    key.
    """
    found: dict[str, Any] = {}
    for key, (name, kind) in KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is None or f"sampling.{name}" in settings.given:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and value != int(value)):
            raise ConfigError(f"key general.sampling.{key} is {value!r}; expected a number of type {kind.__name__}")
        found[name] = kind(value)
    sequence = metadata.get("general.sampling.sequence")
    if sequence is not None and "sampling.samplers" not in settings.given:
        known, unknown = (
            sampler_names(sequence.split(";")) if ";" in sequence or "_" in sequence else sampler_letters(sequence)
        )
        if unknown:
            raise ConfigError(f"key general.sampling.sequence names the unknown sampler {unknown[0]!r}")
        found["samplers"] = tuple(known)
    return replace(settings.sampling, **found) if found else settings.sampling


def grammar_of(settings: Settings) -> GrammarSpec | None:
    """The command line's grammar; --json-schema wins over --grammar, as its later conversion does in
    llama.cpp.
    """
    if settings.grammar.json_schema is not None:
        if settings.grammar.grammar is not None:
            log.warning("--grammar has no effect beside --json-schema: give one of them")
        return GrammarSpec("json_schema", settings.grammar.json_schema)
    return GrammarSpec("gbnf", settings.grammar.grammar) if settings.grammar.grammar is not None else None
