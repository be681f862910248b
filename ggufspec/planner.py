"""What fits where, from the headers of files alone: bytes per device, the largest context, the split that gives it.

Weights are measured by the loaders themselves (see sizes), caches by the allocators themselves on PyTorch's `meta`
device; only the working memory of a step is an estimate. Devices are names, so a plan needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .admission import N_ON_DEVICE
from .cache import Cache, KVLayer, RecurrentLayer
from .capture import entry_counts, tensors_of
from .drafters import DraftOptions
from .drafters.backbone import load_backbone
from .drafters.dflash import DFlash
from .drafters.dflash_config import read_dflash_config
from .drafters.load import borrows_head, row_limit, whole_head
from .drafters.mtp import Mtp
from .drafters.recognize import check_pair, check_types, file_for, infer_types
from .drafters.small_model import SmallModel
from .errors import PlacementError
from .kernels.gdn.chunked import CHUNK
from .kernels.kv import CELL_CHUNK
from .kernels.matmul.cuda import SCRATCH_BYTES
from .kernels.matmul.narrow import slots_bytes
from .kernels.peer.link import WORD_BYTES, memory_words
from .models import Model, load_model, read_config
from .models.qwen35 import load_mtp
from .parallel import WHOLE, Shard, check_group
from .placement import Placement, place_layers
from .prefill import WIDTHS, padded_width
from .sizes import SizeWeights

if TYPE_CHECKING:
    from .gguf_file import GGUFFile
    from .models import Config

META = torch.device("meta")
PARTS = ("weights", "KV", "recurrent", "checkpoints", "draft weights", "draft KV", "workspace", "graphs")
# Estimates, not yet held to a card: what a step needs beside weights and caches.
LOGITS_COPIES = 3  # target's and drafter's logits, and what sampling makes of them
GRAPH_BYTES = 8 << 20  # the driver's own memory for one captured step
MULTIPROCESSORS = 132  # of a large card: what parts of tiles go through grows with them
CONTEXT_BYTES = 512 << 20  # the CUDA context and the kernels' code: not in what the driver calls free


@dataclass(frozen=True)
class Question:
    """A command line's worth of facts. `memory`: bytes of each device that may be used, None without a limit."""

    file: GGUFFile
    config: Config
    devices: tuple[torch.device, ...]
    memory: tuple[int | None, ...]
    draft_file: GGUFFile | None = None
    types: tuple[str, ...] = ()  # of drafters; empty: what the draft file is
    draft: DraftOptions = DraftOptions()
    draft_device: torch.device | None = None  # None: with the target's output
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    split: str = "layer"
    shares: tuple[float, ...] = ()
    main_gpu: int = 0
    gpu_layers: int = -1
    n_slots: int = 1
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_checkpoints: int = 32
    graphs: bool = True
    n_widths: int = 2  # row counts of decode steps, each with its own graph a number of entries

    @property
    def is_tensor(self) -> bool:
        return self.split in ("row", "tensor")

    @property
    def drafter_types(self) -> tuple[str, ...]:
        return self.types or infer_types(self.draft_file)

    def memory_of(self, device: torch.device) -> int | None:
        return dict(zip(self.devices, self.memory)).get(device)


@dataclass
class Part:
    """One process's share of a model (all of it without a tensor split), measured."""

    model: Model
    weights: Counter[torch.device]
    by_unit: Counter[str]
    draft_weights: Counter[torch.device] = field(default_factory=Counter)
    # per drafter: its device, and its tensors beside the weights for a context
    drafters: list[tuple[torch.device, Callable[[int], int]]] = field(default_factory=list)
    # what a checkpoint of every slot copies of them, likewise
    rings: list[tuple[torch.device, Callable[[int], int]]] = field(default_factory=list)
    taps: int = 0

    @cached_property
    def output(self) -> torch.device:
        return self.model.head.device


@dataclass
class Plan:
    """Bytes by device and part for one context."""

    n_ctx: int
    parts: dict[torch.device, Counter[str]]
    memory: dict[torch.device, int | None]

    def total(self, device: torch.device) -> int:
        return sum(self.parts[device].values())

    def missing(self, device: torch.device) -> int:
        """Bytes that the device lacks; 0 when all fits."""
        limit = self.memory[device]
        return 0 if limit is None else max(self.total(device) - limit, 0)

    @property
    def fits(self) -> bool:
        return not any(self.missing(device) for device in self.parts)


class Planner:
    """Measures a question once, then answers for any context."""

    def __init__(self, question: Question):
        """`question` has passed `check`."""
        self.question = question
        self.parts = measure(question)
        self._known: dict[tuple[object, int], int] = {}

    def plan(self, n_ctx: int) -> Plan:
        """Bytes for `n_ctx` cells a slot."""
        q = self.question
        found: dict[torch.device, Counter[str]] = {device: Counter() for device in q.devices}

        def add(device: torch.device, part: str, n_bytes: int) -> None:
            found.setdefault(device, Counter())[part] += n_bytes

        for part in self.parts:
            for device, n in part.weights.items():
                add(device, "weights", n)
            for device, n in part.draft_weights.items():
                add(device, "draft weights", n)
            for layer in part.model.cache_layers:
                self._add_layer(layer, n_ctx, add)
            for device, cache_bytes in part.drafters:
                add(device, "draft KV", cache_bytes(n_ctx))
            for device, cache_bytes in part.rings:
                add(device, "checkpoints", min(q.n_checkpoints, N_ON_DEVICE) * cache_bytes(n_ctx))
            for device in {layer.device for layer in part.model.layers} | {part.output}:
                if device.type == "cuda":
                    add(device, "workspace", self._workspace(part, device) + slots_bytes(MULTIPROCESSORS))
            if len(self.parts) > 1 and part.output.type == "cuda":
                add(part.output, "workspace", WORD_BYTES * memory_words(len(self.parts)))  # for the ranks' sums
            for device in {layer.device for layer in part.model.layers}:
                if q.graphs and device.type == "cuda":
                    add(device, "graphs", self._graphs(part, device))
            for device in self._beside(part) if q.graphs else ():
                add(device, "graphs", self._steps(part, device))
        return Plan(n_ctx, found, {device: q.memory_of(device) for device in found})

    def _add_layer(self, layer: object, n_ctx: int, add: Callable[[torch.device, str, int], None]) -> None:
        q = self.question
        if isinstance(layer, KVLayer):
            add(layer.device, "KV", self._cache_bytes(layer, n_ctx))
        elif isinstance(layer, RecurrentLayer):
            add(layer.device, "recurrent", self._cache_bytes(layer, n_ctx))
            add(layer.device, "checkpoints", q.n_slots * min(q.n_checkpoints, N_ON_DEVICE) * state_bytes(layer))

    def layer_bytes(self, layer: KVLayer | RecurrentLayer, n_ctx: int) -> int:
        """All that a layer keeps besides its weights."""
        found: Counter[str] = Counter()
        self._add_layer(layer, n_ctx, lambda device, part, n_bytes: found.update({part: n_bytes}))
        return sum(found.values())

    def _cache_bytes(self, layer: KVLayer | RecurrentLayer, n_ctx: int) -> int:
        """The allocator's own answer, asked once for layers that are alike."""
        q, like = self.question, replace(layer, device=META)
        if (like, n_ctx) not in self._known:
            self._known[like, n_ctx] = Cache.allocate([like], q.n_slots, n_ctx, q.type_k, q.type_v).n_bytes
        return self._known[like, n_ctx]

    def _workspace(self, part: Part, device: torch.device) -> int:
        """The most that work outside graphs takes at once: a prompt chunk in a layer, or logits; unpacked weights."""
        q = self.question
        is_captured = q.graphs and padded_width(q.n_ubatch) in WIDTHS
        between = self._between(part) if is_captured and len({layer.device for layer in part.model.layers}) > 1 else 0
        rows = between if is_captured else self._chunk(part, q.n_ubatch)
        return self._unpacked(part) + max(rows, self._logits(part, device))

    def _unpacked(self, part: Part) -> int:
        """The buffer of unpacked weights, which graphs use too: gate and up together, the largest launch of a layer."""
        config = self.question.config
        return min(SCRATCH_BYTES, 2 * 2 * max(config.feed_forward_length) // len(self.parts) * config.embedding_length)

    def _chunk(self, part: Part, T: int) -> int:
        """Intermediate tensors of a prompt chunk of T rows in a layer."""
        config = self.question.config
        D, F = config.embedding_length, max(config.feed_forward_length) // len(self.parts)
        mixers = [prompt_bytes(layer, T) for layer in part.model.cache_layers if isinstance(layer, RecurrentLayer)]
        return max([4 * T * 3 * F, *mixers]) + 4 * T * 6 * D

    def _between(self, part: Part) -> int:
        """Rows and taps of the chunks that a device has made and not yet given to the next."""
        return 2 * 4 * self.question.n_ubatch * self.question.config.embedding_length * (1 + part.taps)

    def _n_rows(self, part: Part) -> int:
        """Rows of the widest step: all slots, each with its last token and a full draft."""
        return self.question.n_slots * (1 + (self.question.draft.n_max if part.drafters else 0))

    def _graphs(self, part: Part, device: torch.device) -> int:
        """Graphs share one pool a device, as large as the largest needs; states are set aside while one is captured."""
        q, config = self.question, self.question.config
        states = sum(
            state_bytes(layer) for layer in part.model.cache_layers
            if isinstance(layer, RecurrentLayer) and layer.device == device
        )
        widths = [width for width in WIDTHS if width <= padded_width(q.n_ubatch)]
        chunk, logits = self._chunk(part, widths[-1]), self._logits(part, device)
        results = 4 * sum(widths) * config.embedding_length
        more = max(chunk - logits, 0) + results + len(widths) * GRAPH_BYTES + q.n_slots * states
        return self._steps(part, device) + more

    def _steps(self, part: Part, device: torch.device) -> int:
        """Of it what the captured steps take on a device: logits, what crosses between devices, the driver's memory."""
        q = self.question
        n_graphs = len(entry_counts(1, q.n_slots)) * (q.n_widths if part.drafters else 1)
        stream = 4 * self._n_rows(part) * q.config.embedding_length * (1 + part.taps)
        crossing = 2 * stream if len(self._of_a_step(part)) > 1 else 0  # what comes and what goes
        return self._logits(part, device) + crossing + n_graphs * GRAPH_BYTES

    def _logits(self, part: Part, device: torch.device) -> int:
        """Bytes of the logits of a step where the target or a drafter makes them or chooses from them."""
        places = {part.output} if self.question.is_tensor else {part.output, *(place for place, _ in part.drafters)}
        return self._n_rows(part) * self.question.config.n_vocab * 4 * LOGITS_COPIES if device in places else 0

    def _of_a_step(self, part: Part) -> set[torch.device]:
        """The devices that a captured step works on: those of one process, GPUs all of them."""
        devices = {layer.device for layer in part.model.layers} | {part.output}
        drafting = set() if self.question.is_tensor else {device for device, _ in part.drafters}
        return devices | {device for device in drafting if device.type == "cuda"}

    def _beside(self, part: Part) -> set[torch.device]:
        """GPUs that have a part in captured steps without a layer of the target."""
        devices = self._of_a_step(part)
        if any(device.type != "cuda" for device in devices):
            return set()
        return devices - {layer.device for layer in part.model.layers}

    def largest(self, device: torch.device | None = None, most: int | None = None) -> int:
        """The largest context a slot can have so that `device` (None: every device) has room, 0 when none.

        A multiple of 256, at most `most` (None: the training context).
        """
        top = self.question.config.context_length if most is None else most
        low, high = 0, -(-top // CELL_CHUNK)
        while low < high:
            middle = (low + high + 1) // 2
            plan = self.plan(middle * CELL_CHUNK)
            if plan.fits if device is None else not plan.missing(device):
                low = middle
            else:
                high = middle - 1
        return low * CELL_CHUNK


def state_bytes(layer: RecurrentLayer) -> int:
    """Bytes of one slot's committed state in a recurrent layer: what a checkpoint copies."""
    spec = layer.spec
    return 4 * (spec.n_v * spec.d * spec.d + (spec.conv_kernel - 1) * spec.conv_dim)


def prompt_bytes(layer: RecurrentLayer, T: int) -> int:
    """Bytes of T rows' intermediate tensors in a recurrent layer, see `kernels.gdn.scan`."""
    spec = layer.spec
    value = spec.n_v * spec.d
    states = 4 * -(-T // CHUNK) * value * spec.d
    return 4 * T * (2 * spec.conv_dim + 5 * value) + states  # inputs twice; z, U, Y, delta and o


def check(q: Question) -> None:
    """Whether the drafter's file and types fit the target; ConfigError or UnsupportedError if not."""
    check_types(q.drafter_types, q.draft_file, q.file)
    if q.draft_file is not None and any(name.startswith("draft-") for name in q.drafter_types):
        check_pair(q.draft_file, q.file)


def measure(q: Question) -> list[Part]:
    """The processes of a run: one, or one a device of a tensor split (devices with share 0 take no part)."""
    if not q.is_tensor:
        return [_measure_one(q, placement_of(q), WHOLE)]
    shares = q.shares if q.shares and len(q.devices) > 1 else (1.0,) * len(q.devices)
    if len(shares) > len(q.devices):
        raise PlacementError(f"--tensor-split has {len(shares)} shares for {len(q.devices)} devices")
    used = [(device, share) for device, share in zip(q.devices, shares) if share > 0]
    if not used:
        raise PlacementError("--tensor-split gives no device a share")
    ratios = tuple(share for _, share in used)
    check_group(Shard(0, ratios))
    owner = owner_of(q.draft_device, [device for device, _ in used])
    return [
        _measure_one(q, whole_on(device, q.config), Shard(rank, ratios), owner in (None, rank))
        for rank, (device, _) in enumerate(used)
    ]


def owner_of(draft_device: torch.device | None, devices: Sequence[torch.device]) -> int | None:
    """The rank of a tensor split that has the drafter: that of its device, the first if none has it; None: all."""
    if draft_device is None:
        return None
    return next((rank for rank, device in enumerate(devices) if device == draft_device), 0)


def whole_on(device: torch.device, config: Config) -> Placement:
    return Placement(device, (device,) * config.n_layers, device)


def placement_of(q: Question) -> Placement:
    """Layers on devices, as loading would place them. Without shares they follow the devices' memory."""
    shares = q.shares or tuple(float(m) if m is not None else 1.0 for m in q.memory)
    return place_layers(
        list(q.devices), q.config.block_count, q.config.n_layers, gpu_layers=q.gpu_layers, split=q.split,
        tensor_split=shares if len(q.devices) > 1 else (), main_gpu=q.main_gpu,
    )


def _measure_one(q: Question, placement: Placement, shard: Shard, drafts: bool = True) -> Part:
    weights = SizeWeights(q.file)
    model = load_model(q.file, placement, config=q.config, weights=weights, shard=shard)
    part = Part(model, Counter(weights.n_bytes), Counter(weights.by_unit))
    for name in q.drafter_types:
        if drafts and name.startswith("draft-") and q.draft.n_max > 0:
            _measure_drafter(q, name, part, weights)
    return part


def _measure_drafter(q: Question, name: str, part: Part, target_weights: SizeWeights) -> None:
    device = q.draft_device or part.output
    file = file_for(name, q.draft_file)
    target = part.model
    if q.is_tensor and q.draft_device is not None and borrows_head(name, file, q.file):
        held = Counter(target_weights.n_bytes)
        target = replace(target, head=whole_head(target_weights, target))  # the cut one is joined by all ranks
        part.draft_weights.update(target_weights.n_bytes - held)
    sizes: dict[str, Any] = dict(
        n_slots=q.n_slots, type_k=q.draft_type_k, type_v=q.draft_type_v, max_rows=row_limit(part.model)
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
        added, part.taps = weights.n_bytes, len(dflash.target_layers)
        options = replace(q.draft, n_max=min(q.draft.n_max, dflash.n_limit))
        on_meta = replace(backbone, device=META)
        make = lambda n_ctx: DFlash(name, on_meta, options, n_ctx=n_ctx, **sizes)  # noqa: E731
    part.draft_weights.update(added)
    part.drafters.append((device, lambda n_ctx: own_bytes(make(n_ctx))))
    part.rings.append((device, lambda n_ctx: ring_bytes(make(n_ctx))))


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
