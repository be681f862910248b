"""What the handlers share: settings, the loaded model's facts, the engine's worker."""

from __future__ import annotations

import secrets
import string
import time
from dataclasses import dataclass, replace
from typing import Any

from ggufspec import __version__
from ggufspec.job import Request
from ggufspec.tools.settings import ServerSettings, Settings

from .errors import ApiError
from .fields import Reader, Task
from .worker import EngineWorker

BUILD_INFO = f"ggufspec-{__version__}"
MAX_BODY_BYTES = 100 << 20
DRAIN_S = 6.0  # after SIGTERM running requests may finish for so long
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ModelInfo:
    """What /v1/models and /props tell of the file."""

    path: str
    ftype: str = ""
    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    n_bytes: int = 0
    vocab_type: int = 2
    digest: str = ""  # tells models of one shape and type apart

    @property
    def fingerprint(self) -> str:
        """What saved slots are bound to: equal for copies of a file, different for another model or type."""
        return f"{self.ftype}/{self.n_params}/{self.n_vocab}/{self.n_bytes}/{self.digest}"


@dataclass
class Loaded:
    """Everything that exists once the model is loaded."""

    engine: Any
    tokenizer: Any
    chat: Any
    info: ModelInfo
    defaults: Task
    n_batch: int = 2048


class ServerState:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.config: ServerSettings = settings.server
        self.worker: EngineWorker = None  # type: ignore[assignment]  # set before the first request
        self.loaded: Loaded | None = None
        self.reader: Reader = None  # type: ignore[assignment]  # set with `loaded`
        self.created = int(time.time())
        self.media_marker = f"<__media_{random_id()}__>"

    def ready(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.reader = Reader(loaded.defaults, loaded.tokenizer, len(loaded.engine.slots))

    @property
    def model(self) -> Loaded:
        if self.loaded is None:
            raise ApiError("Loading model", 503)
        return self.loaded

    @property
    def name(self) -> str:
        """The name the API shows: the alphabetically first alias, else the path."""
        return min(self.config.aliases) if self.config.aliases else self.model.info.path

    def request(self, prompt: list[int], task: Task, seed_offset: int = 0, **more: Any) -> Request | None:
        """The engine's request for a prompt; None for an empty one. ApiError when it can never fit."""
        engine = self.model.engine
        n_vocab = self.model.tokenizer.n_vocab
        if any(not 0 <= token < n_vocab for token in prompt):
            raise ApiError("Prompt contains invalid tokens")
        if len(prompt) >= engine.n_ctx:
            raise ApiError(
                f"request ({len(prompt)} tokens) exceeds the available context size ({engine.n_ctx} tokens), "
                "try increasing it",
                kind="exceed_context_size_error",
                n_prompt_tokens=len(prompt),
                n_ctx=engine.n_ctx,
            )
        if not prompt:
            return None
        sampling = task.sampling
        if seed_offset and sampling.seed != 0xFFFFFFFF:
            sampling = replace(sampling, seed=(sampling.seed + seed_offset) & 0xFFFFFFFF)
        return Request(
            prompt=prompt,
            sampling=sampling,
            n_predict=max(task.n_predict, 1) if task.n_predict >= 0 else -1,
            stop=tuple(task.stop),
            grammar=task.grammar,
            n_probs=sampling.n_probs,
            post_sampling_probs=sampling.post_sampling_probs,
            speculation=task.speculation,
            cache_prompt=task.cache_prompt,
            slot=task.id_slot % len(engine.slots) if task.id_slot >= 0 else None,
            # the two limits of the server's own may end a stream at any token, and then its times are shown
            timings_per_token=task.timings_per_token or task.t_max_predict_ms > 0 or task.n_indent > 0,
            parse_special_out=self.settings.chat.special,
            **more,
        )


def random_id(n: int = 32) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(n))
