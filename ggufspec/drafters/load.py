"""From `--spec-type` and files to one drafter: recognize, check the pair, read weights, chain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..models.base import Head
from ..placement import Placement
from ..weights import Weights
from . import Drafter, DraftOptions
from .chain import Chain
from .dflash import load_dflash
from .mtp import Mtp
from .ngram import NgramDrafter
from .ngram_cache import NgramCache
from .ngram_map import NgramMap
from .ngram_mod import NgramMod
from .ngram_simple import NgramSimple
from .ngram_sizes import ModSizes, NgramSizes
from .owned import Ownership
from .recognize import check_pair, check_types, file_for, infer_types
from .small_model import SmallModel

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile
    from ..models import Model

log = logging.getLogger(__name__)

NARROW = 16  # rows of a step that a GPU computes independently of its width
RECURRENT_ROWS = 17  # rows that recurrent layers can take back


@dataclass(frozen=True)
class SpecOptions:
    """Everything that `--spec-*` options say; llama.cpp's defaults."""

    types: tuple[str, ...] = ()  # empty: what the draft file is
    draft: DraftOptions = DraftOptions()
    type_k: str = "f16"  # the drafter's cache
    type_v: str = "f16"
    ngram_simple: NgramSizes = NgramSizes()
    ngram_map_k: NgramSizes = NgramSizes()
    ngram_map_k4v: NgramSizes = NgramSizes()
    ngram_mod: ModSizes = field(default_factory=ModSizes)
    lookup_static: str | None = None
    lookup_dynamic: str | None = None


def load_drafter(
    spec: SpecOptions,
    target_file: GGUFFile,
    target: Model,
    draft_file: GGUFFile | None,
    *,
    n_slots: int,
    n_ctx: int,
    device: torch.device | None = None,
    target_weights: Weights | None = None,
    progress: Callable[[int], None] | None = None,
    ownership: Ownership | None = None,
) -> Drafter | None:
    """The drafter of an engine, a chain when several were asked for, None when nothing drafts.

    n_ctx: cells a slot; device: where the drafter's weights and cache live, None for the target's. `target_weights`
    saves packing shared tensors twice when the MTP block lies in the target's own file. ownership: of the one rank of a
    tensor split that has the drafters with a model; None: every rank has its own. Raises ConfigError or
    UnsupportedError when types, files and options do not fit together, FileError for a bad file.
    """
    types = spec.types or infer_types(draft_file)
    if draft_file is not None and not types:
        log.warning(
            "%s is an ordinary model: it drafts only with --spec-type draft-simple; no speculation", draft_file.path
        )
    has_model = [name for name in types if name.startswith("draft-")]
    check_types(types, draft_file, target_file)
    if draft_file is not None and has_model:
        check_pair(draft_file, target_file, can_tap=target.can_tap)
    elif draft_file is not None and types:
        log.warning("%s is not used: --spec-type %s drafts without a model", draft_file.path, ",".join(types))
    if has_model and spec.draft.n_max < 1:
        log.warning("--spec-draft-n-max is %d: %s is off", spec.draft.n_max, ",".join(has_model))
        types = tuple(name for name in types if name not in has_model)

    max_drafted = row_limit(target) - 1
    sizes: dict[str, Any] = dict(
        n_slots=n_slots, n_ctx=n_ctx, type_k=spec.type_k, type_v=spec.type_v, max_rows=row_limit(target)
    )
    device = device or target.device
    made: list[Drafter] = []

    def with_model(name: str) -> Drafter:
        file = file_for(name, draft_file)
        own_target = target
        if ownership is not None and borrows_head(name, file, target_file):
            own_target = replace(target, head=whole_head(target_weights or Weights(target_file, progress), target))
        if name == "draft-mtp":
            drafter: Any = _load_mtp(
                file, target_file, own_target, spec.draft, device, target_weights, progress, sizes
            )
        elif name == "draft-simple":
            assert draft_file is not None
            drafter = _load_small_model(draft_file, spec.draft, device, progress, sizes)
        else:
            assert draft_file is not None
            drafter = load_dflash(Weights(draft_file, progress), own_target, spec.draft, device, **sizes)
        # A captured step may be that of several GPUs, but of one process and without the CPU.
        is_same = device == target.device
        drafter.capturable = is_same or (ownership is None and device.type == target.device.type == "cuda")
        return cut_length(drafter)

    def cut_length(drafter: Drafter) -> Drafter:
        if drafter.n_max > max_drafted:
            # the n-gram drafters' own sizes are meant for any target: only what was asked for is missed
            is_default = getattr(spec, drafter.name.replace("-", "_"), None) in (NgramSizes(), ModSizes())
            log.log(
                logging.DEBUG if is_default else logging.WARNING,
                "%s: drafts of up to %d tokens were asked for; a step here verifies at most %d, drafts are cut to that",
                drafter.name, drafter.n_max, max_drafted,
            )
            drafter.n_max = drafter.stats.n_max = max_drafted
        return drafter

    for name in types:
        if name.startswith("ngram"):
            drafter: Drafter = cut_length(make_ngram(name, spec, n_slots, n_ctx))
        elif ownership is not None:
            drafter = ownership.share(partial(with_model, name))
        else:
            drafter = with_model(name)
        log.info("speculation is on: %s, up to %d tokens a step", name, drafter.n_max)
        made.append(drafter)
    if not made:
        return None
    return made[0] if len(made) == 1 else Chain(made)


def borrows_head(name: str, file: GGUFFile | None, target_file: GGUFFile) -> bool:
    """Whether a drafter has no output matrix of its own. file: None where it lies in the target's."""
    if name == "draft-mtp":
        return file is None and not any(t.endswith("nextn.shared_head_head.weight") for t in target_file.tensors)
    return name != "draft-simple" and file is not None and "output.weight" not in file.tensors


def whole_head(weights: Weights, target: Model) -> Head:
    """The target's head with all its rows on this rank; the one that is there if it is not cut."""
    head = target.head
    if head.bounds is None or len(head.bounds) == 1:
        return head
    config = target.config
    name = "output.weight" if weights.has("output.weight") else "token_embd.weight"
    return Head(weights.group(target.device, (name, (config.n_vocab, config.embedding_length))))


def row_limit(target: Model) -> int:
    """The most rows that one verification step may have on this target."""
    from ..cache import RecurrentLayer

    if target.device.type == "cuda":
        return NARROW
    return RECURRENT_ROWS if any(isinstance(layer, RecurrentLayer) for layer in target.cache_layers) else 1 + 1024


def make_ngram(name: str, spec: SpecOptions, n_slots: int, n_ctx: int) -> NgramDrafter:
    if name == "ngram-mod":
        mod = spec.ngram_mod
        return NgramMod(n_slots, n_ctx, mod.n_match, mod.n_min, mod.n_max)
    if name == "ngram-cache":
        return NgramCache(n_slots, n_ctx, spec.lookup_static, spec.lookup_dynamic)
    if name == "ngram-simple":
        sizes = spec.ngram_simple
        return NgramSimple(n_slots, n_ctx, sizes.size_n, sizes.size_m, sizes.min_hits)
    sizes = spec.ngram_map_k if name == "ngram-map-k" else spec.ngram_map_k4v
    return NgramMap(
        n_slots, n_ctx, sizes.size_n, sizes.size_m, sizes.min_hits, values=name == "ngram-map-k4v"
    )


def _load_mtp(
    draft_file: GGUFFile | None,
    target_file: GGUFFile,
    target: Model,
    options: DraftOptions,
    device: torch.device,
    target_weights: Weights | None,
    progress: Callable[[int], None] | None,
    sizes: dict[str, Any],
) -> Mtp:
    from ..models.config import read_config
    from ..models.qwen35 import load_mtp

    if draft_file is not None:
        # A file of its own brings its own embedding and head, as in llama.cpp.
        block = load_mtp(Weights(draft_file, progress), read_config(draft_file), device, target=None)
    else:
        weights = target_weights or Weights(target_file, progress)
        block = load_mtp(weights, target.config, device, target=target)
    return Mtp(block, options, **sizes)


def _load_small_model(
    draft_file: GGUFFile,
    options: DraftOptions,
    device: torch.device,
    progress: Callable[[int], None] | None,
    sizes: dict[str, Any],
) -> SmallModel:
    from ..models import load_model, read_config

    placement = Placement.single(device, read_config(draft_file).n_layers)
    return SmallModel(load_model(draft_file, placement, progress=progress), options, **sizes)
