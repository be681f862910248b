"""Which device holds which part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """Devices of the embedding, of every layer, and of the final norm and head."""

    embedding: torch.device
    layers: tuple[torch.device, ...]
    output: torch.device

    @classmethod
    def single(cls, device: torch.device | str, n_layers: int) -> Placement:
        device = resolve(device)
        return cls(device, (device,) * n_layers, device)


def resolve(device: torch.device | str) -> torch.device:
    """A device with its index filled in; PlacementError when the machine has no such device.

    Names: `cpu` and `cuda:N` as in PyTorch, and llama.cpp's `CUDA0`, `CUDA1`, ...
    """
    text = str(device)
    if text.upper().startswith("CUDA") and text[4:].isdigit():
        text = f"cuda:{text[4:]}"
    try:
        out = torch.device(text)
    except RuntimeError as error:
        raise PlacementError(f"device {text!r} is not known; expected cpu, CUDA0, CUDA1, ...") from error
    if out.type == "cuda":
        n = torch.cuda.device_count()
        index = 0 if out.index is None else out.index
        if index >= n:
            raise PlacementError(f"device {text} was asked for, but this machine has {n} CUDA device(s)")
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < (7, 5):
            raise PlacementError(
                f"device {text} has compute capability {major}.{minor}; the kernels need 7.5 (Turing) or newer"
            )
        return torch.device("cuda", index)
    return out


def default_device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    return resolve("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
