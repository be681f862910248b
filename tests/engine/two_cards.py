"""Several cards that are not there: tensors of the CPU say on which of them they lie, as cpu:0, cpu:1, ...

    with Cards() as cards:
        model = load_model(file, Placement(FIRST, (FIRST, SECOND), SECOND))

Work on tensors of two cards fails, as it would between GPUs. While a step is recorded (`Tapes`), work on a card whose
graph is not being captured fails too: on a GPU it would be done once, and never again by a replay. What is done outside
recordings is noted by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from two_engines import Replay, Replays

from ggufspec import weights
from ggufspec.capture import Lane, tensors_of
from ggufspec.handover import recorder
from ggufspec.kernels.matmul import PackedWeight, pack
from ggufspec.relay import Recording

FIRST, SECOND, THIRD = (torch.device("cpu", k) for k in range(3))
_device = Tensor.device.__get__  # type: ignore[attr-defined]
# What looks at a tensor's description or only finds memory for one is no work, nor is another view of a tensor.
LOOKS = {
    "__get__", "__set__", "size", "dim", "numel", "stride", "element_size", "storage_offset", "is_contiguous",
    "data_ptr", "new_empty", "untyped_storage", "__len__", "empty", "empty_like",
}  # fmt: skip


class Cards(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []  # work on a card that no recording took
        self._packing = patch.object(weights, "pack", packed)

    def __enter__(self) -> Cards:
        self._packing.start()
        return super().__enter__()

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        self._packing.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _device:
            return card_of(args[0]) or func(*args)
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device)]
        cards = {card for t in found_in((args, kwargs)) if (card := card_of(t)) is not None}
        if len(cards) > 1 and name not in ("copy_", "to", "__set__"):
            raise AssertionError(f"{name} of tensors on {sorted(map(str, cards))}")
        result = func(*map(here, args), **{key: here(value) for key, value in kwargs.items()})
        if given:
            card = None if given[0].index is None else given[0]
            if isinstance(result, Tensor) and any(result is t for t in found_in(args)) and card_of(result) != card:
                result = result.clone()  # what stays where it was is another tensor
        elif name in ("cpu", "numpy", "tolist", "item"):
            card = None
        elif name in ("copy_", "__set__"):
            card = card_of(args[0])
        else:
            card = next(iter(cards), None)
        for t in found_in(result):
            t.card = card
        if name not in LOOKS and not is_view(name, args, result) and (card or cards):
            self._note(name, card or next(iter(cards)))
        return result

    def _note(self, name: str, card: torch.device) -> None:
        recording = recorder.get()
        if recording is None:
            self.outside.append(name)
        elif isinstance(recording, Pretended):
            recording.note(name, card)


def packed(raw: Tensor, type_name: str, shape: tuple[int, int], device: torch.device) -> PackedWeight:
    """A matrix of the CPU on a card."""
    made = pack(raw, type_name, shape, device)
    for t in found_in((made.raw, made.dense)):
        t.card = device
    return replace(made, device=device)


def card_of(t: Tensor) -> torch.device | None:
    return getattr(t, "card", None)


def found_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from found_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from found_in(item)


def is_view(name: str, args: Any, result: Any) -> bool:
    """Whether all that came out is the memory of what went in."""
    made, given = list(found_in(result)), list(found_in(args))
    if name.endswith("_") and not name.endswith("__") or not made or not given:
        return False
    own = given[0].untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() == own for t in made)


def here(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cpu" else value


class Pretended(Recording):
    """Graphs are the names of their devices, copies pairs of them; what is recorded is done at once."""

    def __init__(self, lanes: Sequence[Lane]):
        super().__init__(lanes)
        self.seen: list[Any] = []
        self.n_done = 0

    def note(self, name: str, card: torch.device) -> None:
        if self._graph is None or card != self.device:
            raise AssertionError(f"{name} on {card} while {self._graph and self.device} is captured")
        self.n_done += 1

    def _begin(self) -> None:
        self._lane(self.device)
        assert self._graph is None
        self._graph, self.n_done = self.device, 0

    def _end(self) -> None:
        if self._graph is not None and self.n_done > 0:
            self.seen.append(str(self.device))
        self._graph = None

    def _copy(self, source: Tensor, target: Tensor) -> None:
        assert self._graph is None and source.device != target.device
        self.seen.append((str(source.device), str(target.device)))
        token = recorder.set(None)
        target.copy_(source)
        recorder.reset(token)

    def _current(self, device: torch.device) -> Any:
        return nullcontext()

    @contextmanager
    def _streams(self) -> Iterator[None]:
        yield


class Tape(Replay):
    """Done anew at every replay, which has to go the same way."""

    def __init__(self, stage: Callable[..., Any], inputs: tuple[Tensor, ...], lanes: Sequence[Lane]):
        self.seen: list[Any] = []

        def recorded(*arguments: Tensor) -> Any:
            recording = Pretended(lanes)
            with recording.running():
                outputs = stage(*arguments)
            assert self.seen in ([], recording.seen)
            self.seen = recording.seen
            return outputs

        super().__init__(recorded, inputs)


class Tapes(Replays):
    """`RelayGraphs` without GPUs."""

    def __init__(self, devices: Sequence[torch.device], mutable: Callable[[], list[Tensor]]):
        super().__init__(mutable)
        self.device, self.lanes = devices[0], [Lane(device) for device in devices]

    def replay(self, stage: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tape:
        return Tape(stage, inputs, self.lanes)

    def tapes(self) -> dict[Any, list[Any]]:
        """What each shape's tape has on it."""
        found = {}
        for key, entry in self.captured.items():
            seen = [graph.seen for graph, _ in entry.graphs]
            assert all(one == seen[0] for one in seen) and tensors_of(entry.graphs[0][1])
            found[key[0]] = seen[0]
        return found
