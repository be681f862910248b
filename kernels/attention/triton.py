"""Attention over the packed cache as Triton kernels: `narrow` for steps, `wide` for prompt chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.attention import narrow, wide
from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.kv.triton import hadamard
from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.matmul.triton import prepare
from ggufspec.kernels.overlap import begin, overlap

# Wider batches take the prompt kernel: few rows are few programs there, each of which would walk all of a long past.
NARROW_ROWS = 32


@triton.jit
def spin_kernel(x_ptr, out_ptr, HD, BLOCK: tl.constexpr, SPIN: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr):
    """The Hadamard rotation of one head vector."""
    begin(PDL)
    e = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * HD + e
    tl.store(out_ptr + at, hadamard(tl.load(x_ptr + at, e < HD, 0.0), BLOCK, SPIN, LOG), e < HD)


def spin(x: Tensor, n: int) -> Tensor:
    """x [.., hd] rotated by the Hadamard matrix of size n, 0: as it is."""
    if n == 0:
        return x
    out = torch.empty_like(x)
    hd = x.shape[-1]
    block = triton.next_power_of_2(hd)
    spin_kernel[(x.numel() // hd,)](x, out, hd, block, n, n.bit_length() - 1, num_warps=1, **overlap(x))
    return out


def attend(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec,
    gate: Tensor | None = None, q_rotated: bool = False,
) -> Tensor:  # fmt: skip
    q = q.float().contiguous()
    if not q_rotated:
        q = spin(q, kv.rotation_k)
    if q.shape[1] <= NARROW_ROWS:
        return narrow.attend(q, kv, slots, n_past, n_rows, spec, gate)
    out = spin(wide.attend(q, kv, slots, n_past, n_rows, spec), kv.rotation_v)
    return out if gate is None else out * torch.sigmoid(gate)


def attend_prepared(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec,
    gate: Tensor | None = None, q_rotated: bool = False,
) -> Activation:  # fmt: skip
    if q.shape[1] > NARROW_ROWS:
        return prepare(attend(q, kv, slots, n_past, n_rows, spec, gate, q_rotated).flatten(2).flatten(0, 1))
    q = q.float().contiguous()
    if not q_rotated:
        q = spin(q, kv.rotation_k)
    return narrow.attend_prepared(q, kv, slots, n_past, n_rows, spec, gate)
