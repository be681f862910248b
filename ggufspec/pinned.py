"""Page-locked host memory for small copies between host and device that neither side waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor` for values that the host has; on a GPU behind what its stream has been given, and nobody waits.

    PyTorch's own copy, from ordinary memory, waits for the stream, and other threads (a server's connections) with it.
    """
    made = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


class Pinned:
    """Pieces of host memory by name, each of them double: steps take turns.

    Whoever uses a piece again has to know that the copy from or to it of two steps ago is done. On the CPU the pieces
    are ordinary memory.
    """

    def __init__(self, device: torch.device):
        self.is_pinned = device.type == "cuda"
        self._pieces: dict[tuple[str, int], Tensor] = {}

    def piece(self, name: str, turn: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor over the piece; what it holds is left from its last use."""
        n = 1
        for size in shape:
            n *= size
        flat = self._pieces.get((name, turn))
        if flat is None or flat.numel() < n or flat.dtype != dtype:
            room = 1 << max(n - 1, 1).bit_length()
            flat = self._pieces[name, turn] = torch.empty(room, dtype=dtype, pin_memory=self.is_pinned)
        return flat[:n].view(*shape)
