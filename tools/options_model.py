"""Options of the process, of the model's file, and of where its weights go."""

from __future__ import annotations

from ggufspec.tools import option_values as read
from ggufspec.tools.options import Option

G = "common"
_ONE_WAY = "weights are read once into the memory of their device, whatever the mode"
_NO_THREADS = "PyTorch schedules its own threads; -t sets how many"
_NO_EXPERTS = "no supported architecture has expert layers"
_NO_DOWNLOAD = "nothing is downloaded; get the file first and give it with -m"
_NO_ADAPTERS = "adapters are not implemented"


def _noop(names: str, note: str, metavar: str = "", negative: str = "", env: str = "") -> Option:
    return Option(
        tuple(names.split()), G, metavar=metavar, negative=tuple(negative.split()), env=env, status="no-op", note=note
    )


def _unsupported(names: str, note: str, metavar: str = "", env: str = "") -> Option:
    return Option(tuple(names.split()), G, metavar=metavar, env=env, status="unsupported", note=note)


OPTIONS = (
    # the process
    Option(("-h", "--help", "--usage"), G, "show this help and exit", key="", const="help"),
    Option(("--version",), G, "show the version and exit", const="version"),
    Option(("--list-devices",), G, "list the GPUs that -dev can name and exit", const="list-devices"),
    Option(("--completion-bash",), G, "print a completion script for bash and exit", const="completion-bash"),
    Option(("-t", "--threads"), G, "CPU threads (<= 0: all)", "common.threads", "N", read.integer,
           env="LLAMA_ARG_THREADS"),
    Option(("-v", "--verbose", "--log-verbose"), G, "log everything", "common.verbosity", const=5),
    Option(("-lv", "--log-verbosity", "--verbosity"), G,
           "log level: 0 output, 1 error, 2 warning, 3 info, 4 trace, 5 debug", "common.verbosity", "N", read.integer,
           env="LLAMA_ARG_LOG_VERBOSITY"),
    Option(("--log-file",), G, "write the log to a file as well", "common.log_file", "FNAME", read.text,
           env="LLAMA_ARG_LOG_FILE"),
    Option(("--log-disable",), G, "log nothing", "common.verbosity", const=-1),
    Option(("--log-colors",), G, "colored log lines: on, off or auto (on in a terminal)", "common.log_colors",
           "on|off|auto", read.on_off_auto("--log-colors"), env="LLAMA_ARG_LOG_COLORS"),
    Option(("--log-prefix",), G, "log lines begin with their level", "common.log_prefix",
           negative=("--no-log-prefix",), env="LLAMA_ARG_LOG_PREFIX"),
    Option(("--log-timestamps",), G, "log lines begin with the time", "common.log_timestamps",
           negative=("--no-log-timestamps",), env="LLAMA_ARG_LOG_TIMESTAMPS"),
    Option(("--perf",), G, "measure and show timings", "common.perf", negative=("--no-perf",), env="LLAMA_ARG_PERF"),
    Option(("--warmup",), G, "compile kernels and run some steps at the start", "common.warmup",
           negative=("--no-warmup",)),
    _unsupported("--log-jsonl", "the log is plain text"),
    _unsupported("-cl --cache-list", _NO_DOWNLOAD),
    # the file
    Option(("-m", "--model"), G, "GGUF file; of a split model the first part", "model.path", "FNAME", read.text,
           env="LLAMA_ARG_MODEL"),
    Option(("--override-kv",), G, "replace metadata: KEY=int|float|bool|str:VALUE, comma-separated",
           "model.overrides", "KEY=TYPE:VALUE,...", read.key_overrides, appends=True),
    _noop("-lm --load-mode", _ONE_WAY, "MODE", env="LLAMA_ARG_LOAD_MODE"),
    _noop("--mmap", _ONE_WAY, negative="--no-mmap", env="LLAMA_ARG_MMAP"),
    _noop("-dio --direct-io", _ONE_WAY, negative="-ndio --no-direct-io", env="LLAMA_ARG_DIO"),
    _noop("--mlock", _ONE_WAY, env="LLAMA_ARG_MLOCK"),
    _noop("-lzm --lazy-mode", _ONE_WAY, "on|auto|off", env="LLAMA_ARG_LAZY_MODE"),
    _noop("--offline", "the network is never used", env="LLAMA_ARG_OFFLINE"),
    _unsupported("-hf -hfr --hf-repo", _NO_DOWNLOAD, "USER/MODEL[:QUANT]", "LLAMA_ARG_HF_REPO"),
    _unsupported("-hff --hf-file", _NO_DOWNLOAD, "FILE", "LLAMA_ARG_HF_FILE"),
    _unsupported("-hft --hf-token", _NO_DOWNLOAD, "TOKEN"),
    _unsupported("-mu --model-url", _NO_DOWNLOAD, "URL", "LLAMA_ARG_MODEL_URL"),
    _unsupported("-dr --docker-repo", _NO_DOWNLOAD, "REPO", "LLAMA_ARG_DOCKER_REPO"),
    _unsupported("--check-tensors", "tensors are not searched for NaN at load"),
    _unsupported("--lora", _NO_ADAPTERS, "FNAME,..."),
    _unsupported("--lora-scaled", _NO_ADAPTERS, "FNAME:SCALE,..."),
    _unsupported("--lora-init-without-apply", _NO_ADAPTERS),
    _unsupported("--control-vector", "control vectors are not implemented", "FNAME"),
    _unsupported("--control-vector-scaled", "control vectors are not implemented", "FNAME:SCALE"),
    _unsupported("--control-vector-layer-range", "control vectors are not implemented", "START END"),
    # devices
    Option(("-dev", "--device"), G, "GPUs to use, in this order (see --list-devices); none: the CPU",
           "model.devices", "D0,D1,...", read.device_list, env="LLAMA_ARG_DEVICE"),
    Option(("-ngl", "--gpu-layers", "--n-gpu-layers"), G,
           "layers on the GPU, the output layer included; auto or all", "model.gpu_layers", "N", read.gpu_layers,
           env="LLAMA_ARG_N_GPU_LAYERS"),
    Option(("-sm", "--split-mode"), G, "how several GPUs share the model: none, layer, row or tensor",
           "model.split_mode", "MODE", read.one_of("none", "layer", "row", "tensor"), env="LLAMA_ARG_SPLIT_MODE"),
    Option(("-ts", "--tensor-split"), G, "shares of the GPUs, such as 3,1; auto: those that leave room for the longest "
           "context", "model.tensor_split", "N0,N1,...|auto",
           read.tensor_split, env="LLAMA_ARG_TENSOR_SPLIT"),
    Option(("-mg", "--main-gpu"), G, "the GPU of --split-mode none", "model.main_gpu", "INDEX", read.integer,
           env="LLAMA_ARG_MAIN_GPU"),
    _unsupported("-ot --override-tensor", "whole layers are placed; use -ngl, -ts or -dev", "RE=BUFFER,...",
                 "LLAMA_ARG_OVERRIDE_TENSOR"),
    Option(("-kvo", "--kv-offload"), G, "the KV cache lies beside the layer it belongs to", "model.kv_offload",
           negative=("-nkvo", "--no-kv-offload"), env="LLAMA_ARG_KV_OFFLOAD",
           refused=((False, "the KV cache lies on the device of its layer"),)),
    Option(("-fit", "--fit"), G, "fit an unset context to the free memory of the GPUs, "
           "or say what is missing: on or off", "model.fit", "on|off",
           read.on_off("--fit"), env="LLAMA_ARG_FIT"),
    Option(("-fitt", "--fit-target"), G, "MiB that --fit leaves free on each GPU; one value counts for all",
           "model.fit_margin_mib", "MiB0,MiB1,...", read.integer_list, env="LLAMA_ARG_FIT_TARGET"),
    Option(("-fitc", "--fit-ctx"), G, "the least context that --fit may leave a slot", "model.fit_ctx", "N",
           read.at_least(1), env="LLAMA_ARG_FIT_CTX"),
    Option(("--graph",), G, "replay steps and prompt chunks as CUDA graphs", "model.graphs",
           negative=("--no-graph",)),
    _noop("-cmoe --cpu-moe", _NO_EXPERTS, env="LLAMA_ARG_CPU_MOE"),
    _noop("-ncmoe --n-cpu-moe", _NO_EXPERTS, "N", env="LLAMA_ARG_N_CPU_MOE"),
    _unsupported("-ncffn --n-cpu-ffn", "whole layers are placed; use -ngl", "N", "LLAMA_ARG_N_CPU_FFN"),
    _unsupported("--rpc", "RPC not supported in this build", "HOST:PORT,...", "LLAMA_ARG_RPC"),
    _noop("--op-offload", "an operation runs where its weights are", negative="--no-op-offload"),
    _noop("--repack", "every device has one weight layout", negative="-nr --no-repack", env="LLAMA_ARG_REPACK"),
    _noop("--no-host", "there are no host buffers to bypass", env="LLAMA_ARG_NO_HOST"),
    # CPU scheduling
    _noop("-tb --threads-batch", _NO_THREADS, "N"),
    _noop("-C --cpu-mask", _NO_THREADS, "M"),
    _noop("-Cr --cpu-range", _NO_THREADS, "LO-HI"),
    _noop("--cpu-strict", _NO_THREADS, "0|1"),
    _noop("--prio", _NO_THREADS, "N"),
    _noop("--poll", _NO_THREADS, "0...100"),
    _noop("-Cb --cpu-mask-batch", _NO_THREADS, "M"),
    _noop("-Crb --cpu-range-batch", _NO_THREADS, "LO-HI"),
    _noop("--cpu-strict-batch", _NO_THREADS, "0|1"),
    _noop("--prio-batch", _NO_THREADS, "N"),
    _noop("--poll-batch", _NO_THREADS, "0|1"),
    _noop("--numa", "the operating system places memory", "TYPE", env="LLAMA_ARG_NUMA"),
)  # fmt: skip
