"""`sample_rows`: one token for each row of logits, by the path each row's parameters need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ggufspec.errors import ConfigError
from ggufspec.sampling import device
from ggufspec.sampling.chain import Row, SamplerState, sample_row
from ggufspec.sampling.params import RANDOM_SEED, BoundParams, SamplingParams
from ggufspec.sampling.uniform import CHOICE_MASKED

Histories = Sequence[Sequence[int]]


class Mask(Protocol):
    """A row's grammar: `grammar.GrammarState` is one. `allowed` is only asked for after a refused choice."""

    def allows(self, token: int) -> bool: ...
    def allowed(self, n_vocab: int) -> Tensor: ...


@dataclass(frozen=True)
class SampledRows:
    """tokens [R] int64 on the logits' device.

    With `n_probs` > 0 in a row's parameters, `logprobs[r]` is a list of (token, log-probability), the
    chosen token first, then the `n_probs` likeliest: of the raw logits, or after the chain where
    `post_sampling_probs` asks so. `states[r]` is what a sequential sampler (mirostat, adaptive_p) carries
    on to the token after row r.
    """

    tokens: Tensor
    logprobs: list[list[tuple[int, float]] | None]
    states: list[SamplerState | None]


def sample_rows(
    logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    positions: Tensor,
    seeds: Sequence[int] | None = None,
    histories: Histories | None = None,
    masks: Tensor | Sequence[Mask | None] | None = None,
    states: Sequence[SamplerState | None] | None = None,
    first_rows: Sequence[bool] | None = None,
) -> SampledRows:
    """Sample R rows; row r's token depends on row r's arguments alone, whatever else is in the batch.

    logits [R, V] float32, any device. `params`: one for all rows, or one a row; dry and infill need
    `bind`ed ones. positions [R] int64: the place in its sequence (0-based, prompt included) that row r's
    token will take. `seeds`: one a row, in place of the parameters' own. `histories[r]`: the tokens before
    that place, oldest first (at least the last `params.history_needed`); for row i of a verification batch
    that is the committed tokens, the last sampled one and the drafts before row i. masks: bool [R, V]
    (True: allowed), packed bits int32 [R, ceil(V / 32)], or one `Mask` (or None) a row.

    A masked row follows llama.cpp: the free choice stands if the mask allows it, else the chain runs again
    on masked logits, with random numbers of its own stream.

    `states[r]` feeds a sequential sampler (None: a fresh one). In a verification batch only the first row
    of a sequence has a committed state: with `first_rows[r]` False, row r goes on from what row r-1's
    choice left, which is right exactly when that choice equals the draft, and a row after a wrong draft is
    not used.
    """
    n_rows, n_vocab = logits.shape
    rows = [params] * n_rows if isinstance(params, SamplingParams) else list(params)
    own = [p.seed for p in rows] if seeds is None else [int(s) for s in seeds]
    _check(rows, own, positions, histories, masks, states, n_rows)
    if n_rows == 0:
        return SampledRows(positions.new_zeros(0), [], [])
    if masks is not None and not isinstance(masks, Tensor):
        masks = _masks_needed(masks, logits, rows, positions, own, histories)
    allowed = None if masks is None else _unpacked(masks, n_vocab)
    biased = _bias(logits, rows)
    tokens = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    logprobs: list[list[tuple[int, float]] | None] = [None] * n_rows
    out_states: list[SamplerState | None] = [None] * n_rows

    fast = [r for r, p in enumerate(rows) if p.on_device]
    if fast:
        _on_device(biased, rows, positions, own, histories, allowed, fast, tokens, logprobs)
    for r, p in enumerate(rows):
        if not p.on_device:
            carried = r > 0 and first_rows is not None and not first_rows[r]
            state = out_states[r - 1] if carried else (states[r] if states is not None else None)
            row = Row(p, _history(histories, r), own[r], int(positions[r]))
            mask = None if allowed is None else allowed[r].cpu().numpy()
            token, after, post = _on_host(biased[r].float().cpu().numpy(), row, mask, state or SamplerState.start(p))
            tokens[r] = token
            out_states[r] = after if p.is_sequential else None
            if p.n_probs and p.post_sampling_probs:
                logprobs[r] = post
    _raw_logprobs(logits, rows, tokens, logprobs)
    return SampledRows(tokens, logprobs, out_states)


def _check(rows, seeds, positions, histories, masks, states, n_rows) -> None:  # type: ignore[no-untyped-def]
    for name, given in (
        ("params", rows),
        ("seeds", seeds),
        ("positions", positions),
        ("histories", histories),
    ):
        if given is not None and len(given) != n_rows:
            raise ConfigError(f"sample_rows: {len(given)} {name} for {n_rows} rows of logits")
    for name, given in (("masks", masks), ("states", states)):
        if given is not None and len(given) != n_rows:
            raise ConfigError(f"sample_rows: {len(given)} {name} for {n_rows} rows of logits")
    for p, seed in zip(rows, seeds):
        if not p.greedy and seed & RANDOM_SEED == RANDOM_SEED:
            raise ConfigError("sample_rows: the seed is not drawn yet; use params.with_seed() or sampling.bind")
        if p.ignore_eos and not isinstance(p, BoundParams):
            raise ConfigError("ignore_eos needs a vocabulary: call sampling.bind(params, tokenizer) first")
        if p.history_needed and histories is None:
            raise ConfigError("sample_rows: penalties and dry need the histories")


def _history(histories: Histories | None, r: int) -> Sequence[int]:
    return histories[r] if histories is not None else ()


def _masks_needed(
    masks: Sequence[Mask | None],
    logits: Tensor,
    rows: list[SamplingParams],
    positions: Tensor,
    seeds: list[int],
    histories: Histories | None,
) -> Tensor | None:
    """The masks as bool [R, V], all True for rows whose free choice is allowed anyway; None if that is every row.

    Checking one token is far cheaper than a whole mask, and most choices pass.
    """
    checked = [r for r, mask in enumerate(masks) if mask is not None]
    if not checked:
        return None
    # A sequential sampler's free choice depends on its state: those rows always get their mask.
    free_rows = [r for r in checked if not rows[r].is_sequential]
    refused = [r for r in checked if rows[r].is_sequential]
    if free_rows:
        where = torch.tensor(free_rows)
        free = sample_rows(
            logits[where.to(logits.device)],
            [replace(rows[r], n_probs=0) for r in free_rows],
            positions[where.to(positions.device)],
            [seeds[r] for r in free_rows],
            None if histories is None else [histories[r] for r in free_rows],
        ).tokens.tolist()
        refused += [r for r, token in zip(free_rows, free) if not _mask(masks, r).allows(token)]
    if not refused:
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for r in refused:
        allowed[r] = _mask(masks, r).allowed(logits.shape[1])
    return allowed.to(logits.device)


def _mask(masks: Sequence[Mask | None], r: int) -> Mask:
    mask = masks[r]
    assert mask is not None
    return mask


def _unpacked(masks: Tensor, n_vocab: int) -> Tensor:
    """bool [R, n_vocab] of a mask given as bool or as bits of int32 words, lowest bit first."""
    if masks.dtype == torch.bool:
        return masks
    bits = torch.arange(32, device=masks.device, dtype=torch.int32)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :n_vocab]


def _bias(logits: Tensor, rows: Sequence[SamplingParams]) -> Tensor:
    entries = [(r, token, value) for r, p in enumerate(rows) for token, value in p.logit_bias]
    if not entries:
        return logits
    at_row, at_token, value = zip(*entries)
    place = (
        torch.tensor(at_row, device=logits.device),
        torch.tensor(at_token, device=logits.device),
    )
    values = torch.tensor(value, dtype=logits.dtype, device=logits.device)
    return logits.clone().index_put_(place, values, accumulate=True)


def _on_device(
    logits: Tensor,
    rows: list[SamplingParams],
    positions: Tensor,
    seeds: list[int],
    histories: Histories | None,
    allowed: Tensor | None,
    fast: list[int],
    tokens: Tensor,
    logprobs: list[list[tuple[int, float]] | None],
) -> None:
    """Fill `tokens` and `logprobs` for the rows listed in `fast`."""
    where = torch.tensor(fast, device=logits.device)
    mine = [rows[r] for r in fast]
    everything = len(fast) == len(rows)
    chosen = logits if everything else logits[where]
    n_vocab = logits.shape[1]
    mask = None if allowed is None else (allowed if everything else allowed[where])
    if all(p.greedy and not p.penalizes and not p.post_sampling_probs for p in mine):
        tokens[where] = (chosen if mask is None else chosen.masked_fill(~mask, -torch.inf)).argmax(1)
        return
    place = positions[where].to(logits.device)
    history = _history_tensor(mine, histories, fast, logits.device)
    n = max(1 if p.greedy else (p.top_k if "top_k" in p.active_samplers() else n_vocab) for p in mine)
    parameters = device.RowParams.of(mine, logits.device, n_vocab, [seeds[r] for r in fast])
    choice = device.sample(chosen, parameters, place, n, history)
    if mask is not None:
        second = device.RowParams.of(mine, logits.device, n_vocab, [seeds[r] for r in fast], CHOICE_MASKED)
        again = device.sample(chosen.masked_fill(~mask, -torch.inf), second, place, n, history)
        good = mask.gather(1, choice.tokens[:, None])
        choice = device.Choice(
            torch.where(good[:, 0], choice.tokens, again.tokens),
            torch.where(good, choice.ids, again.ids),
            torch.where(good, choice.weights, again.weights),
        )
    tokens[where] = choice.tokens
    for i, r in enumerate(fast):
        if rows[r].n_probs and rows[r].post_sampling_probs:
            w = choice.weights[i].cpu().numpy()
            logprobs[r] = _top(int(choice.tokens[i]), choice.ids[i].cpu().numpy(), w / w.sum(), rows[r].n_probs)


def _history_tensor(
    rows: list[SamplingParams], histories: Histories | None, fast: list[int], where: torch.device
) -> Tensor | None:
    """The last tokens of each row, int64 [R, N], -1 on the left where there are fewer; None without
    penalties.
    """
    n = max(p.history_needed for p in rows)
    if n == 0 or histories is None:
        return None
    table = np.full((len(rows), n), -1, dtype=np.int64)
    for i, r in enumerate(fast):
        recent = np.asarray(histories[r][-n:], dtype=np.int64)
        if len(recent):
            table[i, n - len(recent) :] = recent
    return torch.from_numpy(table).to(where)


def _on_host(
    logits: np.ndarray, row: Row, mask: np.ndarray | None, state: SamplerState
) -> tuple[int, SamplerState, list[tuple[int, float]]]:
    chosen = sample_row(logits, row, state)
    if mask is not None and not mask[chosen.token]:
        chosen = sample_row(np.where(mask, logits, -np.inf), replace(row, second_pass=True), state)
    return chosen.token, chosen.state, _top(chosen.token, chosen.ids, chosen.p, row.params.n_probs)


def _top(token: int, ids: np.ndarray, p: np.ndarray, n: int) -> list[tuple[int, float]]:
    """(token, log p) of the chosen token, then of the n likeliest that have any probability."""
    with np.errstate(divide="ignore"):
        log_p = np.log(p)
    order = np.lexsort((ids, -p))[:n]
    first = [(token, float(log_p[ids == token][0]))]
    return first + [(int(ids[i]), float(log_p[i])) for i in order if p[i] > 0]


def _raw_logprobs(
    logits: Tensor, rows: list[SamplingParams], tokens: Tensor, logprobs: list[list[tuple[int, float]] | None]
) -> None:
    """Log-probabilities before any sampler, for the rows that ask for them."""
    wanted = [r for r, p in enumerate(rows) if p.n_probs and not p.post_sampling_probs]
    if not wanted:
        return
    n = min(max(rows[r].n_probs for r in wanted), logits.shape[1])
    where = torch.tensor(wanted, device=logits.device)
    raw = logits[where]
    normal = torch.logsumexp(raw.double(), 1)
    best, ids = device.top_candidates(raw, n)
    of_token = raw.gather(1, tokens[where][:, None])[:, 0].double() - normal
    top = (best.double() - normal[:, None]).tolist()
    for r, own, row_ids, row_top in zip(wanted, of_token.tolist(), ids.tolist(), top):
        likeliest = list(zip(row_ids, row_top))[: rows[r].n_probs]
        logprobs[r] = [(int(tokens[r]), own), *likeliest]
