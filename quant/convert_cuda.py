"""`convert` on a GPU: the same checks and the same bytes, computed by the torch side of the codecs."""

from __future__ import annotations

import re

import numpy as np
import torch

from ggufspec.errors import ConfigError, PlacementError
from ggufspec.quant import layouts
from ggufspec.quant.convert import HALVES, Task, check_encoded, check_finite, read_rows
from ggufspec.quant.dequantize import DECODERS, dequantize_torch
from ggufspec.quant.quantize import quantize_torch


def cuda_device(text: str) -> torch.device:
    """`cuda`, `cuda:N` or llama.cpp's `CUDAN` -> the device. Raises ConfigError if it is none or not there."""
    match = re.fullmatch(r"cuda:?(\d*)", text.lower())
    if not match:
        raise ConfigError(f"device {text!r}, expected cpu, cuda or cuda:N")
    index, n_devices = int(match[1] or 0), torch.cuda.device_count()
    if index >= n_devices:
        raise ConfigError(f"device {text!r}: this machine has {n_devices} CUDA devices; use --device cpu")
    return torch.device("cuda", index)


def convert_on(task: Task, device: torch.device) -> np.ndarray:
    """uint8 [rows, row bytes] of the target type, on the CPU. Raises what `convert` raises, and PlacementError
    when the device has too little memory."""
    raw = read_rows(task)
    try:
        with torch.cuda.device(device):
            return _convert(task, raw, device)
    except torch.OutOfMemoryError:
        raise PlacementError(
            f"{device}: too little free memory to quantize tensor {task.tensor!r}; lower --max-buffer-size"
        ) from None


def _convert(task: Task, raw: np.ndarray, device: torch.device) -> np.ndarray:
    if task.source not in DECODERS:
        return raw
    x = dequantize_torch(torch.from_numpy(raw).to(device), task.source)
    if not torch.isfinite(x).all():
        check_finite(x.cpu().numpy(), task)
    if task.source == task.target:
        return raw
    importance = None if task.importance is None else torch.from_numpy(task.importance).to(device)
    out = quantize_torch(x, task.target, importance)
    blocks = out.view(-1, layouts.BY_NAME[task.target].n_bytes)
    too_large = any(bool(((blocks[:, at + 1] & 0x7C) == 0x7C).any()) for at in HALVES.get(task.target, ()))
    result = out.cpu().numpy()
    if too_large:
        check_encoded(result, task)
    return result
