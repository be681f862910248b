"""Options of the server, and those of chats that the server and the terminal share."""

from __future__ import annotations

from ggufspec.tools import option_values as read
from ggufspec.tools.options import TEXT, Option

G = "server"
_SERVER = frozenset({"server"})
_NO_MEDIA = "images, audio and video are not implemented"
_NO_ROUTER = "one server serves one model"
_NO_AGENT = "there are no built-in tools; the client runs its own"


def _server(names: str, key: str, metavar: str, parse: read.Reader, help: str, env: str = "", **more: object) -> Option:
    return Option(tuple(names.split()), G, help, f"server.{key}", metavar, parse,
                  env=f"LLAMA_ARG_{env}" if env else "", tools=_SERVER, **more)  # type: ignore[arg-type]  # fmt: skip


def _switch(name: str, key: str, help: str, env: str = "", negative: str = "") -> Option:
    return Option(tuple(name.split()), G, help, f"server.{key}", negative=tuple(negative.split()),
                  env=f"LLAMA_ARG_{env}" if env else "", tools=_SERVER)  # fmt: skip


def _chat(names: str, key: str, metavar: str, parse: read.Reader, help: str, env: str = "", **more: object) -> Option:
    return Option(tuple(names.split()), "chat", help, f"chat.{key}", metavar, parse,
                  env=f"LLAMA_ARG_{env}" if env else "", tools=TEXT, **more)  # type: ignore[arg-type]  # fmt: skip


def _chat_switch(name: str, key: str, help: str, env: str = "", negative: str = "") -> Option:
    return Option(tuple(name.split()), "chat", help, f"chat.{key}", negative=tuple(negative.split()),
                  env=f"LLAMA_ARG_{env}" if env else "", tools=TEXT)  # fmt: skip


def _noop(names: str, note: str, metavar: str = "", negative: str = "", env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar=metavar, negative=tuple(negative.split()),
                  env=f"LLAMA_ARG_{env}" if env else "", tools=TEXT, status="no-op", note=note)  # fmt: skip


def _unsupported(names: str, note: str, metavar: str = "", env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar=metavar, env=f"LLAMA_ARG_{env}" if env else "", tools=TEXT,
                  status="unsupported", note=note)  # fmt: skip


def hosts(text: str) -> tuple[str, ...]:
    names = read.csv_list(text)
    if not names:
        raise ValueError("expected an address or a socket path")
    return names


def prefix(text: str) -> str:
    if text and (not text.startswith("/") or text.endswith("/")):
        raise ValueError(f"invalid value {text!r}: expected a path that begins with '/' and does not end with it")
    return text


OPTIONS = (
    # chats
    Option(("--jinja",), "chat", "use the model's Jinja chat template (tools need it)", "chat.jinja",
           negative=("--no-jinja",), env="LLAMA_ARG_JINJA", tools=_SERVER),
    Option(("--jinja",), "chat", negative=("--no-jinja",), env="LLAMA_ARG_JINJA", tools=TEXT - _SERVER,
           status="no-op", note="templates are always Jinja; only tools, a server's affair, ask for it"),
    _chat("--chat-template", "template", "NAME|TEXT", read.text, "a built-in template's name, or Jinja source",
          "CHAT_TEMPLATE"),
    _chat("--chat-template-file", "template_file", "FNAME", read.text, "Jinja template from a file",
          "CHAT_TEMPLATE_FILE"),
    _chat("--chat-template-kwargs", "template_kwargs", "JSON", read.json_object, "variables for the template",
          "CHAT_TEMPLATE_KWARGS"),
    _chat("--reasoning-format", "reasoning_format", "FORMAT",
          read.one_of("none", "deepseek", "deepseek-legacy", "auto"),
          "where thinking goes: none (in the text), deepseek, deepseek-legacy or auto", "THINK"),
    _chat("-rea --reasoning", "reasoning", "on|off|auto", read.on_off_auto("--reasoning"),
          "whether the model thinks (template variable enable_thinking)", "REASONING"),
    _chat("--reasoning-effort", "reasoning_effort", "LEVEL", read.text, "template variable reasoning_effort",
          "REASONING_EFFORT"),
    _chat("--reasoning-budget", "reasoning_budget", "N", read.at_least(-1), "most thinking tokens (-1: no limit)",
          "THINK_BUDGET"),
    _chat("--reasoning-budget-message", "reasoning_budget_message", "TEXT", read.text,
          "text put before the end of thinking when the budget is used up", "THINK_BUDGET_MESSAGE"),
    _chat_switch("--reasoning-preserve", "reasoning_preserve", "keep thinking of earlier turns, if the template can",
                 "REASONING_PRESERVE", "--no-reasoning-preserve"),
    _chat_switch("--prefill-assistant", "prefill_assistant", "continue a last message that is the assistant's",
                 "PREFILL_ASSISTANT", "--no-prefill-assistant"),
    _chat_switch("--skip-chat-parsing", "skip_parsing", "return the model's text as it is", "SKIP_CHAT_PARSING",
                 "--no-skip-chat-parsing"),
    _chat("-r --reverse-prompt", "reverse_prompts", "TEXT", read.appended(read.text), "stop at this text; repeatable",
          appends=True),
    _chat_switch("-sp --special", "special", "show control tokens"),
    # HTTP
    _server("--host", "hosts", "HOST[,HOST]", hosts, "addresses to listen on; a name ending in .sock is a UNIX socket",
            "HOST"),
    _server("--port", "port", "PORT", read.between(0, 65535), "port to listen on (0: any free one)", "PORT"),
    _switch("--reuse-port", "reuse_port", "several processes may listen on the port", "REUSE_PORT"),
    _server("-a --alias", "aliases", "NAME,...", read.csv_list, "names of the model in the API; the alphabetically "
            "first one counts", "ALIAS", appends=True),
    _server("--tags", "tags", "TAG,...", read.csv_list, "tags of the model, for information", "TAGS", appends=True),
    Option(("--api-key",), G, "keys that clients must show", "server.api_keys", "KEY,...", read.csv_list,
           env="LLAMA_API_KEY", tools=_SERVER, appends=True),
    _server("--api-key-file", "api_key_file", "FNAME", read.text, "file with one key a line", "API_KEY_FILE"),
    _server("--api-prefix", "api_prefix", "/PATH", prefix, "path before every route", "API_PREFIX"),
    _server("--ssl-key-file", "ssl_key_file", "FNAME", read.text, "TLS private key (PEM)", "SSL_KEY_FILE"),
    _server("--ssl-cert-file", "ssl_cert_file", "FNAME", read.text, "TLS certificate (PEM)", "SSL_CERT_FILE"),
    _server("--path", "static_path", "DIR", read.existing_directory, "serve these files in place of the built-in page",
            "STATIC_PATH"),
    _switch("--webui --ui", "ui", "the page at /", "UI", "--no-webui --no-ui"),
    _server("--webui-config --ui-config", "ui_settings", "JSON", read.json_object, "default settings of the page",
            "UI_CONFIG"),
    _server("--webui-config-file --ui-config-file", "ui_settings", "FNAME", read.of_file(read.json_object),
            "default settings of the page, from a file", "UI_CONFIG_FILE"),
    _server("-to --timeout", "timeout_s", "SECONDS", read.at_least(1), "time-out of reads and writes", "TIMEOUT"),
    _server("--sse-ping-interval", "sse_ping_interval_s", "SECONDS", read.integer,
            "comment lines on silent streams (-1: none)", "SSE_PING_INTERVAL"),
    _server("--cors-origins", "cors_origins", "TEXT", read.text, "Access-Control-Allow-Origin", "CORS_ORIGINS"),
    _server("--cors-methods", "cors_methods", "TEXT", read.text, "Access-Control-Allow-Methods", "CORS_METHODS"),
    _server("--cors-headers", "cors_headers", "TEXT", read.text, "Access-Control-Allow-Headers", "CORS_HEADERS"),
    _switch("--cors-credentials", "cors_credentials", "Access-Control-Allow-Credentials", "CORS_CREDENTIALS",
            "--no-cors-credentials"),
    _switch("--metrics", "metrics", "GET /metrics for Prometheus", "ENDPOINT_METRICS"),
    _switch("--props", "props", "POST /props", "ENDPOINT_PROPS"),
    _switch("--slots", "slots", "GET /slots", "ENDPOINT_SLOTS", "--no-slots"),
    _server("--slot-save-path", "slot_save_path", "DIR", read.existing_directory, "where slots are saved"),
    _noop("-sps --slot-prompt-similarity", "a prompt goes to the slot that saves most of it", "F"),
    _switch("--cache-prompt", "cache_prompt", "reuse the common prefix of prompts", "CACHE_PROMPT",
            "--no-cache-prompt"),
    _noop("--cache-idle-slots", "states that a new prompt would overwrite go to --cache-ram",
          negative="--no-cache-idle-slots", env="CACHE_IDLE_SLOTS"),
    _switch("--embedding --embeddings", "embeddings", "serve embeddings only", "EMBEDDINGS"),
    _server("--pooling", "pooling", "TYPE", read.one_of("none", "mean", "cls", "last", "rank"),
            "pooling of embeddings: none, mean, cls, last or rank (default: the model's)", "POOLING"),
    _server("--embd-normalize", "embd_normalize", "N", read.integer, "normalization of embeddings (2: Euclidean)"),
    _switch("--spm-infill", "spm_infill", "infill prompts begin with the suffix"),
    _noop("--threads-http", "connections share one event loop", "N", env="THREADS_HTTP"),
    _noop("--image-min-tokens", _NO_MEDIA, "N", env="IMAGE_MIN_TOKENS"),
    _noop("--image-max-tokens", _NO_MEDIA, "N", env="IMAGE_MAX_TOKENS"),
    _noop("--mmproj-auto", _NO_MEDIA, negative="--no-mmproj --no-mmproj-auto", env="MMPROJ_AUTO"),
    _noop("--mmproj-offload", _NO_MEDIA, negative="--no-mmproj-offload", env="MMPROJ_OFFLOAD"),
    _noop("--cache-reuse", "prefixes are reused, the cache is never shifted", "N", env="CACHE_REUSE"),
    _unsupported("--rerank --reranking", "no supported architecture ranks", env="RERANKING"),
    _unsupported("-mm --mmproj", _NO_MEDIA, "FNAME", "MMPROJ"),
    _unsupported("-mmu --mmproj-url", _NO_MEDIA, "URL", "MMPROJ_URL"),
    _unsupported("-mmdev --mmproj-device", _NO_MEDIA, "DEVICE"),
    _unsupported("--mtmd-batch-max-tokens", _NO_MEDIA, "N", "MTMD_BATCH_MAX_TOKENS"),
    _unsupported("--video-fps", _NO_MEDIA, "F", "VIDEO_FPS"),
    _unsupported("--video-timestamp-interval", _NO_MEDIA, "MS", "VIDEO_TIMESTAMP_INTERVAL"),
    _unsupported("--video-ffmpeg-dir", _NO_MEDIA, "DIR", "VIDEO_FFMPEG_DIR"),
    _unsupported("--media-path", _NO_MEDIA, "DIR"),
    _unsupported("--sleep-idle-seconds", "the model stays loaded", "N"),
    _unsupported("--models-dir", _NO_ROUTER, "DIR", "MODELS_DIR"),
    _unsupported("--models-preset", _NO_ROUTER, "FNAME", "MODELS_PRESET"),
    _unsupported("--models-max", _NO_ROUTER, "N", "MODELS_MAX"),
    _unsupported("--models-autoload", _NO_ROUTER, env="MODELS_AUTOLOAD"),
    _unsupported("--tools", _NO_AGENT, "TOOL,..."),
    _unsupported("--tools-runtime", _NO_AGENT, "NAME"),
    _unsupported("--mcp-servers-config", _NO_AGENT, "FNAME"),
    _unsupported("--mcp-servers-json", _NO_AGENT, "JSON"),
    _unsupported("-ag --agent", _NO_AGENT),
    _unsupported("--ui-mcp-proxy", _NO_AGENT),
    _unsupported("--log-prompts-dir", "prompts are never written to files", "DIR"),
)  # fmt: skip
