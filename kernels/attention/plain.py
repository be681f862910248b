"""Attention over the packed cache in PyTorch: the CPU path and the oracle of the Triton kernels.

Keys are walked in chunks of 256 cells. Narrow batches go row by row: every product has the
shape [chunks * n_kv, group, ..], and the number of chunks follows from the row's own position, so a row's
bits do not depend on the rows beside it. Prompt chunks take all rows of a chunk at once.
"""

import torch
from torch import Tensor

from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.kv.hadamard import rotate
from ggufspec.kernels.kv.plain import cell_positions, decode_cells
from ggufspec.kernels.kv.storage import CELL_CHUNK, KV
from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.matmul.plain import prepare
from ggufspec.kernels.norm.plain import sigmoid_gate

NARROW_ROWS = 64  # up to this width rows are processed one by one


def attend(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec,
    gate: Tensor | None = None, q_rotated: bool = False,
) -> Tensor:  # fmt: skip
    B, width, H, _ = q.shape
    q = q.float() if q_rotated else rotate(q.float(), kv.rotation_k)
    n_stored = n_past + n_rows
    cells = cell_positions(kv, n_stored)  # [B, n_cells]
    out = q.new_zeros(B, width, H, kv.hd_v)
    for b in range(B):
        first, stored, W = int(n_past[b]), int(n_stored[b]), int(n_rows[b])
        if stored <= 0:
            continue
        used = min(stored, kv.n_cells)
        n_chunks = -(-used // CELL_CHUNK)
        keys, values = chunked(kv, int(slots[b]), n_chunks)
        seen = visible(cells[b, : n_chunks * CELL_CHUNK], first + torch.arange(W), spec)
        if W <= NARROW_ROWS:
            for w in range(W):
                last = min(first + w + 1, used) if spec.causal else used
                n = -(-last // CELL_CHUNK)
                out[b, w] = attend_row(q[b, w], keys[:n], values[:n], seen[w, : n * CELL_CHUNK], spec)
        else:
            out[b, :W] = attend_block(q[b, :W], keys, values, seen, spec)
    out = rotate(out, kv.rotation_v)
    return out if gate is None else sigmoid_gate(out, gate)


def attend_prepared(
    q: Tensor, kv: KV, slots: Tensor, n_past: Tensor, n_rows: Tensor, spec: AttentionSpec,
    gate: Tensor | None = None, q_rotated: bool = False,
) -> Activation:  # fmt: skip
    return prepare(attend(q, kv, slots, n_past, n_rows, spec, gate, q_rotated).flatten(2).flatten(0, 1))


def chunked(kv: KV, slot: int, n_chunks: int) -> tuple[Tensor, Tensor]:
    """The first chunks of a slot: keys [n_chunks, n_kv, hd, 256] and values [n_chunks, n_kv, 256, hd_v]."""
    k, v = decode_cells(kv, slot, 0, n_chunks * CELL_CHUNK)
    keys = k.view(n_chunks, CELL_CHUNK, kv.n_kv, kv.hd_k).permute(0, 2, 3, 1).contiguous()
    values = v.view(n_chunks, CELL_CHUNK, kv.n_kv, kv.hd_v).permute(0, 2, 1, 3).contiguous()
    return keys, values


def visible(cells: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Positions of cells [S] (-1: empty) against positions of rows [W]: bool [W, S]."""
    distance = positions[:, None] - cells
    seen = (cells >= 0).expand_as(distance)
    if spec.causal:
        seen = seen & (distance >= 0)
    if spec.window:
        seen = seen & (distance < spec.window)
    return seen


def finite(m: Tensor) -> Tensor:
    """A maximum to subtract: 0 where nothing is visible."""
    return torch.where(m == -torch.inf, torch.zeros_like(m), m)


def partials(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax pieces of chunks: q [N, M, hd], keys [N, hd, 256], values [N, 256, hd_v], seen [N, M, 256] (or
    broadcasting) to the maximum [N, M], the sum of exponentials [N, M] and the weighted values [N, M,
    hd_v]."""
    scores = (torch.bmm(q, keys) * scale).masked_fill(~seen, -torch.inf)
    m = scores.amax(-1)
    p = torch.exp(scores - finite(m).unsqueeze(-1))
    return m, p.sum(-1), torch.bmm(p, values)


def attend_row(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """One row: q [H, hd], keys [n, n_kv, hd, 256], values [n, n_kv, 256, hd_v], seen [n * 256] to [H,
    hd_v]."""
    n, n_kv, hd, chunk = keys.shape
    H, hd_v = q.shape[0], values.shape[-1]
    grouped = q.view(1, n_kv, H // n_kv, hd).expand(n, -1, -1, -1).reshape(n * n_kv, -1, hd)
    mask = seen.view(n, 1, 1, chunk).expand(-1, n_kv, 1, -1).reshape(n * n_kv, 1, chunk)
    m, total, acc = partials(grouped, keys.flatten(0, 1), values.flatten(0, 1), mask, spec.scale)
    m, total, acc = m.view(n, H), total.view(n, H), acc.view(n, H, hd_v)
    top = m.amax(0)
    if spec.sinks is not None:
        top = torch.maximum(top, spec.sinks)
    weight = torch.exp(m - finite(top))
    total = (weight * total).sum(0)
    if spec.sinks is not None:
        total = total + torch.exp(spec.sinks - top)
    return normalized((weight.unsqueeze(-1) * acc).sum(0), total)


def attend_block(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """All rows of a prompt chunk: q [W, H, hd], seen [W, n * 256] to [W, H, hd_v]; chunks combined in
    order."""
    n, n_kv, hd, chunk = keys.shape
    W, H, G = q.shape[0], q.shape[1], q.shape[1] // n_kv
    grouped = q.view(W, n_kv, G, hd).transpose(0, 1).reshape(n_kv, W * G, hd)
    top = q.new_full((n_kv, W * G), -torch.inf)
    total, acc = torch.zeros_like(top), q.new_zeros(n_kv, W * G, values.shape[-1])
    for i in range(n):
        mask = seen[:, i * chunk : (i + 1) * chunk]
        if not bool(mask.any()):
            continue
        m, part, weighted = partials(grouped, keys[i], values[i], mask.repeat_interleave(G, 0), spec.scale)
        higher = torch.maximum(top, m)
        old, new = torch.exp(top - finite(higher)), torch.exp(m - finite(higher))
        top, total = higher, total * old + part * new
        acc = acc * old.unsqueeze(-1) + weighted * new.unsqueeze(-1)
    if spec.sinks is not None:
        sinks = spec.sinks.view(n_kv, 1, G).expand(-1, W, -1).reshape(n_kv, W * G)
        higher = torch.maximum(top, sinks)
        old = torch.exp(top - higher)
        total, acc = total * old + torch.exp(sinks - higher), acc * old.unsqueeze(-1)
    out = normalized(acc, total)
    return out.view(n_kv, W, G, -1).transpose(0, 1).reshape(W, H, -1)


def normalized(acc: Tensor, total: Tensor) -> Tensor:
    """acc / total, 0 where nothing was visible."""
    total = total.unsqueeze(-1)
    return torch.where(total > 0, acc / total, torch.zeros_like(acc))
