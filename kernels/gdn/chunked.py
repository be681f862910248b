"""The gated delta rule in chunks of 64 tokens: products of matrices instead of a loop over tokens.

With G the running sum of g inside a chunk, A the state before it, and rows t, s of the chunk:

    delta_t = beta_t (v_t - e^{G_t} A k_t - sum_{s<t} e^{G_t - G_s} (k_t.k_s) delta_s)

is a unit lower triangular system, whose solution is linear in A: delta = U - Y A^T. Then

    o_t = (e^{G_t} A q_t + sum_{s<=t} e^{G_t - G_s} (q_t.k_s) delta_s) / sqrt(d)
    A'  = e^{G_last} A + sum_s delta_s (e^{G_last - G_s} k_s)^T

Everything but the walk of A over chunks is independent of A and done for all chunks at once. This is the CPU's path and
the twin of the kernels in `scan`.
"""

import torch
from torch import Tensor

CHUNK = 64


def padded(x: Tensor, T: int) -> Tensor:
    """[B, T0, ..] to [B, T, ..] with zero rows: a row with beta 0 and g 0 leaves the state as it is."""
    pad = [0, 0] * (x.ndim - 2) + [0, T - x.shape[1]]
    return torch.nn.functional.pad(x, pad) if T != x.shape[1] else x


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, T, n_k, d] normalized, v [B, T, n_v, d], g, beta [B, T, n_v], state [B, n_v, d, d]
    to (o [B, T, n_v, d], state after the last row). Rows to be skipped have g = beta = 0.
    """
    B, T, n_v, d = v.shape
    n = -(-T // CHUNK)

    def heads(x: Tensor) -> Tensor:
        """[B, T, n_v, ..] to [B, n_v, n, CHUNK, ..]."""
        x = padded(x, n * CHUNK)
        return x.view(B, n, CHUNK, *x.shape[2:]).movedim(3, 1).contiguous()

    repeat = (1, 1, n_v // k.shape[2], 1)
    q, k = heads(q.repeat(repeat)) * d**-0.5, heads(k.repeat(repeat))
    v, beta, G = heads(v), heads(beta).unsqueeze(-1), heads(g).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = torch.exp((G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~lower, -torch.inf))
    grown, rest = torch.exp(G).unsqueeze(-1), torch.exp(G[..., -1:] - G).unsqueeze(-1)
    kT = k.transpose(-1, -2)
    system = (beta * (k @ kT) * decay).tril(-1)
    U, Y = solve(system, torch.cat((beta * v, beta * grown * k), -1)).split((d, d), -1)
    pieces = U, Y, (q @ kT) * decay, q * grown, k * rest, grown[..., -1, 0], state
    out, state = scan(*pieces)
    return out.flatten(2, 3)[:, :, :T].transpose(1, 2).contiguous(), state


def solve(system: Tensor, right: Tensor) -> Tensor:
    """(I + system)^-1 right for strictly lower triangular systems [.., CHUNK, CHUNK]."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def scan(
    U: Tensor, Y: Tensor, mixed: Tensor, q: Tensor, k: Tensor, last: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The walk of the state over chunks: all [B, n_v, n, CHUNK, ..], last [B, n_v, n], state [B, n_v, d, d]."""
    outs = []
    for i in range(U.shape[2]):
        before = state.transpose(-1, -2)
        delta = U[:, :, i] - Y[:, :, i] @ before
        outs.append(q[:, :, i] @ before + mixed[:, :, i] @ delta)
        state = last[:, :, i, None, None] * state + delta.transpose(-1, -2) @ k[:, :, i]
    return torch.stack(outs, 2), state
