"""Gated DeltaNet: convolution, gates and the gated delta rule, with a state per slot and replay of accepted
rows.

    state = allocate(spec, n_slots, device)
    o = chunk(u, alpha, beta, weights, state, slots, n_rows, spec)   # prompt: commits its rows
    a = step_prepared(u, z, alpha, beta, weights, norm, eps, state, slots, n_rows, spec)  # tentative, 1..17 a slot
    accept(state, slots, n, n_rows)                                                       # after every step

u [B, W, conv_dim], alpha, beta [B, W, n_v] are the raw projections; o is [B, W, n_v, d] float32, before the
gated norm, a the output projection's input after it.
"""

from types import ModuleType

import torch
from torch import Tensor

from ggufspec.kernels.gdn import plain, prefill
from ggufspec.kernels.gdn.plain import naive
from ggufspec.kernels.gdn.state import (
    MAX_WINDOW,
    Bank,
    GdnSpec,
    GdnState,
    GdnWeights,
    allocate,
    allocate_bank,
    fits,
    pack_bank,
    pack_slot,
    reset,
    reset_bank,
    restore,
    restore_bank,
    tails,
    trim,
)
from ggufspec.kernels.matmul import Activation

__all__ = [
    "MAX_WINDOW", "Bank", "GdnSpec", "GdnState", "GdnWeights", "accept", "allocate", "allocate_bank", "chunk", "commit",
    "fits", "naive", "reset", "reset_bank", "restore", "restore_bank", "save", "save_bank", "step_prepared", "tails",
    "trim",
]  # fmt: skip


def room(x: Tensor) -> ModuleType:
    """The twin or the kernel of narrow steps, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.gdn import step

        return step
    return plain


def step_prepared(
    u: Tensor,
    z: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weights: GdnWeights,
    norm: Tensor,
    norm_eps: float,
    state: GdnState,
    slots: Tensor,
    n_rows: Tensor,
    spec: GdnSpec,
) -> Activation:
    """Tentative rows to the output projection's input [B * W, n_v * d], in one launch.

    Replays what was accepted of the last step, computes these rows, records their inputs; then rms_norm(o) * norm *
    silu(z) over each head's d values. u [B, W, conv_dim], z [B, W, n_v * d], alpha, beta [B, W, n_v] are raw
    projections, norm [d]. Must be followed by `accept` before the next step. All W rows are computed and recorded;
    accepting more than are right is the caller's error. Only entries with n_rows 0 take no part: nothing of their slots
    is read or changed, their results are zeros. Raises ValueError for more rows than the window holds.
    """
    if u.shape[1] > state.max_window:
        raise ValueError(f"{u.shape[1]} tentative rows do not fit a window of {state.max_window}")
    return room(u).step_prepared(u, z, alpha, beta, weights, norm, norm_eps, state, slots, n_rows, spec)


def accept(state: GdnState, slots: Tensor, n: Tensor, n_rows: Tensor | None = None) -> None:
    """Commit the first n[b] rows of the last step of slot slots[b]; once after every step, n = 0 included.

    n, n_rows [B] int64: entries that had no rows in the step (n_rows 0) are left alone; None: all had some.
    """
    room(state.shared).accept(state, slots, n, torch.ones_like(n) if n_rows is None else n_rows)


def chunk(
    u: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weights: GdnWeights,
    state: GdnState,
    slots: Tensor,
    n_rows: Tensor,
    spec: GdnSpec,
) -> Tensor:
    """Prompt rows: replay the window, then commit the first n_rows[b] rows of each slot. Any width."""
    commit(state, slots)
    return prefill.chunk(u, alpha, beta, weights, state, slots, n_rows, spec)


def commit(state: GdnState, slots: Tensor) -> None:
    """Replay the accepted rows of slots [B] now; nothing is pending afterwards."""
    room(state.state).replay(state, slots)
    room(state.state).committed(state.counts, slots)


def save_bank(bank: Bank, slot: int, is_committed: bool = False) -> Tensor:
    """The slot's committed memory of all layers, [n_layers, n], where it lies. is_committed: nothing is pending in the
    slot, as after prompt rows; else accepted rows are committed first."""
    if not is_committed:
        slots = torch.full((1,), slot, device=bank.state.device)  # filled there: the host waits for nothing
        for layer in bank.layers:
            room(bank.state).replay(layer, slots)
        room(bank.state).committed(bank.counts, slots)
    return pack_bank(bank, slot)


def save(state: GdnState, slot: int) -> Tensor:
    """The slot's committed memory as one flat tensor on the host; accepted rows are committed first."""
    commit(state, torch.full((1,), slot, device=state.device))  # filled there: the host waits for nothing
    return pack_slot(state, slot).cpu()
