"""Rotary embedding as Triton kernels. `turned` is shared with the kernel that also norms and stores."""

from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.overlap import begin, overlap
from ggufspec.kernels.rope.plain import RopeSpec, amplitude, frequencies

# frequencies of a spec on each device, so that a step copies nothing from the host
_frequencies: WeakKeyDictionary[RopeSpec, dict[torch.device, Tensor]] = WeakKeyDictionary()


@triton.jit
def tables_kernel(
    position_ptr, frequency_ptr, cos_ptr, sin_ptr, amplitude, HALF, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    position = tl.load(position_ptr + row).to(tl.float64)
    angle = position * tl.load(frequency_ptr + pair, mask, 0.0)
    tl.store(cos_ptr + row * HALF + pair, (tl.cos(angle) * amplitude).to(tl.float32), mask)
    tl.store(sin_ptr + row * HALF + pair, (tl.sin(angle) * amplitude).to(tl.float32), mask)


@triton.jit
def partner_of(e, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """Index of the dimension that e rotates with; e itself past N_ROT."""
    if NEOX:
        other = tl.where(e < N_ROT // 2, e + N_ROT // 2, e - N_ROT // 2)
    else:
        other = e ^ 1
    return tl.where(e < N_ROT, other, e)


@triton.jit
def turned(x, partner, e, cos_ptr, sin_ptr, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """Dimensions e with values x and their partners' values, rotated by one row of the tables."""
    rotates = e < N_ROT
    if NEOX:
        pair = e % (N_ROT // 2)
        first = e < N_ROT // 2
    else:
        pair = e // 2
        first = e % 2 == 0
    c = tl.load(cos_ptr + pair, rotates, 1.0)
    s = tl.load(sin_ptr + pair, rotates, 0.0)
    return x * c + tl.where(first, -partner, partner) * s


@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, H, HD,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, BLOCK)
    mask = e < HD
    base = (row * H + head) * HD
    x = tl.load(x_ptr + base + e, mask, 0.0)
    partner = tl.load(x_ptr + base + partner_of(e, N_ROT, NEOX), mask, 0.0)
    table = row * (N_ROT // 2)
    tl.store(out_ptr + base + e, turned(x, partner, e, cos_ptr + table, sin_ptr + table, N_ROT, NEOX), mask)


def device_frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    held = _frequencies.setdefault(spec, {})
    if device not in held:
        held[device] = frequencies(spec).to(device)
    return held[device]


def tables(positions: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    half = spec.n_rot // 2
    cos = torch.empty(*positions.shape, half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    tables_kernel[(positions.numel(),)](
        positions.contiguous(), device_frequencies(spec, positions.device), cos, sin, amplitude(spec), half,
        triton.next_power_of_2(half), num_warps=1, **overlap(cos),
    )  # fmt: skip
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, spec: RopeSpec) -> Tensor:
    x = x.contiguous()
    H, HD = x.shape[-2:]
    out = torch.empty_like(x)
    rotate_kernel[(cos.numel() // cos.shape[-1], H)](
        x, cos.contiguous(), sin.contiguous(), out, H, HD,
        spec.n_rot, spec.pairing == "neox", triton.next_power_of_2(HD), num_warps=1, **overlap(x),
    )  # fmt: skip
    return out
