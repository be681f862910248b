"""The default chain on the device: penalties, top_k, top_p, min_p, temperature, choice; batched, no host
round trip.

Every parameter is a [R] tensor, so one captured graph serves any mix of requests. Row r's token depends on
row r alone, bit for bit, whatever else is in the batch:

- Candidates are ordered by one integer key (logit, then lower id first), so ties have one order everywhere.
- Probabilities are rounded to multiples of 2**-40 of the largest one and summed as integers: such sums are
  exact, so neither the number of candidates nor the order of a parallel sum matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ggufspec.kernels.draw import Limits, draw
from ggufspec.kernels.select.plain import id_of, packed
from ggufspec.pinned import sent
from ggufspec.sampling.params import SamplingParams
from ggufspec.sampling.uniform import CHOICE, stream_key
from ggufspec.unjoined import Joinable, Unjoined, joined_for, top_k, whole


@dataclass
class RowParams(Limits):
    """Parameters of R rows as device tensors, [R] each. `copy_` refills the buffers a graph was captured with."""

    last_n: Tensor  # int64, 0: no penalties
    repeat: Tensor  # float32
    frequency: Tensor  # float32
    presence: Tensor  # float32

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        device: torch.device | str,
        n_vocab: int,
        seeds: Sequence[int] | None = None,
        stream: int = CHOICE,
    ) -> RowParams:
        """Tensors of `params` (one per row); `seeds` replaces the parameters' own seeds."""
        active = [set(p.active_samplers()) for p in params]
        greedy = [p.greedy for p in params]
        f64, f32 = torch.float64, torch.float32

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return sent(values, device, dtype)

        own = [p.seed for p in params] if seeds is None else list(seeds)
        return cls(
            key=column([stream_key(seed, stream) for seed in own], torch.int64),
            temperature=column(
                [
                    0.0 if g else (p.temperature if "temperature" in a else 1.0)
                    for p, a, g in zip(params, active, greedy)
                ],
                f64,
            ),
            top_k=column([n_candidates(p, n_vocab) for p in params], torch.int64),
            top_p=column([p.top_p if "top_p" in a else 1.0 for p, a in zip(params, active)], f64),
            min_p=column([p.min_p if "min_p" in a else 0.0 for p, a in zip(params, active)], f64),
            min_keep=column([max(1, p.min_keep) for p in params], torch.int64),
            last_n=column([p.repeat_last_n if p.penalizes else 0 for p in params], torch.int64),
            repeat=column([p.repeat_penalty for p in params], f32),
            frequency=column([p.frequency_penalty for p in params], f32),
            presence=column([p.presence_penalty for p in params], f32),
        )

    def copy_(self, other: RowParams) -> None:
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))

    @property
    def n_candidates(self) -> int:
        """Largest top_k (reads the device: not for captured code)."""
        return int(self.top_k.max())


def n_candidates(params: SamplingParams, n_vocab: int) -> int:
    """Tokens that a row's choice is made from."""
    if params.greedy:
        return 1
    return min(params.top_k, n_vocab) if "top_k" in params.active_samplers() else n_vocab


def penalize(logits: Tensor, history: Tensor, params: RowParams) -> Tensor:
    """Repeat, frequency and presence penalties.

    logits [R, V] float32; history [R, N] int64, the tokens before each row's, newest last, -1 where there
    is none. Returns new logits. A token with count c among the last `last_n` gets logit <= 0 ? logit *
    repeat : logit / repeat, then minus c * frequency + presence.
    """
    n = history.shape[1]
    recent = torch.arange(n, 0, -1, device=history.device) <= params.last_n[:, None]
    valid = recent & (history >= 0)
    tokens = torch.where(valid, history, 0)
    same = (tokens[:, :, None] == tokens[:, None, :]) & valid[:, None, :]
    count = same.sum(-1).to(torch.float32)
    old = logits.gather(1, tokens)
    repeat = params.repeat[:, None]
    new = torch.where(old <= 0, old * repeat, old / repeat)
    new = new - (count * params.frequency[:, None] + params.presence[:, None])
    # Entries that are not valid write to a spare column; equal tokens write equal values.
    wide = torch.cat((logits, logits[:, :1]), dim=1)
    wide.scatter_(1, torch.where(valid, history, logits.shape[1]), new)
    return wide[:, :-1]


def top_candidates(logits: Joinable, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, falling; equal logits by rising id.

    logits [R, V] float32 without NaN. Returns (logits [R, k] float32, ids [R, k] int64).
    """
    logits = joined_for(logits, k)
    if isinstance(logits, Unjoined) or logits.is_cuda:
        return top_k(logits, k)
    keys = packed(logits, torch.arange(logits.shape[1], device=logits.device))
    chosen = id_of(torch.topk(keys, k, dim=1, sorted=True).values)
    return logits.gather(1, chosen), chosen


@dataclass(frozen=True)
class Choice:
    """Chosen tokens [R] int64 and what they were chosen from: ids [R, K], weights [R, K] int64 (0: filtered
    out).
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor


def sample(
    logits: Joinable, params: RowParams, positions: Tensor, n_candidates: int, history: Tensor | None = None
) -> Choice:
    """One token per row. logits [R, V] float32 (bias and mask already in it), positions [R] int64 (the
    place the token will take), `n_candidates` a Python int >= every row's top_k, history as in `penalize`
    (None: no penalties).

    No host synchronization, no data-dependent shape: fit for CUDA graph capture.
    """
    if history is not None:
        logits = penalize(whole(logits), history, params)
    best, ids = top_candidates(logits, min(n_candidates, logits.shape[1]))
    tokens, weights = draw(best, ids, params, positions)
    return Choice(tokens, ids, weights)
