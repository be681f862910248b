"""A process's share of a model, measured by the loaders themselves from the headers of files (see sizes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from .capture import tensors_of
from .drafters import DraftOptions
from .drafters.backbone import load_backbone
from .drafters.dflash import DFlash
from .drafters.dflash_config import read_dflash_config
from .drafters.load import borrows_head, row_limit, whole_head
from .drafters.mtp import Mtp
from .drafters.recognize import file_for
from .drafters.small_model import SmallModel
from .models import Model, load_model, read_config
from .models.qwen35 import load_mtp
from .parallel import WHOLE, Shard, check_group
from .placement import Placement, check_whole, shares_of
from .question import Question, owner_of, placement_of, whole_on
from .sizes import SizeWeights

META = torch.device("meta")


@dataclass
class Measured:
    """One process's share of a model (all of it without a tensor split), measured."""

    model: Model
    weights: Counter[torch.device]
    by_unit: Counter[str]
    draft_weights: Counter[torch.device] = field(default_factory=Counter)
    # per drafter: its device, and its tensors beside the weights for a context
    drafters: list[tuple[torch.device, Callable[[int], int]]] = field(default_factory=list)
    # what a checkpoint of every slot copies of them, likewise
    rings: list[tuple[torch.device, Callable[[int], int]]] = field(default_factory=list)
    taps: int = 0  # layers whose input the drafter reads

    @cached_property
    def output(self) -> torch.device:
        return self.model.head.device


def measure(q: Question) -> list[Measured]:
    """The processes of a run: one, or one a device of a tensor split (devices with share 0 take no part)."""
    if not q.is_tensor or q.gpu_layers == 0:
        return [_measure_one(q, placement_of(q), WHOLE)]
    shares = shares_of(q.shares, len(q.devices)) or (1.0,) * len(q.devices)
    used = [(device, share) for device, share in zip(q.devices, shares) if share > 0]
    if len(used) > 1:
        check_whole(q.gpu_layers, q.config.block_count)
    ratios = tuple(share for _, share in used)
    check_group(Shard(0, ratios))
    owner = owner_of(q.draft_device, [device for device, _ in used])
    return [
        _measure_one(q, whole_on(device, q.config), Shard(rank, ratios), owner in (None, rank))
        for rank, (device, _) in enumerate(used)
    ]


def _measure_one(q: Question, placement: Placement, shard: Shard, drafts: bool = True) -> Measured:
    weights = SizeWeights(q.file)
    model = load_model(q.file, placement, config=q.config, weights=weights, shard=shard)
    own = Measured(model, Counter(weights.n_bytes), Counter(weights.by_unit))
    for name in q.drafter_types:
        if drafts and name.startswith("draft-") and q.draft.n_max > 0:
            _measure_drafter(q, name, own, weights)
    return own


def _measure_drafter(q: Question, name: str, own: Measured, target_weights: SizeWeights) -> None:
    device = q.draft_device or own.output
    file = file_for(name, q.draft_file)
    target = own.model
    if q.is_tensor and q.draft_device is not None and borrows_head(name, file, q.file):
        held = Counter(target_weights.n_bytes)
        target = replace(target, head=whole_head(target_weights, target))  # the cut one needs all ranks
        own.draft_weights.update(target_weights.n_bytes - held)
    sizes: dict[str, Any] = dict(
        n_slots=q.n_slots, type_k=q.draft_type_k, type_v=q.draft_type_v, max_rows=row_limit(own.model)
    )
    if name == "draft-mtp":
        weights = target_weights if file is None else SizeWeights(file)
        before = Counter(weights.n_bytes)
        config = q.config if file is None else read_config(file)
        block = load_mtp(weights, config, device, target=target if file is None else None)
        added = weights.n_bytes - before
        block.block.device = META
        make: Callable[[int], Any] = lambda n_ctx: Mtp(block, q.draft, n_ctx=n_ctx, **sizes)  # noqa: E731
    elif name == "draft-simple":
        assert file is not None
        weights = SizeWeights(file)
        small = load_model(file, whole_on(device, read_config(file)), weights=weights)
        added = weights.n_bytes
        small.cache_layers = [replace(layer, device=META) for layer in small.cache_layers]  # type: ignore[type-var]
        make = lambda n_ctx: SmallModel(small, q.draft, n_ctx=n_ctx, **sizes)  # noqa: E731
    else:
        assert file is not None
        weights = SizeWeights(file)
        dflash = read_dflash_config(file)
        backbone = load_backbone(weights, dflash, target, device)
        _load_chooser(weights, dflash.kind, device, q.draft)
        added, own.taps = weights.n_bytes, len(dflash.target_layers)
        options = replace(q.draft, n_max=min(q.draft.n_max, dflash.n_limit))
        on_meta = replace(backbone, device=META)
        make = lambda n_ctx: DFlash(name, on_meta, options, n_ctx=n_ctx, **sizes)  # noqa: E731
    own.draft_weights.update(added)
    own.drafters.append((device, lambda n_ctx: own_bytes(make(n_ctx))))
    own.rings.append((device, lambda n_ctx: ring_bytes(make(n_ctx))))


def _load_chooser(weights: SizeWeights, kind: str, device: torch.device, options: DraftOptions) -> None:
    """The matrices that DSpark and DFlash2 have on top of the backbone."""
    shape = {name: weights.file.tensors[name].shape for name in weights.file.tensors}
    matrices, groups = {
        "dflash": ((), ()),
        "dspark": (("markov_w1.weight",), ("markov_w2.weight",)),
        "dflash2": (("selector_predecessor.weight", "selector_successor.weight"), ("selector_hidden.weight",)),
    }[kind]
    for name in matrices:
        weights.matrix(name, shape[name], device)
    for name in groups:
        weights.group(device, (name, shape[name]))
    if kind == "dspark" and options.p_min > 0 and "conf_proj.weight" in shape:
        weights.matrix("conf_proj.weight", shape["conf_proj.weight"], device)


def own_bytes(drafter: Any) -> int:
    """Bytes of a drafter's own tensors: its caches and rows, not its weights."""
    names = ("kv", "kvs", "pending", "verified", "verified_rows")
    tensors = tensors_of([value for name, value in vars(drafter).items() if name in names])
    n_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return n_bytes + (drafter.cache.n_bytes if hasattr(drafter, "cache") else 0)


def ring_bytes(drafter: Any) -> int:
    """Bytes that a checkpoint of all slots copies of a drafter's caches."""
    return sum(own.n_bytes for own in getattr(drafter, "kvs", ()) if own.ring)
