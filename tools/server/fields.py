"""Request fields that all completion endpoints share: a table of names, types and ranges, read into a Task.

The table follows llama-server: which fields refuse a value outside their range and which clamp it, how
an integer field reads 1.7 or true, and the words of each refusal.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ggufspec.errors import ConfigError
from ggufspec.job import Speculation
from ggufspec.sampling.params import SamplingParams, sampler_letters, sampler_names

from .errors import ApiError, type_error

log = logging.getLogger("ggufspec.server")

INT_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38
UNLIMITED = -1


@dataclass(frozen=True)
class Field:
    """`refuse`: a value outside low..high is an error; otherwise it is moved to the nearer end."""

    name: str
    kind: str  # "bool", "int", "long" (of 64 bits), "float"
    low: float | None = None
    high: float | None = None
    refuse: bool = False

    def read(self, value: Any) -> Any:
        number = self._convert(value)
        if self.low is None and self.high is None:
            return number
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if low <= number <= high:
            return number
        if self.refuse:
            form: Callable[[float], str] = str if self.kind in ("int", "long") else "{:f}".format
            raise ApiError(
                f"Field '{self.name}': Value must be between {form(low)} <= value <= {form(high)}, "
                f"but got {form(number)}"
            )
        return low if number < low else high

    def _convert(self, value: Any) -> Any:
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise ApiError(f"Field '{self.name}': {type_error('boolean', value)}")
            return value
        if not isinstance(value, int | float):
            raise ApiError(f"Field '{self.name}': {type_error('number', value)}")
        if self.kind == "float":
            return float(value) if abs(value) < 1e300 else math.copysign(math.inf, value)
        return _cpp_int(value, 64 if self.kind == "long" else 32)


def _cpp_int(value: float, n_bits: int) -> int:
    """A number as llama-server's integer: a whole one keeps its lowest bits, another that does not fit gives the
    smallest integer. JSON's whole numbers end at 64 bits there; larger ones are no whole ones any more.
    """
    limit = 1 << (n_bits - 1)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return (value + limit) % (2 * limit) - limit
    return int(value) if -limit <= value < limit else -limit


def _hard_int(name: str, low: int, high: int = INT_MAX) -> Field:
    return Field(name, "int", low, high, refuse=True)


# Fields of SamplingParams, under their own names.
SAMPLING_FIELDS = (
    Field("temperature", "float", 0.0, None),
    Field("dynatemp_range", "float"),
    Field("dynatemp_exponent", "float"),
    Field("top_k", "int", 0, None),
    Field("top_p", "float", 0.0, 1.0),
    Field("min_p", "float", 0.0, 1.0),
    Field("top_n_sigma", "float"),
    Field("typical_p", "float"),
    Field("xtc_probability", "float", 0.0, 1.0),
    Field("xtc_threshold", "float", 0.0, 1.0),
    _hard_int("min_keep", 0),
    _hard_int("repeat_last_n", 0),
    Field("repeat_penalty", "float"),
    Field("presence_penalty", "float"),
    Field("frequency_penalty", "float"),
    Field("dry_multiplier", "float"),
    Field("dry_base", "float"),
    _hard_int("dry_allowed_length", 0),
    _hard_int("dry_penalty_last_n", 0),
    Field("mirostat", "int", 0, 2),
    Field("mirostat_tau", "float"),
    Field("mirostat_eta", "float"),
    Field("adaptive_target", "float", None, 1.0),
    Field("adaptive_decay", "float", 0.0, 0.99, refuse=True),
    Field("ignore_eos", "bool"),
    Field("n_probs", "int"),
    Field("post_sampling_probs", "bool"),
)

# Fields of Task itself.
TASK_FIELDS = (
    Field("stream", "bool"),
    _hard_int("n_keep", -1),
    _hard_int("n_discard", 0),
    _hard_int("n_cache_reuse", 0),
    _hard_int("n_indent", 0),
    Field("t_max_predict_ms", "long", -1, 2**63 - 1, refuse=True),
    Field("cache_prompt", "bool"),
    Field("return_tokens", "bool"),
    Field("return_progress", "bool"),
    Field("timings_per_token", "bool"),
    Field("verbose", "bool"),
    Field("grammar_lazy", "bool"),
    Field("backend_sampling", "bool"),
    Field("sse_ping_interval", "int"),
    Field("id_slot", "int"),
)

LIMIT_NAMES = ("n_predict", "max_completion_tokens", "max_tokens")  # the first present wins


@dataclass
class Task:
    """One request's parameters after reading; what `generation_settings` shows."""

    sampling: SamplingParams
    n_predict: int = UNLIMITED
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    n_cmpl: int = 1
    n_keep: int = 0
    n_discard: int = 0
    n_cache_reuse: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = -1
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    backend_sampling: bool = False
    sse_ping_interval: int = 30
    id_slot: int = -1
    response_fields: list[str] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    grammar: Any = None  # GrammarSpec of the engine
    grammar_text: str = ""
    grammar_lazy: bool = False
    grammar_triggers: list[dict[str, Any]] = field(default_factory=list)
    preserved_tokens: list[int] = field(default_factory=list)
    chat_format: str = "Content-only"
    reasoning_format: str = "deepseek"
    generation_prompt: str = ""
    speculative_types: str = "none"
    eog: tuple[int, ...] = ()  # what `ignore_eos` bans

    def settings(self, with_text: bool = True) -> dict[str, Any]:
        """`generation_settings`; without the text fields for /props and /slots."""
        s = self.sampling
        out: dict[str, Any] = {"seed": s.seed & 0xFFFFFFFF}
        for item in SAMPLING_FIELDS:
            if item.name in ("min_keep", "ignore_eos", "n_probs", "post_sampling_probs"):
                continue
            if item.name == "repeat_last_n":  # llama-server's order: typical_p stands between
                out["typical_p"] = out.pop("typical_p")
            value = getattr(s, item.name)
            out[item.name] = float32(value) if item.kind == "float" else value
            if item.name == "dry_penalty_last_n" and with_text:
                out["dry_sequence_breakers"] = list(s.dry_sequence_breakers)
        if with_text:
            out["stop"] = self.stop
        out |= {"max_tokens": self.n_predict, "n_predict": self.n_predict, "n_keep": self.n_keep}
        out |= {"n_discard": self.n_discard, "ignore_eos": s.ignore_eos, "stream": self.stream}
        if with_text:
            banned = [(token, -math.inf) for token in self.eog] if s.ignore_eos else []
            out["logit_bias"] = [
                {"bias": float32(bias), "token": token}
                for token, bias in (*s.logit_bias, *banned)
            ]
        out |= {"n_probs": s.n_probs, "min_keep": s.min_keep}
        if with_text:
            out |= {"grammar": self.grammar_text, "grammar_lazy": self.grammar_lazy}
            out |= {"grammar_triggers": self.grammar_triggers, "preserved_tokens": self.preserved_tokens}
        out |= {
            "chat_format": self.chat_format,
            "reasoning_format": self.reasoning_format,
            "reasoning_in_content": False,
            "generation_prompt": self.generation_prompt,
            "samplers": list(s.samplers),
            "speculative.types": self.speculative_types,
            "timings_per_token": self.timings_per_token,
            "post_sampling_probs": s.post_sampling_probs,
            "backend_sampling": self.backend_sampling,
            "lora": [],
        }
        return out


def float32(value: float) -> float | None:
    """The nearest float32, as llama-server stores and prints its settings; None for infinity, which JSON lacks."""
    if abs(value) > _FLOAT32_MAX:
        return None
    return struct.unpack("f", struct.pack("f", value))[0]


class Reader:
    """Reads bodies into Tasks: holds the server's defaults and the vocabulary that string biases need."""

    def __init__(self, defaults: Task, tokenizer: Any, n_parallel: int):
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.n_parallel = n_parallel
        self._warned: set[str] = set()
        self._n_cmpl = {name: _hard_int(name, 1, n_parallel) for name in ("n", "n_cmpl")}

    def read(self, body: dict[str, Any]) -> Task:
        """A Task for a body whose null members are gone. Raises ApiError naming the field."""
        sampling = {f.name: f.read(body[f.name]) for f in SAMPLING_FIELDS if f.name in body}
        own = {f.name: f.read(body[f.name]) for f in TASK_FIELDS if f.name in body}
        if "n_probs" not in sampling and "logprobs" in body:
            sampling["n_probs"] = Field("logprobs", "int").read(body["logprobs"])
        if sampling.get("dry_base", 1.0) < 1.0:
            del sampling["dry_base"]
        if sampling.get("n_probs", 0) < 0:
            sampling["n_probs"] = 0
        if "seed" in body:
            sampling["seed"] = _seed(body["seed"])
        if "samplers" in body:
            sampling["samplers"] = _samplers(body["samplers"], self.defaults.sampling.samplers)
        if "dry_sequence_breakers" in body:
            sampling["dry_sequence_breakers"] = _breakers(body["dry_sequence_breakers"])
        if "logit_bias" in body:
            sampling["logit_bias"] = tuple(self._biases(body["logit_bias"]))
        if "preserved_tokens" in body:
            own["preserved_tokens"] = self._preserved(body["preserved_tokens"])
        if "reasoning_format" in body:
            own["reasoning_format"] = _reasoning_format(body["reasoning_format"])
        task = replace(self.defaults, eog=tuple(sorted(self.tokenizer.eog)), **own)
        try:
            task.sampling = replace(self.defaults.sampling, **sampling)
        except ConfigError as e:
            raise ApiError(f"Failed to initialize samplers: {e}") from None
        task.n_predict = self._limit(body)
        task.n_cmpl = self._completions(body)
        task.stop = (_stops(body) if "stop" in body else []) or list(self.defaults.stop)
        task.include_usage = _include_usage(body)
        task.speculation = self._speculation(body)
        if not isinstance(body.get("lora", []), list):
            raise ApiError("Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields")
        fields = body.get("response_fields")
        task.response_fields = [f for f in fields if isinstance(f, str)] if isinstance(fields, list) else []
        return task

    def _speculation(self, body: dict[str, Any]) -> Speculation:
        """`speculative.n_max`, flat or in an object `speculative` (llama-server ignores all of them)."""
        nested = body.get("speculative")
        found = dict(nested) if isinstance(nested, dict) else {}
        for key, value in body.items():
            if key.startswith("speculative."):
                found[key.removeprefix("speculative.")] = value
        for key in ("n_min", "p_min"):
            if key in found and key not in self._warned:
                self._warned.add(key)
                log.warning("speculative.%s of a request has no effect: the command line's value holds", key)
        n_max = found.get("n_max")
        return Speculation(None if n_max is None else _hard_int("speculative.n_max", 0).read(n_max))

    def _limit(self, body: dict[str, Any]) -> int:
        for name in LIMIT_NAMES:
            if name in body:
                asked = _hard_int(name, -1).read(body[name])
                most = self.defaults.n_predict
                return min(asked, most) if asked >= 0 <= most else (most if asked < 0 else asked)
        return self.defaults.n_predict

    def _completions(self, body: dict[str, Any]) -> int:
        for name, item in self._n_cmpl.items():
            if name in body:
                return item.read(body[name])
        return 1

    def _biases(self, value: Any) -> list[tuple[int, float]]:
        """`[[id or text, number or false], ...]` or the same as an object; anything else is skipped."""
        pairs: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            pairs = list(value.items())
        elif isinstance(value, list):
            pairs = [(item[0], item[1]) for item in value if isinstance(item, list) and len(item) == 2]
        out: list[tuple[int, float]] = []
        for key, bias in pairs:
            if bias is False:
                number = -math.inf
            elif isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) < 1e300:
                number = float(bias)
            else:
                continue
            out += [(token, number) for token in self._bias_tokens(key, isinstance(value, dict))]
        return out

    def _bias_tokens(self, key: Any, key_may_be_id: bool) -> list[int]:
        if isinstance(key, str) and key_may_be_id and key.lstrip("-").isdigit() and len(key) < 12:
            key = int(key)
        if isinstance(key, str):
            return self.tokenizer.encode(key, add_special=False, parse_special=False)
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < self.tokenizer.n_vocab:
            return [key]
        return []

    def _preserved(self, value: Any) -> list[int]:
        if not isinstance(value, list):
            raise ApiError(f"Field 'preserved_tokens': {type_error('array', value)}")
        out: list[int] = []
        for text in value:
            if not isinstance(text, str):
                raise ApiError(f"Field 'preserved_tokens': {type_error('string', text)}")
            ids = self.tokenizer.encode(text, add_special=False, parse_special=True)
            out += ids if len(ids) == 1 else []
        return out


def _seed(value: Any) -> int:
    if not isinstance(value, int | float):
        raise ApiError(f"Field 'seed': {type_error('number', value)}")
    return int(value) & 0xFFFFFFFF if abs(value) < 1e300 else 0


def _samplers(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(sampler_letters(value)[0])
    if not isinstance(value, list):
        return default
    for name in value:
        if not isinstance(name, str):
            raise ApiError(f"Field 'samplers': {type_error('string', name)}")
    return tuple(sampler_names(value)[0])


def _breakers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ApiError(
            "Field 'dry_sequence_breakers': Error: dry_sequence_breakers must be a non-empty array of strings"
        )
    return tuple(value)


def _stops(body: dict[str, Any]) -> list[str]:
    value = body["stop"]
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return []
    texts = [text for text in value if text is not None]
    for text in texts:
        if not isinstance(text, str):
            raise ApiError(f"Field 'stop': {type_error('string', text)}")
    return texts


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    value = options.get("include_usage") if isinstance(options, dict) else None
    return Field("include_usage", "bool").read(value) if value is not None else False


def _reasoning_format(value: Any) -> str:
    if not isinstance(value, str):
        raise ApiError(f"Field 'reasoning_format': {type_error('string', value)}")
    if value not in ("none", "auto", "deepseek", "deepseek-legacy"):
        raise ApiError(f"Field 'reasoning_format': Unknown reasoning format: {value}")
    return value
