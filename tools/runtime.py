"""From settings to a running engine: open files, place weights, size the context, attach the drafter."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from ggufspec.adaptive import AUTO_N_MAX, Adaptive, adaptive_for
from ggufspec.drafters import Drafter, DraftOptions, device_of
from ggufspec.drafters.dflash_config import read_dflash_config
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.owned import Ownership
from ggufspec.drafters.synth import NOTICE, SyntheticAcceptance, check_rates, rates_of_length
from ggufspec.engine import Engine
from ggufspec.errors import ConfigError
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.models import RECURRENT, Config, Model, load_model, read_config
from ggufspec.parallel import WHOLE
from ggufspec.placement import (
    Placement,
    check_whole,
    device_name,
    devices_of,
    place_layers,
    resolve,
    shares_of,
    shown,
)
from ggufspec.prompt_cache import PromptCache
from ggufspec.ranks import Ranks, from_torchrun, start, torchrun_world
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools.fit import fitted
from ggufspec.tools.settings import ContextSettings, ModelSettings, Settings, SpeculativeSettings
from ggufspec.weights import Weights

log = logging.getLogger(__name__)

CELLS = 256  # contexts are whole multiples of this
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass
class Runtime:
    """Everything that one command line opened."""

    settings: Settings
    file: GGUFFile
    config: Config
    model: Model
    tokenizer: Tokenizer
    drafter: Drafter | None
    engine: Engine


def open_runtime(settings: Settings, *, show_progress: bool = True, ranks: Ranks | None = None) -> Runtime:
    """Load what the settings name. GgufspecError says in one line what does not fit.

    With `--split-mode tensor` over several devices this process becomes rank 0 of as many; a follower passes `ranks`.
    """
    if settings.common.threads > 0:
        torch.set_num_threads(settings.common.threads)
    if settings.model.path is None:
        raise ConfigError("--model is required: give a GGUF file with -m")
    check_context(settings.context)
    file = open_model_file(settings.model.path, settings.model.overrides)
    config = with_rope_options(read_config(file), settings.context)
    check_shift(settings.context, config)
    draft_file = None
    if settings.speculative.model is not None:
        draft_file = open_model_file(settings.speculative.model, ())
    n_slots, n_ctx = size_context(settings.context, config)
    if ranks is None:
        # before anything is read, and before other ranks start: they take over what comes out
        before = settings.context
        settings = fitted(settings, file, config, draft_file, n_slots, n_ctx, draft_device(settings.speculative))
        if settings.context != before:
            n_slots, n_ctx = size_context(settings.context, config)
        ranks = start_ranks(settings, config)
    ownership = None
    if ranks is None:
        placement, shard = place(settings.model, config), WHOLE
    else:
        placement, shard = Placement.single(ranks.device, config.n_layers), ranks.shard
        owner = drafter_owner(settings)
        ownership = None if owner is None else Ownership(owner, ranks.rank, ranks.devices, ranks.host)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    n_bytes = file.n_bytes + (draft_file.n_bytes if draft_file is not None else 0)
    with loading_bar(n_bytes, show_progress) as progress:
        weights = Weights(file, progress)
        model = load_model(file, placement, config=config, weights=weights, shard=shard)
        drafter = load_drafter(
            spec_options(settings.speculative, draft_file), file, model, draft_file, n_slots=n_slots, n_ctx=n_ctx,
            device=draft_device(settings.speculative), target_weights=weights, progress=progress,
            ownership=ownership,
        )
    where = device_of(drafter, model.device)
    if ranks is None and (len(model.stages) > 1 or where != model.device):
        at = f"; drafter on {device_name(where)}" if drafter is not None else ""
        log.info("%s%s", shown(placement), at)
    engine = make_engine(settings, model, tokenizer, drafter, n_slots, n_ctx, ranks)
    return Runtime(settings, file, config, model, tokenizer, drafter, engine)


def make_engine(settings: Settings, model: Model, tokenizer: Tokenizer, drafter: Drafter | None, n_slots: int,
                n_ctx: int, ranks: Ranks | None = None) -> Engine:  # fmt: skip
    """The engine that the settings ask for, on a loaded model and drafter."""
    context = settings.context
    return Engine(
        model, tokenizer, drafter=drafter, n_slots=n_slots, n_ctx=n_ctx,
        n_ubatch=n_ubatch_of(context),
        type_k=context.type_k, type_v=context.type_v, n_checkpoints=context.n_checkpoints,
        prompt_cache=PromptCache(cache_bytes(context.cache_ram_mib)), use_graphs=settings.model.graphs, link=ranks,
        synthetic=synthetic_acceptance(settings.speculative, drafter, n_slots, model.device),
        policy=policy_of(settings.speculative, drafter), continuous=context.cont_batching,
    )


def open_model_file(path: str, overrides: tuple[tuple[str, Any], ...]) -> GGUFFile:
    """Open a file and lay `--override-kv` values over its keys."""
    file = open_gguf(path)
    if not overrides:
        return file
    kinds = {bool: "bool", int: "i64", float: "f32", str: "str"}
    values = dict(overrides)
    return replace(
        file,
        metadata=file.metadata | values,
        types=file.types | {key: kinds[type(value)] for key, value in values.items()},
    )


def check_context(context: ContextSettings) -> None:
    for name, type_name in (("--cache-type-k", context.type_k), ("--cache-type-v", context.type_v)):
        if type_name not in CACHE_TYPES:
            raise ConfigError(f"{name}: Unsupported cache type: {type_name}; expected one of {' '.join(CACHE_TYPES)}")
    for name, value, least in (
        ("--batch-size", context.n_batch, 1), ("--ubatch-size", context.n_ubatch, 0), ("--ctx-size", context.n_ctx, 0)
    ):
        if value < least:
            raise ConfigError(f"{name}: invalid value {value}; expected {least} or more")
    if context.flash_attn == "off" and context.type_v not in ("f32", "f16", "bf16"):
        raise ConfigError("quantized V cache requires flash_attn to be enabled: drop -fa off or use -ctv f16")


def check_shift(context: ContextSettings, config: Config) -> None:
    """llama.cpp, too, goes on without shifts where layers are recurrent. ConfigError elsewhere."""
    if context.context_shift:
        reason = "generation ends when the context is full"
        if config.architecture not in RECURRENT:
            raise ConfigError(f"--context-shift is not supported: {reason}")
        log.warning("--context-shift has no effect here: recurrent layers cannot forget tokens; %s", reason)


def n_ubatch_of(context: ContextSettings) -> int:
    """Most tokens of a prompt in one forward."""
    return min(context.n_ubatch or context.n_batch, context.n_batch)


def size_context(context: ContextSettings, config: Config) -> tuple[int, int]:
    """(slots, cells a slot) as llama.cpp divides them: equal shares, each a multiple of 256.

    With a unified cache every slot may use the whole context; this runtime then gives each slot that many cells.
    """
    unified = context.kv_unified if context.kv_unified is not None else context.n_parallel < 0
    n_slots = 4 if context.n_parallel < 0 else context.n_parallel
    if not 1 <= n_slots <= 256:
        raise ConfigError(f"invalid value for n_parallel: {n_slots}; expected 1 to 256")
    total = context.n_ctx or config.context_length
    share = total if unified else total // n_slots
    n_ctx = max(math.ceil(share / CELLS) * CELLS, CELLS)
    trained = math.ceil(config.context_length / CELLS) * CELLS
    if config.rope.ext_factor > 0 and config.rope.freq_scale < 1:
        trained = max(trained, int(config.rope.n_ctx_orig / config.rope.freq_scale))
    if n_ctx > trained:
        log.warning("a slot's context of %d exceeds the training context of the model (%d) - capping", n_ctx, trained)
        n_ctx = trained
    return n_slots, n_ctx


def with_rope_options(config: Config, context: ContextSettings) -> Config:
    """`config` with what `--rope-*` and `--yarn-*` say instead of the file."""
    rope = config.rope
    changes: dict[str, Any] = {}
    if context.rope_freq_base:
        changes["base"] = context.rope_freq_base
    if context.rope_scale:
        changes["freq_scale"] = 1.0 / context.rope_scale
    if context.rope_freq_scale:
        changes["freq_scale"] = context.rope_freq_scale
    if context.rope_scaling == "none":
        changes["freq_scale"] = 1.0
    if context.rope_scaling is not None:
        changes["ext_factor"] = 1.0 if context.rope_scaling == "yarn" else 0.0
    for name, value in (
        ("n_ctx_orig", context.yarn_orig_ctx or -1), ("ext_factor", context.yarn_ext_factor),
        ("attn_factor", context.yarn_attn_factor), ("beta_slow", context.yarn_beta_slow),
        ("beta_fast", context.yarn_beta_fast),
    ):
        if value >= 0:
            changes[name] = value
    return replace(config, rope=replace(rope, **changes)) if changes else config


def place(model: ModelSettings, config: Config) -> Placement:
    """Which device holds which layer, from `-dev`, `-ngl`, `-sm`, `-ts`, `-mg`."""
    if isinstance(model.tensor_split, str):
        raise ConfigError("--tensor-split auto: this command needs numbers (ggufspec plan shows them)")
    devices = devices_of(model.devices)
    if model.gpu_layers > 0 and model.devices is None and all(device.type == "cpu" for device in devices):
        log.warning("no usable GPU found, --gpu-layers option will be ignored: the model runs on the CPU")
    return place_layers(
        devices, config.block_count, config.n_layers, gpu_layers=model.gpu_layers,
        split=model.split_mode, tensor_split=model.tensor_split, main_gpu=model.main_gpu,
    )


def start_ranks(settings: Settings, config: Config) -> Ranks | None:
    """The processes of a tensor split, or None when one process does it all. Devices with share 0 take no part."""
    model, world = settings.model, torchrun_world()
    is_tensor = model.split_mode in ("row", "tensor") and model.gpu_layers != 0
    if model.split_mode == "row" and is_tensor:
        log.warning("--split-mode row is run as tensor: every layer is cut over all devices")
    used = devices_in_split(model) if is_tensor else []
    if world > 1 and len(used) != world:
        found = f"--split-mode tensor with {len(used)} devices" if is_tensor else "one process does it all"
        raise ConfigError(f"torchrun started {world} processes: expected --split-mode tensor and a share for each, "
                          f"but {found}")
    if len(used) < 2:
        return None
    names, ratios = tuple(name for name, _ in used), tuple(share for _, share in used)
    devices = [resolve(name) for name in names]
    check_whole(model.gpu_layers, config.block_count)
    check_devices(devices)
    settings = replace(settings, model=replace(model, devices=names, tensor_split=ratios))
    shown_shares = ", ".join(f"{device_name(device)} {ratio:g}" for device, ratio in zip(devices, ratios))
    log.info("every layer is cut over %d processes, by shares: %s", len(names), shown_shares)
    ranks = from_torchrun(ratios, devices)
    if ranks is not None:
        return ranks
    return start(ratios, devices, pickle.dumps((settings, ratios)))


def check_devices(devices: Sequence[torch.device]) -> None:
    """ConfigError when a tensor split cannot have these devices, a process each."""
    names = ",".join(map(device_name, devices))
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"--split-mode tensor: {names} are not of one kind; --split-mode layer takes GPUs and CPU")
    # under torchrun the same name means another GPU on every host
    if devices[0].type == "cuda" and len(set(devices)) < len(devices) and not torchrun_world():
        raise ConfigError(f"--split-mode tensor: a GPU is named twice in {names}; every process needs one of its own")


def devices_in_split(model: ModelSettings) -> list[tuple[str, float]]:
    """Names and shares of the devices of a tensor split: those with a share, in the order of their ranks."""
    devices = devices_of(model.devices)
    is_named = model.devices is not None and model.devices != ("none",)
    names = list(model.devices or ()) if is_named else [device_name(device) for device in devices]
    names = [names[i % len(names)] for i in range(max(torchrun_world(), len(names)))]  # every host has as many
    shares = shares_of([float(share) for share in model.tensor_split], len(names)) or (1.0,) * len(names)
    return [(name, share) for name, share in zip(names, shares) if share > 0]


def drafter_owner(settings: Settings) -> int | None:
    """The rank of a tensor split that has the drafter and sends the others its drafts; None: every rank has its own.

    It is the rank whose device `--device-draft` names; the first one if that is no device of the split.
    """
    spec = settings.speculative
    if draft_device(spec) is None:
        return None

    def plain(name: str) -> str:
        return name.upper().replace(":", "")

    wanted = plain(spec.devices[0]) if spec.devices is not None and spec.gpu_layers != 0 else "NONE"
    names = [plain(name) for name, _ in devices_in_split(settings.model)]
    return names.index(wanted) if wanted in names else 0


def draft_device(spec: SpeculativeSettings) -> torch.device | None:
    """Where the drafter lives; None: with the target's output."""
    if spec.gpu_layers == 0 or spec.devices == ("none",):
        return torch.device("cpu")
    if spec.devices is None:
        return None
    if len(spec.devices) > 1:
        raise ConfigError(
            f"--device-draft {','.join(spec.devices)}: a drafter lives on one device; name one of them"
        )
    return resolve(spec.devices[0])


def draft_length(spec: SpeculativeSettings, draft_file: GGUFFile | None) -> int:
    """The most tokens a drafter with a model may propose; for `auto` what it was trained for."""
    if spec.n_max != "auto":
        return int(spec.n_max)
    if draft_file is not None and draft_file.architecture == "dflash":
        return max(read_dflash_config(draft_file).n_limit, 1)
    return AUTO_N_MAX


def policy_of(spec: SpeculativeSettings, drafter: Drafter | None) -> Adaptive | None:
    """What decides draft lengths: nothing when they are given, or nothing drafts."""
    if drafter is None or spec.n_max != "auto":
        return None
    log.info("draft lengths follow measured acceptance and times (--spec-draft-n-max auto)")
    return adaptive_for(drafter, spec.n_min)


def spec_options(spec: SpeculativeSettings, draft_file: GGUFFile | None = None) -> SpecOptions:
    return SpecOptions(
        types=tuple(t for t in spec.types if t != "none"),
        draft=DraftOptions(draft_length(spec, draft_file), spec.n_min, spec.p_min),
        type_k=spec.type_k, type_v=spec.type_v,
        ngram_simple=spec.ngram_simple, ngram_map_k=spec.ngram_map_k,
        ngram_map_k4v=spec.ngram_map_k4v, ngram_mod=spec.ngram_mod,
        lookup_static=spec.lookup_static, lookup_dynamic=spec.lookup_dynamic,
    )


def synthetic_acceptance(spec: SpeculativeSettings, drafter: Drafter | None, n_slots: int, device: torch.device
                         ) -> SyntheticAcceptance | None:
    """What `--spec-synth-len` or `--spec-synth-rates` ask for, with a warning: the text means nothing then."""
    if spec.synth_length is None and not spec.synth_rates:
        return None
    if spec.synth_length is not None and spec.synth_rates:
        raise ConfigError("--spec-synth-len and --spec-synth-rates exclude each other; give one of them")
    if drafter is None:
        raise ConfigError("--spec-synth-len and --spec-synth-rates need a drafter: give --spec-type or --model-draft")
    if spec.synth_length is not None:
        found = rates_of_length(spec.synth_length, drafter.n_max)
    else:
        found = check_rates(spec.synth_rates, drafter.n_max)
    log.warning(NOTICE)
    return SyntheticAcceptance(found, n_slots, device)


def cache_bytes(mib: int) -> int:
    return -1 if mib < 0 else mib << 20


@contextmanager
def loading_bar(n_bytes: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on stderr; nothing when it is not a terminal or not wanted."""
    with tqdm(total=n_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="loading", leave=False,
              disable=None if show else True) as bar:
        yield lambda n: None if bar.update(n) is None else None
