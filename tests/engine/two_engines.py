"""The bundled target in two engines, one of which runs a step ahead: they are played the same and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ggufspec import bundled
from ggufspec.adaptive import Choice
from ggufspec.capture import Captured, Graphs, tensors_of
from ggufspec.drafters import Drafter, DraftOptions
from ggufspec.drafters.load import SpecOptions, load_drafter
from ggufspec.engine import Engine
from ggufspec.flight import Flight
from ggufspec.gguf_file import GGUFFile, open_gguf
from ggufspec.host_copy import host_copy
from ggufspec.job import Event, Job
from ggufspec.laps import Laps
from ggufspec.models import Model, load_model
from ggufspec.placement import Placement
from ggufspec.rows import Rows
from ggufspec.sampling import SamplingParams
from ggufspec.slot import Slot
from ggufspec.tokenizer import Tokenizer
from ggufspec.weights import Weights

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=30, seed=5, ignore_eos=True)
KINDS: dict[str, tuple[str | None, int]] = {"plain": (None, 0), "mtp": (None, 3), "dspark": ("dspark", 5),
                                            "dflash2": ("dflash2", 4)}  # fmt: skip
TEXTS = (
    "import os\nimport json\n\n\ndef read_config(path):\n    ",
    '{"name": "value", "list": [1, 2, 3], "other": {"name": ',
    "The function returns a list of all the values that ",
)


class Family:
    """The bundled target and engines over it."""

    def __init__(self, device: str = "cpu") -> None:
        self.file: GGUFFile = open_gguf(bundled.target_path())
        self.weights = Weights(self.file)
        n = int(self.file.metadata["qwen35.block_count"])
        self.model: Model = load_model(self.file, Placement.single(device, n), weights=self.weights)
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata)
        self.prompts = [self.tokenizer.encode(text) for text in TEXTS]

    def drafter(self, kind: str, n_slots: int, n_ctx: int) -> Drafter | None:
        name, n_max = KINDS[kind]
        if kind == "plain":
            return None
        options = SpecOptions(("draft-mtp",) if name is None else (), DraftOptions(n_max=n_max))
        return load_drafter(
            options, self.file, self.model, None if name is None else open_gguf(bundled.path(name)),
            n_slots=n_slots, n_ctx=n_ctx, target_weights=self.weights,
        )  # fmt: skip

    def engine(self, kind: str, ahead: bool, n_slots: int = 1, n_ctx: int = 256, **options: Any) -> Engine:
        drafter = options.pop("drafter", None) or self.drafter(kind, n_slots, n_ctx)
        return Engine(self.model, self.tokenizer, drafter=drafter, n_slots=n_slots, n_ctx=n_ctx, ahead=ahead, **options)


def positions_of(value: Any) -> Sequence[torch.Tensor]:
    """Those that rows have made of themselves so far."""
    return vars(value).get("_positions", ()) if isinstance(value, Rows) else ()


class Replay:
    """Runs its stage on the fixed inputs and writes the fixed outputs, as a graph does."""

    def __init__(self, stage: Callable[..., Any], inputs: tuple[torch.Tensor, ...]):
        self.stage, self.inputs = stage, inputs
        self.outputs = stage(*inputs)
        self.made = [positions_of(place) for place in self.outputs]  # a graph makes these anew, no others

    def replay(self) -> None:
        made = self.stage(*self.inputs)
        for place, value in zip(tensors_of(self.outputs), tensors_of(made), strict=True):
            place.copy_(value)
        for place, value, positions in zip(self.outputs, made, self.made):
            if isinstance(place, Laps):
                place.marks = value.marks
            for own, new in zip(positions, positions_of(value), strict=True):
                own.copy_(new)


class Replays(Graphs):
    """The bookkeeping of captured steps without a GPU."""

    def __init__(self, mutable: Callable[[], list[torch.Tensor]]):
        super().__init__(torch.device("cpu"), mutable)

    def _capture(self, stage: Callable[..., Any], arguments: tuple[torch.Tensor, ...], n_graphs: int,
                 n_warm_up: int, is_harmless: bool = False) -> Captured:
        inputs = tuple(argument.clone().to(self.device) for argument in arguments)
        kept = [] if is_harmless else [(tensor, tensor.clone()) for tensor in self.mutable()]
        graphs = []
        for _ in range(n_graphs):
            graphs.append(self.replay(stage, inputs))
            for tensor, copy in kept:
                tensor.copy_(copy)
        return Captured(inputs, [(graph, graph.outputs) for graph in graphs], versions=[None] * len(inputs))

    def replay(self, stage: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        return Replay(stage, inputs)


def replayed(engine: Engine) -> Engine:
    """The engine with its steps captured as far as a CPU can."""
    engine.decoder.graphs = Replays(engine._mutable)
    return engine


def watch(engine: Engine) -> list[tuple[int, int]]:
    """(slots, slots that follow) of every launch from now on."""
    seen: list[tuple[int, int]] = []
    launch = engine.decoder.launch

    def watched(slots: Sequence[Slot], choice: Choice, rooms: Sequence[int], following: Flight | None = None) -> Flight:
        seen.append((len(slots), 0 if following is None else sum(map(following.holds, slots))))
        return launch(slots, choice, rooms, following)

    engine.decoder.launch = watched  # type: ignore[method-assign]
    return seen


def drain(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def outcome(job: Job) -> tuple[Any, ...]:
    stats = job.stats
    return (job.generated, job.text, job.finish_reason, job.stop_kind, stats.predicted_n, stats.draft_n,
            stats.draft_n_accepted, stats.n_verify, stats.accepted_per_position)  # fmt: skip


def flat(value: Any, at: str = "") -> list[tuple[str, Any]]:
    """All tensors and numbers inside saved slots, with the attributes, keys and indices that lead there."""
    if isinstance(value, torch.Tensor):
        return [(at, value)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in flat(item, f"{at}.{key}")]
    if isinstance(value, list | tuple):
        return [leaf for i, item in enumerate(value) for leaf in flat(item, f"{at}[{i}]")]
    if hasattr(value, "__dataclass_fields__"):
        return [leaf for name, item in vars(value).items() for leaf in flat(item, f"{at}.{name}")]
    return [(at, value)]


def difference(x: Any, y: Any) -> str:
    """How two leaves differ; "" where they do not, bit for bit."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return "" if x == y else f"{x!r}, not {y!r}"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype} {list(x.shape)}, not {y.dtype} {list(y.shape)}"
    a, b = (t.contiguous().flatten().view(torch.uint8).view(t.numel(), t.element_size()) for t in (x, y))
    places = (a != b).any(1).nonzero()[:, 0]
    if len(places) == 0:
        return ""
    first = [int(k) for k in torch.unravel_index(places[0], x.shape)]
    rows = sorted({int(k) for k in torch.unravel_index(places, x.shape)[0]}) if x.dim() else []
    return (f"{x.dtype} {list(x.shape)}: {len(places)} elements, the first at {first}: {x[tuple(first)].item()!r}, not "
            f"{y[tuple(first)].item()!r}; first indices {rows[:40]}")  # fmt: skip


def same_slots(a: Engine, b: Engine) -> None:
    """Tokens, caches, recurrent states and drafters' states, bit for bit; every leaf that differs is named."""
    wrong = []
    for slot in range(len(a.slots)):
        mine, theirs = (flat(host_copy(e.save_slot(slot))[0]) for e in (a, b))
        assert [at for at, _ in mine] == [at for at, _ in theirs], f"slot {slot}"
        for (at, x), (_, y) in zip(mine, theirs):
            how = difference(x, y)
            if how:
                wrong.append(f"slot {slot} of {a.slots[slot].n_past} tokens, {at.lstrip('.')}: {how}")
    assert not wrong, "\n".join(wrong)


def both(family: Family, kind: str, play: Callable[[Engine], list[Job]], **options: Any
         ) -> tuple[Engine, list[tuple[int, int]]]:
    """Play the same with and without running ahead; what comes of it and what is left in the slots is the same."""
    with_it, without = (family.engine(kind, ahead, **options) for ahead in (True, False))
    launches, behind = watch(with_it), watch(without)
    got, want = play(with_it), play(without)
    assert list(map(outcome, got)) == list(map(outcome, want))
    assert with_it.idle and without.idle
    for name in ("n_slots_decoded", "draft_n", "draft_n_accepted", "n_drafts", "accepted_at"):
        assert getattr(with_it.stats, name) == getattr(without.stats, name), name
    assert all(n == 0 for _, n in behind)
    same_slots(with_it, without)
    return with_it, launches


def n_ahead(launches: list[tuple[int, int]]) -> int:
    return sum(n > 0 for _, n in launches)
