"""Options of speculative decoding."""

from __future__ import annotations

from ggufspec.tools import option_values as read
from ggufspec.tools.options import Option
from ggufspec.tools.options_context import cache_type

G = "speculative"
TYPES = ("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple",
         "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # fmt: skip
TOOLS = frozenset({"cli", "server", "bench", "plan"})
_MAX = "use --spec-draft-n-max or --spec-ngram-mod-n-max"
_MIN = "use --spec-draft-n-min or --spec-ngram-mod-n-min"
_NGRAM = "use --spec-ngram-simple-*, --spec-ngram-map-k-* or --spec-ngram-map-k4v-*"
_NO_THREADS = "PyTorch schedules its own threads; -t sets how many"
_NO_DOWNLOAD = "nothing is downloaded; get the file first and give it with -md"


def types(text: str) -> tuple[str, ...]:
    """Names; `none` anywhere makes the value just none."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in TYPES:
            raise ValueError(f"unknown speculative type: {name} (expected {', '.join(TYPES)})")
        if name == "draft-eagle3":
            raise ValueError("draft-eagle3 is not supported: EAGLE-3 drafters are not implemented")
    return ("none",) if "none" in names else names


def n_max(text: str) -> int | str:
    return "auto" if text == "auto" else read.at_least(0)(text)


def rates(text: str) -> tuple[float, ...]:
    return tuple(read.number(part) for part in text.split(","))


def _option(names: str, key: str, metavar: str, parse: read.Reader, help: str, env: str = "") -> Option:
    return Option(tuple(names.split()), G, help, f"speculative.{key}", metavar, parse,
                  env=f"LLAMA_ARG_SPEC_{env}" if env else "", tools=TOOLS)  # fmt: skip


def _noop(names: str, note: str, metavar: str = "", negative: str = "", env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar=metavar, negative=tuple(negative.split()), env=env, tools=TOOLS,
                  status="no-op", note=note)  # fmt: skip


def _unsupported(names: str, note: str, metavar: str, env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar=metavar, env=env, tools=TOOLS, status="unsupported", note=note)


def _removed(names: str, note: str, env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar="N", env=env, tools=TOOLS, status="removed", note=note)


def _ngram(kind: str) -> tuple[Option, ...]:
    key = "ngram_" + kind.replace("-", "_")
    name = f"--spec-ngram-{kind}"
    return (
        _option(f"{name}-size-n", f"{key}.size_n", "N", read.between(1, 1024), f"ngram-{kind}: tokens to look up"),
        _option(f"{name}-size-m", f"{key}.size_m", "N", read.between(1, 1024), f"ngram-{kind}: tokens to draft"),
        _option(f"{name}-min-hits", f"{key}.min_hits", "N", read.at_least(1), f"ngram-{kind}: occurrences needed"),
    )


OPTIONS = (
    Option(("--spec-type",), G, "drafters, comma-separated or repeated: " + ", ".join(TYPES)
           + " (default: what --model-draft is)", "speculative.types", "TYPE,...", types, env="LLAMA_ARG_SPEC_TYPE",
           tools=TOOLS, appends=True),
    _option("-md --model-draft --spec-draft-model", "model", "FNAME", read.text, "drafter's GGUF file", "DRAFT_MODEL"),
    _option("--spec-draft-n-max", "n_max", "N|auto", n_max,
            "most tokens drafted a step; auto: as many as measured acceptance pays for", "DRAFT_N_MAX"),
    _option("--spec-draft-n-min", "n_min", "N", read.at_least(0), "shorter drafts are thrown away", "DRAFT_N_MIN"),
    _option("--spec-draft-conf-min --draft-p-min --spec-draft-p-min", "p_min", "P", read.between(0, 1, read.number),
            "stop drafting below this confidence", "DRAFT_P_MIN"),
    _option("-devd --device-draft --spec-draft-device", "devices", "D0,D1,...", read.device_list,
            "GPUs of the drafter (default: the target's)"),
    Option(("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"), G,
           "the drafter's layers on the GPU", "speculative.gpu_layers", "N", read.gpu_layers,
           env="LLAMA_ARG_N_GPU_LAYERS_DRAFT", tools=TOOLS),
    _option("-ctkd --cache-type-k-draft --spec-draft-type-k", "type_k", "TYPE", cache_type,
            "type of the drafter's K cache", "DRAFT_CACHE_TYPE_K"),
    _option("-ctvd --cache-type-v-draft --spec-draft-type-v", "type_v", "TYPE", cache_type,
            "type of the drafter's V cache", "DRAFT_CACHE_TYPE_V"),
    Option(("--spec-draft-sampling",), G, "how drafts are chosen", "", "greedy|probabilistic",
           read.one_of("greedy", "probabilistic"), env="LLAMA_ARG_SPEC_DRAFT_SAMPLING", tools=TOOLS,
           refused=(("probabilistic", "drafts are greedy, and the target's own choice decides: that keeps every "
                     "stream what it is without drafts"),)),
    *_ngram("simple"),
    *_ngram("map-k"),
    *_ngram("map-k4v"),
    _option("--spec-ngram-mod-n-match", "ngram_mod.n_match", "N", read.between(1, 1024),
            "ngram-mod: tokens to look up"),
    _option("--spec-ngram-mod-n-min", "ngram_mod.n_min", "N", read.between(0, 1024), "ngram-mod: shortest draft"),
    _option("--spec-ngram-mod-n-max", "ngram_mod.n_max", "N", read.between(0, 1024), "ngram-mod: longest draft"),
    _option("-lcs --lookup-cache-static", "lookup_static", "FNAME", read.text, "ngram-cache: file that is only read"),
    _option("-lcd --lookup-cache-dynamic", "lookup_dynamic", "FNAME", read.text,
            "ngram-cache: file that is read and updated"),
    Option(("--spec-default",), G, "the same as --spec-type ngram-mod", "speculative.types", const=("ngram-mod",),
           tools=TOOLS),
    _unsupported("-hfd -hfrd --hf-repo-draft --spec-draft-hf", _NO_DOWNLOAD, "USER/MODEL[:QUANT]",
                 "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    _unsupported("-otd --override-tensor-draft --spec-draft-override-tensor",
                 "a drafter lies on one device; use --spec-draft-device", "RE=BUFFER,..."),
    _option("--spec-synth-len", "synth_length", "L", read.number,
            "for benchmarks: accept drafts at random so that a step emits L tokens on average", "SYNTH_LEN"),
    _option("--spec-synth-rates", "synth_rates", "P0,P1,...", rates,
            "for benchmarks: accept at random; chance that the first 1, 2, ... drafted tokens are all right",
            "SYNTH_RATES"),
    _noop("--draft-p-split --spec-draft-p-split", "drafts are chains, not trees", "P",
          env="LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    _noop("--spec-draft-backend-sampling", "drafts are always chosen on the device",
          negative="--no-spec-draft-backend-sampling", env="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"),
    _noop("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", "no supported drafter has expert layers",
          env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE"),
    _noop("-ncmoed --spec-draft-ncmoe --n-cpu-moe-draft --spec-draft-n-cpu-moe",
          "no supported drafter has expert layers", "N", env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE"),
    _noop("-cd --ctx-size-draft", "the drafter's context always has the target's size", "N"),
    _noop("-td --threads-draft --spec-draft-threads", _NO_THREADS, "N"),
    _noop("-tbd --threads-batch-draft --spec-draft-threads-batch", _NO_THREADS, "N"),
    _noop("-Cd --cpu-mask-draft", _NO_THREADS, "M"),
    _noop("-Crd --cpu-range-draft", _NO_THREADS, "LO-HI"),
    _noop("--cpu-strict-draft", _NO_THREADS, "0|1"),
    _noop("--prio-draft", _NO_THREADS, "N"),
    _noop("--poll-draft", _NO_THREADS, "0|1"),
    _noop("-Cbd --cpu-mask-batch-draft", _NO_THREADS, "M"),
    _noop("-Crbd --cpu-range-batch-draft", _NO_THREADS, "LO-HI"),
    _noop("--cpu-strict-batch-draft", _NO_THREADS, "0|1"),
    _noop("--prio-batch-draft", _NO_THREADS, "N"),
    _noop("--poll-batch-draft", _NO_THREADS, "0|1"),
    _removed("--draft --draft-n --draft-max", _MAX, "LLAMA_ARG_DRAFT_MAX"),
    _removed("--draft-n-min --draft-min", _MIN, "LLAMA_ARG_DRAFT_MIN"),
    _removed("--spec-ngram-size-n", _NGRAM),
    _removed("--spec-ngram-size-m", _NGRAM),
    _removed("--spec-ngram-min-hits", _NGRAM),
)  # fmt: skip
