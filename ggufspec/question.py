"""What a plan is asked for: files, devices, and all options that memory depends on; and where they put the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .drafters import DraftOptions
from .drafters.recognize import check_pair, check_types, infer_types
from .placement import Placement, place_layers, shares_of

if TYPE_CHECKING:
    from .gguf_file import GGUFFile
    from .models import Config


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
    draft_memory: int | None = None  # like `memory`, of a draft device that is none of the devices

    @property
    def is_tensor(self) -> bool:
        return self.split in ("row", "tensor")

    @property
    def drafter_types(self) -> tuple[str, ...]:
        return self.types or infer_types(self.draft_file)

    def memory_of(self, device: torch.device) -> int | None:
        if device == self.draft_device and device not in self.devices:
            return self.draft_memory
        return dict(zip(self.devices, self.memory)).get(device)


def check(q: Question) -> None:
    """Whether the drafter's file and types fit the target; ConfigError or UnsupportedError if not."""
    check_types(q.drafter_types, q.draft_file, q.file)
    if q.draft_file is not None and any(name.startswith("draft-") for name in q.drafter_types):
        check_pair(q.draft_file, q.file)


def owner_of(draft_device: torch.device | None, devices: Sequence[torch.device]) -> int | None:
    """The rank of a tensor split that has the drafter: that of its device, the first if none has it; None: all."""
    if draft_device is None:
        return None
    return next((rank for rank, device in enumerate(devices) if device == draft_device), 0)


def whole_on(device: torch.device, config: Config) -> Placement:
    return Placement(device, (device,) * config.n_layers, device)


def placement_of(q: Question) -> Placement:
    """Layers on devices, as loading would place them. Without shares they follow the devices' memory."""
    shares = shares_of(q.shares, len(q.devices)) or tuple(float(m) if m is not None else 1.0 for m in q.memory)
    return place_layers(
        list(q.devices), q.config.block_count, q.config.n_layers, gpu_layers=q.gpu_layers, split=q.split,
        tensor_split=shares if len(q.devices) > 1 else (), main_gpu=q.main_gpu,
    )
