"""What a command line comes to, typed: `options` fills these, the tools read them. Defaults are
llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ggufspec.drafters.ngram_sizes import ModSizes, NgramSizes
from ggufspec.sampling import SamplingParams


@dataclass(frozen=True)
class CommonSettings:
    """Logging and the process."""

    verbosity: int = 3  # 0 output, 1 error, 2 warning, 3 info, 4 trace, 5 debug
    log_file: str | None = None
    log_colors: str = "auto"
    log_prefix: bool = False
    log_timestamps: bool = False
    perf: bool = True
    threads: int = -1  # <= 0: all hardware threads
    warmup: bool = True


@dataclass(frozen=True)
class ModelSettings:
    """The file and where its weights go."""

    path: str | None = None
    overrides: tuple[tuple[str, Any], ...] = ()  # --override-kv: key, value
    devices: tuple[str, ...] | None = None  # None: all GPUs; ("none",): the CPU
    gpu_layers: int = -1  # -1 auto, -2 all
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] | str = ()  # or "auto": the shares that leave room for the longest context
    main_gpu: int = 0
    kv_offload: bool = True
    graphs: bool = True  # False: --no-graph, the same kernels launched one by one
    fit: bool = True
    fit_margin_mib: tuple[int, ...] = (1024,)  # left free a device; one value for all
    fit_ctx: int = 4096  # the least context that fitting may leave


@dataclass(frozen=True)
class ContextSettings:
    """Tokens in flight and what is kept of them."""

    n_ctx: int = 0  # 0: the model's training context
    n_predict: int = -1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_parallel: int = 1  # the server's default is -1: four slots on one unified cache
    context_shift: bool = False
    cont_batching: bool = True  # prompts are read while other slots generate
    kv_unified: bool | None = None  # None: on if n_parallel is negative
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    n_checkpoints: int = 32
    cache_ram_mib: int = 8192  # -1 no limit, 0 off
    rope_scaling: str | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0


@dataclass(frozen=True)
class GrammarSettings:
    grammar: str | None = None
    json_schema: str | None = None


@dataclass(frozen=True)
class SpeculativeSettings:
    """The drafter. `types` empty: what the draft file is."""

    types: tuple[str, ...] = ()
    model: str | None = None
    n_max: int | str = "auto"  # as many as measured acceptance pays for; a number: always as many
    n_min: int = 0
    p_min: float = 0.0
    devices: tuple[str, ...] | None = None
    gpu_layers: int = -1
    type_k: str = "f16"
    type_v: str = "f16"
    ngram_simple: NgramSizes = NgramSizes()
    ngram_map_k: NgramSizes = NgramSizes()
    ngram_map_k4v: NgramSizes = NgramSizes()
    ngram_mod: ModSizes = ModSizes()
    synth_length: float | None = None
    synth_rates: tuple[float, ...] = ()
    lookup_static: str | None = None
    lookup_dynamic: str | None = None


@dataclass(frozen=True)
class ChatSettings:
    """Templates, thinking, and how messages become prompts."""

    jinja: bool = True
    template: str | None = None
    template_file: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_format: str = "deepseek"
    reasoning: str = "auto"
    reasoning_effort: str | None = None
    reasoning_budget: int = -1
    reasoning_budget_message: str | None = None
    reasoning_preserve: bool = True
    prefill_assistant: bool = True
    skip_parsing: bool = False
    reverse_prompts: tuple[str, ...] = ()
    special: bool = False


@dataclass(frozen=True)
class ServerSettings:
    """HTTP; names as in the server's own configuration."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    reuse_port: bool = False
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    api_prefix: str = ""
    ssl_key_file: str | None = None
    ssl_cert_file: str | None = None
    static_path: str | None = None
    ui: bool = True
    ui_settings: dict[str, Any] = field(default_factory=dict)
    timeout_s: int = 3600
    sse_ping_interval_s: int = 30
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    metrics: bool = False
    props: bool = False
    slots: bool = True
    slot_save_path: str | None = None
    cache_prompt: bool = True
    embeddings: bool = False
    pooling: str | None = None
    embd_normalize: int = 2
    spm_infill: bool = False


@dataclass(frozen=True)
class CliSettings:
    """The terminal front."""

    prompt: str | None = None
    system: str | None = None
    conversation: bool | None = None  # None: where there is no prompt and the model has a template
    single_turn: bool = False
    escape: bool = True
    simple_io: bool = False  # lines are read as they come: no editing, no history
    color: str = "auto"
    display_prompt: bool = True
    multiline_input: bool = False
    show_timings: bool = True
    transcript: str | None = None


@dataclass(frozen=True)
class PerplexitySettings:
    n_chunks: int = -1
    kl_divergence: bool = False
    logits_file: str | None = None
    output_type: int = 0


@dataclass(frozen=True)
class PlanSettings:
    gpu_mem_gib: tuple[float, ...] = ()  # empty: the GPUs of this machine


@dataclass(frozen=True)
class Settings:
    """Everything one command line says. `given` holds the keys that the user set (`context.n_ctx`, ...)."""

    common: CommonSettings = CommonSettings()
    model: ModelSettings = ModelSettings()
    context: ContextSettings = ContextSettings()
    sampling: SamplingParams = SamplingParams()
    grammar: GrammarSettings = GrammarSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    chat: ChatSettings = ChatSettings()
    server: ServerSettings = ServerSettings()
    cli: CliSettings = CliSettings()
    perplexity: PerplexitySettings = PerplexitySettings()
    plan: PlanSettings = PlanSettings()
    given: frozenset[str] = frozenset()
