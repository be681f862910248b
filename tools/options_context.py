"""Options of the context: batches, slots, the KV cache, RoPE."""

from __future__ import annotations

from ggufspec.tools import option_values as read
from ggufspec.tools.options import ALL, TEXT, Option

G = "common"
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_KEEPING = frozenset({"server", "cli", "plan"})


def cache_type(text: str) -> str:
    if text not in CACHE_TYPES:
        raise ValueError(f"Unsupported cache type: {text} (expected one of {', '.join(CACHE_TYPES)})")
    return text


def _rope(name: str, key: str, help: str, env: str, metavar: str = "F", parse: read.Reader = read.number) -> Option:
    return Option((name,), G, help, f"context.{key}", metavar, parse, env=f"LLAMA_ARG_{env}")


OPTIONS = (
    Option(("-c", "--ctx-size"), G, "tokens of context over all slots (0: the model's own)", "context.n_ctx", "N",
           read.integer, env="LLAMA_ARG_CTX_SIZE"),
    Option(("-n", "--predict", "--n-predict"), G,
           "tokens to generate (-1: until the model ends or the context is full)", "context.n_predict", "N",
           read.integer, env="LLAMA_ARG_N_PREDICT", tools=TEXT),
    Option(("-b", "--batch-size"), G, "most tokens of a prompt in one step", "context.n_batch", "N", read.integer,
           env="LLAMA_ARG_BATCH"),
    Option(("-ub", "--ubatch-size"), G, "most tokens of a prompt in one forward pass", "context.n_ubatch", "N",
           read.integer, env="LLAMA_ARG_UBATCH"),
    Option(("-np", "--parallel"), G, "slots (server: -1 is four slots on one unified cache)",
           "context.n_parallel", "N", read.integer, env="LLAMA_ARG_N_PARALLEL"),
    Option(("-cb", "--cont-batching"), G, "prompts are read while other slots generate (off: when none does)",
           "context.cont_batching", negative=("-nocb", "--no-cont-batching"), env="LLAMA_ARG_CONT_BATCHING"),
    Option(("-kvu", "--kv-unified"), G, "every slot may use the whole context", "context.kv_unified",
           negative=("-no-kvu", "--no-kv-unified"), env="LLAMA_ARG_KV_UNIFIED"),
    Option(("--kv-unified-per-slot",), G, metavar="N", env="LLAMA_ARG_KV_UNIFIED_PER_SLOT", status="unsupported",
           note="use -c and -np"),
    Option(("-fa", "--flash-attn"), G, "flash attention: on, off or auto (off forbids a quantized V cache)",
           "context.flash_attn", "on|off|auto", read.on_off_auto("--flash-attn"), env="LLAMA_ARG_FLASH_ATTN",
           warned=(("off", "attention is computed the same way; off only forbids a quantized V cache"),)),
    Option(("-ctk", "--cache-type-k"), G, f"type of the K cache: {', '.join(CACHE_TYPES)}", "context.type_k", "TYPE",
           cache_type, env="LLAMA_ARG_CACHE_TYPE_K"),
    Option(("-ctv", "--cache-type-v"), G, "type of the V cache", "context.type_v", "TYPE", cache_type,
           env="LLAMA_ARG_CACHE_TYPE_V"),
    Option(("--keep",), G, metavar="N", parse=read.integer, tools=TEXT, status="no-op",
           note="the context is never shifted"),
    Option(("--context-shift",), G, "drop old tokens when the context is full: no effect with recurrent layers, which "
           "cannot forget; other models refuse it", "context.context_shift",
           negative=("--no-context-shift",), env="LLAMA_ARG_CONTEXT_SHIFT", tools=TEXT),
    Option(("-ctxcp", "--swa-checkpoints", "--ctx-checkpoints"), G, "checkpoints of recurrent state kept per slot",
           "context.n_checkpoints", "N", read.at_least(0), env="LLAMA_ARG_CTX_CHECKPOINTS", tools=_KEEPING),
    Option(("-cms", "--checkpoint-min-step"), G, metavar="N", parse=read.at_least(0), tools=_KEEPING,
           env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", status="no-op", note="checkpoints stand at micro-batch borders"),
    Option(("-cram", "--cache-ram"), G, "host memory in MiB for states of earlier prompts (-1: no limit, 0: off)",
           "context.cache_ram_mib", "MiB", read.integer, env="LLAMA_ARG_CACHE_RAM", tools=_KEEPING),
    Option(("--swa-full",), G, env="LLAMA_ARG_SWA_FULL", status="no-op",
           note="window layers keep what their window needs"),
    # RoPE
    Option(("--rope-scaling",), G, "none, linear or yarn (default: as the model says)", "context.rope_scaling",
           "TYPE", read.one_of("none", "linear", "yarn"), env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _rope("--rope-scale", "rope_scale", "factor by which the context is stretched", "ROPE_SCALE"),
    _rope("--rope-freq-base", "rope_freq_base", "base of the rotation frequencies", "ROPE_FREQ_BASE"),
    _rope("--rope-freq-scale", "rope_freq_scale", "frequency scale, 1 / factor", "ROPE_FREQ_SCALE"),
    _rope("--yarn-orig-ctx", "yarn_orig_ctx", "YaRN: context the model was trained with", "YARN_ORIG_CTX", "N",
          read.integer),
    _rope("--yarn-attn-factor", "yarn_attn_factor", "YaRN: attention scale", "YARN_ATTN_FACTOR"),
    _rope("--yarn-ext-factor", "yarn_ext_factor", "YaRN: mix of extrapolation", "YARN_EXT_FACTOR"),
    _rope("--yarn-beta-slow", "yarn_beta_slow", "YaRN: high correction dimension", "YARN_BETA_SLOW"),
    _rope("--yarn-beta-fast", "yarn_beta_fast", "YaRN: low correction dimension", "YARN_BETA_FAST"),
    Option(("-gan", "--grp-attn-n"), G, metavar="N", env="LLAMA_ARG_GRP_ATTN_N", status="unsupported",
           note="self-extend is not implemented; use --rope-scaling yarn"),
    Option(("-gaw", "--grp-attn-w"), G, metavar="N", env="LLAMA_ARG_GRP_ATTN_W", status="unsupported",
           note="self-extend is not implemented; use --rope-scaling yarn"),
    Option(("-dt", "--defrag-thold"), G, metavar="N", env="LLAMA_ARG_DEFRAG_THOLD", status="no-op",
           note="the cache does not fragment", tools=ALL),
)  # fmt: skip
