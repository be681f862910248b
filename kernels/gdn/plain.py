"""The gated delta rule token by token in PyTorch: the CPU path of narrow steps, and the oracles.

Per value head, with state A [value, key], for every row:

    A = A * exp(g);  delta = beta * (v - A k);  A = A + delta k^T;  o = A q / sqrt(d)

Every operation has a shape of one token of one slot, so grouping rows into steps cannot change a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ggufspec.kernels.gdn.state import GdnSpec, GdnState, GdnWeights
from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.norm.plain import sigmoid, silu
from ggufspec.kernels.prepared.plain import gated_norm


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, in the inputs' precision: the oracle.

    q, k [T, n_k, d] normalized, v [T, n_v, d], g (log decay) and beta [T, n_v], state [n_v, d, d]
    to (o [T, n_v, d], state after the last row).
    """
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = advance(state, k[t], v[t], g[t], beta[t])
        out[t] = read(state, q[t])
    return out, state


def tiled(x: Tensor, n_v: int) -> Tensor:
    """Key heads [n_k, d] repeated for value heads [n_v, d]: value head h has key head h mod n_k."""
    return x.repeat(n_v // x.shape[0], 1)


def advance(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token into the state [n_v, d, d]: a new tensor. k [n_k, d], v [n_v, d], g, beta [n_v]."""
    key = tiled(k, v.shape[0]).unsqueeze(1)
    decayed = state * torch.exp(g)[:, None, None]
    delta = beta[:, None] * (v - (decayed * key).sum(-1))
    return decayed + delta.unsqueeze(-1) * key


def read(state: Tensor, q: Tensor) -> Tensor:
    """q [n_k, d] to o [n_v, d]."""
    return (state * tiled(q, state.shape[0]).unsqueeze(1)).sum(-1) * q.shape[-1] ** -0.5


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * (x.double().square().sum(-1, keepdim=True) + eps).rsqrt().to(x.dtype)


def convolve(u: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: u [T, C] after tail [kernel - 1, C], weight [C, kernel] to [T,
    C]."""
    joined = torch.cat((tail, u))
    T = u.shape[0]
    total = weight[:, 0] * joined[:T]
    for j in range(1, weight.shape[1]):
        total = total + weight[:, j] * joined[j : j + T]
    return silu(total)


def inputs(
    u: Tensor, alpha: Tensor, beta: Tensor, tail: Tensor, weights: GdnWeights, spec: GdnSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projections of one slot's rows to what the recurrence takes.

    u [T, conv_dim], alpha, beta [T, n_v] to q, k [T, n_k, d], v [T, n_v, d], g, beta [T, n_v].
    """
    T = u.shape[0]
    q, k, v = convolve(u, tail, weights.conv).split((spec.key_dim, spec.key_dim, spec.n_v * spec.d), -1)
    q = l2_normalize(q.reshape(T, spec.n_k, spec.d), spec.eps)
    k = l2_normalize(k.reshape(T, spec.n_k, spec.d), spec.eps)
    x = alpha + weights.dt
    g = torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0)))) * weights.a
    return q, k, v.reshape(T, spec.n_v, spec.d), g.contiguous(), sigmoid(beta.contiguous())


def chunk_inputs(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, before: Tensor, n_rows: Tensor, spec: GdnSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`inputs` of several slots after the rows `before` [B, conv_kernel - 1, conv_dim] (see `tails`).

    q, k [B, W, n_k, d], v [B, W, n_v, d], g, beta [B, W, n_v]; rows past n_rows have g = beta = 0, which leaves a
    state as it is.
    """
    parts = [inputs(u[b], alpha[b], beta[b], before[b], weights, spec) for b in range(u.shape[0])]
    q, k, v, g, gate = (torch.stack(part) for part in zip(*parts))
    valid = (torch.arange(u.shape[1], device=u.device) < n_rows[:, None]).unsqueeze(-1)
    return q, k, v, torch.where(valid, g, 0.0), torch.where(valid, gate, 0.0)


def accept(state: GdnState, slots: Tensor, n: Tensor, n_rows: Tensor) -> None:
    """As `gdn.accept`."""
    n_replay, half = state.shared  # [n_layers, n_slots] each
    has_rows = n_rows > 0
    half[:, slots] = torch.where(has_rows, 1 - half[:, slots], half[:, slots])
    n_replay[:, slots] = torch.where(has_rows, n, n_replay[:, slots])


def replay(state: GdnState, slots: Tensor) -> None:
    """Accepted rows of the windows into the committed states, the last convolution inputs to the other half.
    `counts` stays as it is: see `committed`."""
    for slot in slots.tolist():
        replay_slot(state, slot)


def committed(counts: Tensor, slots: Tensor) -> None:
    """The slots' rows have been replayed: counts [2, n_slots] or more layers' as one, [2, n_layers, n_slots]."""
    n_replay, half = counts
    half[..., slots] = 1 - half[..., slots]
    n_replay[..., slots] = 0


def replay_slot(state: GdnState, slot: int) -> Tensor:
    """`replay` of one slot; gives its convolution inputs [conv_kernel - 1, conv_dim] before the next row."""
    n, half, before = int(state.n_replay[slot]), int(state.half[slot]), state.spec.conv_kernel - 1
    A = state.state[slot]
    window = (state.window_k, state.window_v, state.window_g, state.window_beta)
    for t in range(n):
        A = advance(A, *(part[half, slot, t] for part in window))
    state.state[slot] = A
    tail = state.window_u[half, slot, n : n + before]
    state.window_u[1 - half, slot, :before] = tail
    return tail


def step(
    u: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, state: GdnState, slots: Tensor, n_rows: Tensor,
    spec: GdnSpec,
) -> Tensor:  # fmt: skip
    """Tentative rows of each slot to [B, W, n_v, d], replay first; their inputs are recorded."""
    B, W, _ = u.shape
    out = u.new_zeros(B, W, spec.n_v, spec.d)
    for b in n_rows.nonzero()[:, 0].tolist():
        slot = int(slots[b])
        tail = replay_slot(state, slot)
        q, k, v, g, gate = inputs(u[b], alpha[b], beta[b], tail, weights, spec)
        other, before = 1 - int(state.half[slot]), spec.conv_kernel - 1
        state.window_u[other, slot, before : before + W] = u[b]
        recorded = (state.window_k, k), (state.window_v, v), (state.window_g, g), (state.window_beta, gate)
        for part, rows in recorded:
            part[other, slot, :W] = rows
        out[b], _ = naive(q, k, v, g, gate, state.state[slot])
    return out


def step_prepared(
    u: Tensor, z: Tensor, alpha: Tensor, beta: Tensor, weights: GdnWeights, norm: Tensor, norm_eps: float,
    state: GdnState, slots: Tensor, n_rows: Tensor, spec: GdnSpec,
) -> Activation:  # fmt: skip
    """`step`, then the gated norm of each head, prepared: rows [B * W, n_v * d]."""
    o = step(u, alpha, beta, weights, state, slots, n_rows, spec)
    return gated_norm(o, z.reshape(o.shape), norm, norm_eps)
