"""Which device holds which part of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

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

    Names: `cpu` and `cuda:N` as in PyTorch, and llama.cpp's `CUDA0`, `CUDA1`, ... `CPU0`, `CPU1`, ... are all the CPU,
    as logical devices of their own: naming several tries out a split without GPUs, copies between devices included.
    """
    text = str(device)
    if text.upper().startswith("CPU") and text[3:].isdigit():
        return torch.device("cpu", int(text[3:]))
    if text.upper().startswith("CUDA") and text[4:].isdigit():
        text = f"cuda:{text[4:]}"
    try:
        out = torch.device(text)
    except RuntimeError as error:
        raise PlacementError(f"device {text!r} is not known; expected cpu, CUDA0, CUDA1, ...") from error
    if out.type not in ("cpu", "cuda"):
        raise PlacementError(f"device {text!r} is of a kind that is not supported; expected cpu, CUDA0, CUDA1, ...")
    if out.type == "cuda":
        n = torch.cuda.device_count()
        index = 0 if out.index is None else out.index
        if index >= n:
            raise PlacementError(f"device {device} was asked for, but this machine has {n} CUDA device(s)")
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


def devices_of(names: tuple[str, ...] | None) -> list[torch.device]:
    """The devices that `--device` names: None is all GPUs (the CPU without any), `none` the CPU alone."""
    if names is None:
        n = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [resolve(f"cuda:{i}") for i in range(n)] or [torch.device("cpu")]
    if names == ("none",):
        return [torch.device("cpu")]
    return [resolve(name) for name in names]


def place_layers(devices: list[torch.device], block_count: int, n_layers: int, *, gpu_layers: int = -1,
                 split: str = "layer", tensor_split: tuple[float, ...] = (), main_gpu: int = 0) -> Placement:
    """llama.cpp's assignment of layers to devices.

    Counting the output as layer `block_count`, the last `gpu_layers` go to the devices (negative: all), the first
    ones stay on the CPU. A layer goes to the first device whose cumulative share exceeds its fraction. Without
    `tensor_split` shares follow each device's free memory. The embedding lies with the first layer: a lookup costs
    nothing there, a copy from the CPU would. With split `none` and a negative `main_gpu` there is no GPU at all.
    """
    cpu = torch.device("cpu")
    is_cpu = [device.type for device in devices] == ["cpu"] or (split == "none" and main_gpu < 0)
    if is_cpu or gpu_layers == 0:
        return Placement(cpu, (cpu,) * n_layers, cpu)
    if split == "none":
        if main_gpu >= len(devices):
            raise PlacementError(f"invalid value for main_gpu: {main_gpu}; there are {len(devices)} devices")
        devices, tensor_split = [devices[main_gpu]], ()
    shares = list(shares_of(tensor_split, len(devices)))
    if not shares:
        shares = [free_bytes(device) for device in devices] if len(devices) > 1 else [1.0]
    active = min(gpu_layers, block_count + 1) if gpu_layers >= 0 else block_count + 1
    start = block_count + 1 - active
    total = sum(shares)
    limits = [sum(shares[: d + 1]) / total for d in range(len(devices))]

    def device_of(layer: int) -> torch.device:
        if layer < start:
            return cpu
        fraction = (layer - start) / active
        return next((device for device, limit in zip(devices, limits) if limit > fraction), devices[-1])

    layers = tuple(device_of(i) for i in range(n_layers))
    return Placement(layers[0], layers, device_of(block_count))


def shown(placement: Placement) -> str:
    """In words: `layers 0 to 16 on CUDA0, 17 to 63 and the output on CUDA1`."""
    words = []
    for device, run in groupby(range(len(placement.layers)), placement.layers.__getitem__):
        layers = list(run)
        words.append((f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else str(layers[0]), device))
    if words[-1][1] == placement.output:
        words[-1] = (f"{words[-1][0]} and the output", placement.output)
    else:
        words.append(("the output", placement.output))
    return "layers " + ", ".join(f"{what} on {device_name(device)}" for what, device in words)


def shares_of(tensor_split: Sequence[float], n: int) -> tuple[float, ...]:
    """`--tensor-split` for n devices: a share each, 0 for those missing at the end.

    () where it says nothing: nothing but zeros, or one device, which has everything.
    """
    if any(share < 0 for share in tensor_split):
        raise PlacementError(f"--tensor-split {','.join(map(str, tensor_split))} has a negative share")
    if n < 2 or not any(tensor_split):
        return ()
    if any(tensor_split[n:]):
        raise PlacementError(f"--tensor-split has {len(tensor_split)} shares for {n} devices")
    shares = (*tensor_split, *[0.0] * n)[:n]
    if not math.isfinite(sum(shares)):
        raise PlacementError(f"--tensor-split {','.join(map(str, tensor_split))}: expected ratios such as 4,6,6")
    return shares


def check_whole(gpu_layers: int, block_count: int) -> None:
    """A tensor split has every layer on all its devices: PlacementError when `gpu_layers` leaves some on the CPU."""
    if 0 < gpu_layers <= block_count:
        raise PlacementError(
            f"-ngl {gpu_layers}: --split-mode tensor has all {block_count + 1} layers, the output included, on every "
            "device; use -ngl all, or --split-mode layer"
        )


def device_name(device: torch.device) -> str:
    """The name that `resolve` takes."""
    return f"{device.type.upper()}{device.index or 0}"


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return 1.0
    return float(torch.cuda.mem_get_info(device)[0])
