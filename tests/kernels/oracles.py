"""Slow float64 references for kernel tests, written independently of the twins."""

import math

import torch
from torch import Tensor

from ggufspec.kernels.attention import AttentionSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def attend(q: Tensor, k: Tensor, v: Tensor, n_past: int, spec: AttentionSpec) -> Tensor:
    """One sequence: q [W, H, hd] at positions n_past.., k, v [S, n_kv, ..] of positions 0..S to [W, H, hd_v]."""
    W, H, _ = q.shape
    out = torch.zeros(W, H, v.shape[-1], dtype=torch.float64)
    for w in range(W):
        p = n_past + w
        seen = [s for s in range(k.shape[0])
                if (s <= p or not spec.causal) and (not spec.window or p - s < spec.window)]  # fmt: skip
        if not seen:
            continue
        for h in range(H):
            group = h // (H // k.shape[1])
            scores = (k[seen, group].double() @ q[w, h].double()) * spec.scale
            if spec.sinks is not None:
                scores = torch.cat((scores, spec.sinks[h : h + 1].double().cpu()))
            out[w, h] = scores.softmax(-1)[: len(seen)] @ v[seen, group].double()
    return out


def hadamard(n: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / math.sqrt(n)


def gdn(u: Tensor, alpha: Tensor, beta: Tensor, weights: object, spec: object) -> tuple[Tensor, Tensor]:
    """A whole sequence from an empty state, all in float64: u [T, conv_dim], alpha, beta [T, n_v] to
    (o [T, n_v, d], state [n_v, d, d])."""
    conv, dt, a = weights.conv.double(), weights.dt.double(), weights.a.double()
    u, alpha, beta = u.double(), alpha.double(), beta.double()
    T, d, n_k, n_v = u.shape[0], spec.d, spec.n_k, spec.n_v
    padded = torch.cat((torch.zeros(spec.conv_kernel - 1, u.shape[1], dtype=torch.float64), u))
    out, A = torch.zeros(T, n_v, d, dtype=torch.float64), torch.zeros(n_v, d, d, dtype=torch.float64)
    for t in range(T):
        y = (conv * padded[t : t + spec.conv_kernel].T).sum(-1)
        y = y * torch.sigmoid(y)
        q, k = y[: n_k * d].view(n_k, d), y[n_k * d : 2 * n_k * d].view(n_k, d)
        v = y[2 * n_k * d :].view(n_v, d)
        q = q / (q.pow(2).sum(-1, keepdim=True) + spec.eps).sqrt()
        k = k / (k.pow(2).sum(-1, keepdim=True) + spec.eps).sqrt()
        for h in range(n_v):
            x = alpha[t, h] + dt[h]
            g = (x if x > 20 else torch.log(1 + torch.exp(x))) * a[h]
            key, query = k[h % n_k], q[h % n_k]
            A[h] *= torch.exp(g)
            delta = torch.sigmoid(beta[t, h]) * (v[h] - A[h] @ key)
            A[h] += torch.outer(delta, key)
            out[t, h] = A[h] @ query / math.sqrt(d)
    return out, A
