"""One target, loaded once, and its drafters attached one after another."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ggufspec import bundled
from ggufspec.adaptive import AUTO_N_MAX, Adaptive
from ggufspec.drafters import Drafter, DraftOptions
from ggufspec.drafters.dflash import BlockDrafter
from ggufspec.drafters.dflash_config import read_dflash_config
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.drafters.recognize import TYPES, infer_types, mtp_block
from ggufspec.drafters.synth import check_rates, rates_of_length
from ggufspec.errors import ConfigError, PlacementError
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.models import Config, Model, load_model, read_config
from ggufspec.placement import devices_of
from ggufspec.tokenizer import Tokenizer
from ggufspec.tools import runtime
from ggufspec.tools.settings import Settings
from ggufspec.tools.warm_up import compile_kernels
from ggufspec.weights import Weights

from .steady import SteadyEngine, endless

ALIASES = {"mtp": "draft-mtp", "dspark": "draft-dspark", "dflash": "draft-dflash", "dflash2": "draft-dflash"}
ITEMS = ("n", "p-min", "synth-len", "synth-p", "synth-rates", "label")
DEFAULT_N_MAX = DraftOptions.n_max
AUTO = "auto"
Length = int | str  # of drafts: a number, or AUTO: decided before every step, as the server does
UNLIMITED = 1024  # lowered to what the drafter and a step can take


@dataclass(frozen=True)
class DrafterChoice:
    """One `--drafter`. `n_max` None: the sweep's, or what the drafter was trained for."""

    label: str
    kind: str  # llama.cpp's name
    path: str | None = None
    n_max: Length | None = None
    p_min: float = 0.0
    synth_length: float | None = None
    synth_rates: tuple[float, ...] = ()
    synth_p: float | None = None

    @property
    def is_synthetic(self) -> bool:
        return self.synth_length is not None or bool(self.synth_rates) or self.synth_p is not None

    def rates(self, longest: int) -> list[float]:
        """Acceptance rates of the positions of the longest draft measured; shorter ones use the first of them.

        ConfigError where length or rates do not fit.
        """
        if self.synth_length is not None:
            return rates_of_length(self.synth_length, longest)
        if self.synth_p is not None:
            return check_rates([self.synth_p ** (i + 1) for i in range(longest)], longest)
        return check_rates(self.synth_rates, longest)


def parse_drafter(text: str, has_bundled_target: bool = False) -> DrafterChoice:
    """`TYPE`, `TYPE=FILE` or `FILE`, then `,n=N`, `,p-min=P`, `,synth-len=L`, `,synth-p=P`,
    `,synth-rates=P0/P1/...`, `,label=NAME`.

    TYPE is a name of `--spec-type`, or mtp, dspark, dflash, dflash2. With the bundled target its own drafters need
    no file.
    """
    head, *rest = text.split(",")
    name, _, path = head.partition("=")
    label = name
    if name not in ALIASES and name not in TYPES[1:]:
        path, label = head, ""
        if not Path(path).exists():
            raise ConfigError(
                f"--drafter {head}: neither a drafter nor a file; expected TYPE, TYPE=FILE or FILE, TYPE one of "
                f"{', '.join((*ALIASES, *TYPES[1:]))}"
            )
        found = infer_types(open_gguf(path))
        if not found:
            raise ConfigError(f"--drafter {head}: an ordinary model; write draft-simple={head} to draft with it")
        name = found[0]
    kind = ALIASES.get(name, name)
    if not path and kind in ("draft-dspark", "draft-dflash") and has_bundled_target:
        path = str(bundled.path("dspark" if kind == "draft-dspark" else "dflash2"))
    values: dict[str, str] = {}
    for item in rest:
        key, sign, value = item.partition("=")
        if not sign or key not in ITEMS:
            raise ConfigError(f"--drafter {text}: {item!r} is not one of {', '.join(f'{name}=' for name in ITEMS)}")
        values[key] = value
    try:
        rates = tuple(float(part) for part in values["synth-rates"].split("/")) if "synth-rates" in values else ()
        made = DrafterChoice(
            values.get("label") or label or kind, kind, path or None,
            _length(values["n"]) if "n" in values else None, float(values.get("p-min", 0)),
            float(values["synth-len"]) if "synth-len" in values else None, rates,
            float(values["synth-p"]) if "synth-p" in values else None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"--drafter {text}: {error}; expected numbers") from None
    if not 0 <= made.p_min <= 1:
        raise ConfigError(f"--drafter {text}: p-min is a probability; expected 0 to 1")
    return made


def _length(text: str) -> Length:
    return AUTO if text == AUTO else int(text)


def default_drafters(file: GGUFFile, is_bundled: bool) -> list[DrafterChoice]:
    """What can draft without being named: the bundled family, or the MTP block of the target's own file."""
    if is_bundled:
        return [parse_drafter(name, True) for name in ("mtp", "dspark", "dflash2")]
    if mtp_block(file) is None:
        raise ConfigError(f"{file.path}: the file has no MTP block; name a drafter with --drafter TYPE=FILE")
    return [parse_drafter("mtp")]


def drafters_of(settings: Settings, is_bundled: bool) -> list[DrafterChoice]:
    """Drafters named as the server names them: `--spec-type` and `--spec-draft-model`."""
    spec = settings.speculative
    types = [name for name in spec.types if name != "none"]
    if not types:
        return [] if spec.model is None else [parse_drafter(spec.model)]
    needs_file = ("draft-simple", "draft-dspark", "draft-dflash")
    return [
        parse_drafter(f"{name}={spec.model}" if spec.model and name in needs_file else name, is_bundled)
        for name in types
    ]


@dataclass
class Bench:
    """A loaded target and how its engines are to be built."""

    settings: Settings
    file: GGUFFile
    config: Config
    model: Model
    weights: Weights
    tokenizer: Tokenizer
    n_slots: int
    n_ctx: int
    rehearsed: set[tuple[str, int, int]] = field(default_factory=set)  # engines like which kernels were compiled for

    @classmethod
    def load(cls, settings: Settings, n_slots: int, n_ctx: int, *, show_progress: bool = True) -> Bench:
        assert settings.model.path is not None
        if settings.common.threads > 0:
            torch.set_num_threads(settings.common.threads)
        runtime.check_context(settings.context)
        check_split(settings)
        file = runtime.open_model_file(settings.model.path, settings.model.overrides)
        config = runtime.with_rope_options(read_config(file), settings.context)
        placement = runtime.place(settings.model, config)
        with runtime.loading_bar(file.n_bytes, show_progress) as progress:
            weights = Weights(file, progress)
            model = load_model(file, placement, config=config, weights=weights)
        return cls(settings, file, config, model, weights, Tokenizer.from_metadata(file.metadata), n_slots, n_ctx)

    def engine(self, drafter: Drafter | None, *, ignore_eos: bool, use_graphs: bool | None = None,
               policy: Adaptive | None = None) -> SteadyEngine:
        context = self.settings.context
        engine = SteadyEngine(
            self.model, endless(self.tokenizer) if ignore_eos else self.tokenizer, drafter=drafter,
            n_slots=self.n_slots, n_ctx=self.n_ctx, n_ubatch=min(context.n_ubatch or context.n_batch, context.n_batch),
            type_k=context.type_k, type_v=context.type_v, n_checkpoints=0,
            use_graphs=self.settings.model.graphs if use_graphs is None else use_graphs, policy=policy,
        )  # fmt: skip
        alike = ("" if drafter is None else drafter.name, engine.n_max, self.n_slots)
        if self.settings.common.warmup and alike not in self.rehearsed:
            compile_kernels(engine, [self.settings.sampling])
            self.rehearsed.add(alike)
        return engine

    def load_drafter(self, choice: DrafterChoice, n_max: int | None) -> Drafter:
        """The drafter, able to propose up to n_max tokens (None: its own limit). Drop it and call `free` after use."""
        wanted = n_max if choice.n_max is None else choice.n_max
        chosen = natural_n_max(choice) if wanted is None else longest(choice, wanted)
        spec: SpecOptions = replace(
            runtime.spec_options(self.settings.speculative), types=(choice.kind,),
            draft=DraftOptions(
                chosen, self.settings.speculative.n_min, choice.p_min or self.settings.speculative.p_min
            ),
        )  # fmt: skip
        drafter = load_drafter(
            spec, self.file, self.model, None if choice.path is None else open_gguf(choice.path),
            n_slots=self.n_slots, n_ctx=self.n_ctx, device=runtime.draft_device(self.settings.speculative),
            target_weights=self.weights,
        )  # fmt: skip
        if drafter is None:
            raise ConfigError(f"--drafter {choice.label}: drafts nothing with --n-max {chosen}; expected 1 or more")
        return drafter


def check_split(settings: Settings) -> None:
    """Benchmarks run in one process; a tensor split is several. PlacementError where one is asked for."""
    model = settings.model
    n_devices = len(devices_of(model.devices))
    if model.split_mode in ("row", "tensor") and n_devices > 1:
        raise PlacementError(
            f"--split-mode {model.split_mode} over {n_devices} devices takes a process a device, and benchmarks run in "
            "one; use layer or none, or name one device with -dev"
        )


def natural_n_max(choice: DrafterChoice) -> int:
    """What a block drafter was trained for, all that an n-gram drafter finds; else llama.cpp's default."""
    if choice.kind.startswith("ngram"):
        return UNLIMITED
    if choice.kind not in ("draft-dspark", "draft-dflash"):
        return DEFAULT_N_MAX
    if choice.path is None:
        raise ConfigError(f"--drafter {choice.label}: needs the drafter's file, as {choice.label}=FILE")
    return read_dflash_config(open_gguf(choice.path)).n_limit


def longest(choice: DrafterChoice, length: Length) -> int:
    """The most tokens a step drafts at this length; for AUTO what the server would allow."""
    if isinstance(length, int):
        return min(length, UNLIMITED)
    return AUTO_N_MAX if choice.kind in ("draft-mtp", "draft-simple") else natural_n_max(choice)


def set_width(engine: SteadyEngine, n_max: int) -> int:
    """Draft n_max tokens a step from now on (or as many as the drafter can); returns how many."""
    drafter = engine.drafter
    assert drafter is not None
    if isinstance(drafter, BlockDrafter):
        n_max = min(n_max, drafter.backbone.config.n_limit)
        drafter.n_max = drafter.stats.n_max = n_max
    engine.n_max = min(n_max, drafter.n_max)
    return engine.n_max


def free() -> None:
    """Give back what is no longer referenced, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
