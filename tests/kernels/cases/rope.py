"""Rotary tables and rotation."""

from __future__ import annotations

import torch

from ggufspec.kernels.rope import RopeSpec
from ggufspec.kernels.rope import plain as rope_plain
from ggufspec.kernels.rope import triton as rope_triton

from .comparing import case, close, on, random


@case
def rope(device: str, real: bool) -> None:
    W, H, hd = (16, 24, 256) if real else (3, 2, 24)
    for n_rot, pairing in ((64 if real else 16, "neox"), (hd, "norm")):
        spec = RopeSpec(n_rot, pairing=pairing)
        positions = torch.arange(2 * W).view(2, W) * 1001
        x = random(2, W, H, hd)
        cos, sin = rope_plain.tables(positions, spec)
        got = rope_triton.tables(positions.to(device), spec)
        close(got[0], cos, 1e-6, "cos"), close(got[1], sin, 1e-6, "sin")
        close(rope_triton.rotate(x.to(device), *on(device, cos, sin), spec), rope_plain.rotate(x, cos, sin, spec),
              1e-5, "rotate")  # fmt: skip
