"""The two drafting heads that choose tokens one after the other, as a fixed number of tensor operations.

Nothing depends on the host: p-min only lowers the count of drafted tokens, so the chains can be captured in a
graph. Rows of a block are given without the anchor row that predicts nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ggufspec.kernels.matmul import PackedWeight, WeightGroup, gather, matmul, prepare
from ggufspec.kernels.norm.plain import sigmoid
from ggufspec.kernels.select.rooms import room


def n_passing(scores: Tensor, p_min: float) -> Tensor:
    """[B, n] to [B] int64: how many leading scores reach p_min; all of them when p_min is 0."""
    if p_min <= 0:
        return torch.full(scores.shape[:1], scores.shape[1], dtype=torch.int64, device=scores.device)
    return (scores >= p_min).long().cumprod(-1).sum(-1)


def markov_chain(
    logits: Tensor,
    last: Tensor,
    embed: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    hidden: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    d2t: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """DSpark's head: logits of row i plus a bias that depends on the token chosen for row i - 1.

    logits [B, n, V]; last [B] int64, the token before row 0; embed: ids [B] to Markov rows [B, r]; project:
    [B, r] to biases [B, Vd]; hidden [B, n, D] and confidence (weight [D + r], bias [1]): the confidence head,
    if any; d2t [Vd] int64: target token of each draft token, for heads with a reduced vocabulary (other
    biases are 0). Returns tokens [B, n] int64 and confidences [B, n], 1 without a confidence head.
    """
    B, n, V = logits.shape
    tokens = torch.empty(B, n, dtype=torch.int64, device=logits.device)
    scores = torch.ones(B, n, dtype=torch.float32, device=logits.device)
    previous = last
    for i in range(n):
        e = embed(previous)
        bias = project(e)
        if hidden is not None and confidence is not None:
            scores[:, i] = confidences(hidden[:, i], e, *confidence)
        if d2t is None:
            previous = room(logits).argmax(logits[:, i], bias)
        else:
            previous = room(logits).argmax(logits[:, i].index_add(-1, d2t, bias))
        tokens[:, i] = previous
    return tokens, scores


def markov_tokens(
    logits: Tensor, last: Tensor, table: PackedWeight, project: WeightGroup
) -> tuple[Tensor, Tensor]:
    """`markov_chain` over quantized weights and the whole vocabulary, the confidence head left to the caller.

    table [V, r]: a token's Markov row; project [V, r]: Markov rows to biases. Returns tokens [B, n] int64 and the
    Markov row [B, n, r] of the token before each row.
    """
    if logits.is_cuda:
        return room(logits).markov_tokens(logits, last, table, project)
    tokens, _ = markov_chain(
        logits, last, lambda ids: gather(table, ids), lambda e: matmul(prepare(e), project)[0]
    )
    before = torch.cat((last[:, None], tokens[:, :-1]), 1)
    return tokens, gather(table, before.reshape(-1)).view(*before.shape, -1)


def confidences(hidden: Tensor, embedded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """DSpark's confidence head: hidden [.., D], Markov rows [.., r], weight [D + r], bias [1] to [..]."""
    D = hidden.shape[-1]
    return sigmoid((hidden * weight[:D]).sum(-1) + (embedded * weight[D:]).sum(-1) + bias)


def selector_walk(
    ids: Tensor, values: Tensor, gate: Tensor, last: Tensor, predecessor: PackedWeight, successor: PackedWeight
) -> tuple[Tensor, Tensor]:
    """DFlash2's head: a greedy walk over the k best candidates of each row.

    score_i(p -> c) = values_i(c) + sum_r predecessor[p, r] gate_i[r] successor[c, r]

    ids, values [B, n, k]: candidates and their logits (scaled and capped); gate [B, n, R]; last [B] int64,
    the token before row 0; predecessor, successor [V, R]: a token's rows. Returns tokens [B, n] int64 and
    the share [B, n] of the winner in the softmax over its row's k scores.
    """
    pred, succ = room(ids).selector_rows(ids, last, predecessor, successor)
    return room(ids).walk(ids, values, gate, pred, succ)
