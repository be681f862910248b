"""The whole of llama.cpp's sampler chain for one row, on the host: filters the device path does not have.

A filter takes and returns `Candidates`. Formulas are llama.cpp's, computed in float64; they are listed in
docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ggufspec.errors import ConfigError
from ggufspec.kernels.draw.plain import WEIGHT_ONE
from ggufspec.sampling.dry import dry_penalties
from ggufspec.sampling.infill import infill
from ggufspec.sampling.params import BoundParams, SamplingParams
from ggufspec.sampling.uniform import CHOICE, XTC, uniform_scalar


@dataclass(frozen=True)
class Candidates:
    """Candidate tokens: ids [n] int64, logits [n] float64; `sorted`: by falling logit, equal ones by rising
    id.
    """

    ids: np.ndarray
    logits: np.ndarray
    sorted: bool = False

    def by_logit(self) -> Candidates:
        if self.sorted:
            return self
        order = np.lexsort((self.ids, -self.logits))
        return Candidates(self.ids[order], self.logits[order], True)

    def take(self, index: np.ndarray | slice, *, sorted: bool | None = None) -> Candidates:
        return Candidates(self.ids[index], self.logits[index], self.sorted if sorted is None else sorted)

    def probabilities(self) -> np.ndarray:
        """softmax [n]."""
        w = self.weights()
        return w / w.sum()

    def weights(self) -> np.ndarray:
        """floor(2**40 * exp(logit - max)) as int64: sums of these are exact (see sampling.device)."""
        top = self.logits.max()
        if not np.isfinite(top):  # everything is masked: the first candidate is as good as any
            return (np.arange(len(self.ids)) == 0) * np.int64(WEIGHT_ONE)
        return (np.exp(self.logits - top) * WEIGHT_ONE).astype(np.int64)

    def entropy(self) -> float:
        p = self.probabilities()
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())


@dataclass(frozen=True)
class SamplerState:
    """What a sequential sampler carries from token to token: mirostat's mu; adaptive_p's weighted sum and
    weight.
    """

    mu: float = 0.0
    weighted_sum: float = 0.0
    total_weight: float = 0.0

    @classmethod
    def start(cls, params: SamplingParams) -> SamplerState:
        w = 1.0 / (1.0 - params.adaptive_decay) if params.adaptive_decay < 1.0 else 1.0
        return cls(2.0 * params.mirostat_tau, max(params.adaptive_target, 0.0) * w, w)


@dataclass(frozen=True)
class Row:
    """What the filters of one row read besides the candidates."""

    params: SamplingParams
    history: Sequence[int]  # tokens before this one, oldest first
    seed: int
    position: int
    second_pass: bool = False  # after a grammar's rejection

    def uniform(self, stream: int) -> float:
        return uniform_scalar(self.seed, self.position, stream + (2 if self.second_pass else 0))


def penalties(c: Candidates, row: Row) -> Candidates:
    p = row.params
    recent = np.asarray(row.history[-p.repeat_last_n :], dtype=np.int64)
    tokens, counts = np.unique(recent, return_counts=True)
    if not len(tokens):
        return c
    at = np.minimum(np.searchsorted(tokens, c.ids), len(tokens) - 1)
    count = np.where(tokens[at] == c.ids, counts[at], 0)
    # float32, as on the device and in llama.cpp: these are the logits that ties are judged by
    logits = c.logits.astype(np.float32)
    repeat = np.float32(p.repeat_penalty)
    new = np.where(logits <= 0, logits * repeat, logits / repeat)
    new = new - (count.astype(np.float32) * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty))
    return Candidates(c.ids, np.where(count > 0, new, logits).astype(np.float64))


def dry(c: Candidates, row: Row) -> Candidates:
    p = row.params
    if not isinstance(p, BoundParams) or p.breakers is None:
        raise ConfigError("the dry sampler needs a vocabulary: call sampling.bind(params, tokenizer) first")
    found = dry_penalties(
        row.history[-p.dry_penalty_last_n :], p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.breakers
    )
    minus = np.array([found.get(int(token), 0.0) for token in c.ids]) if found else 0.0
    return Candidates(c.ids, c.logits - minus)


def top_n_sigma(c: Candidates, row: Row) -> Candidates:
    finite = c.logits[np.isfinite(c.logits)]
    if len(c.ids) <= 1 or not len(finite):
        return c
    keep = c.logits >= finite.max() - row.params.top_n_sigma * finite.std()
    return Candidates(c.ids, np.where(keep, c.logits, -np.inf)).by_logit()


def top_k(c: Candidates, row: Row) -> Candidates:
    return c.by_logit().take(slice(0, row.params.top_k))


def typical(c: Candidates, row: Row) -> Candidates:
    c = c.by_logit()
    p = c.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    order = np.argsort(np.abs(surprise - c.entropy()), kind="stable")
    running = np.cumsum(p[order])
    enough = (running > row.params.typical_p) & (np.arange(1, len(p) + 1) >= row.params.min_keep)
    n = int(np.argmax(enough)) + 1 if enough.any() else len(p)
    return c.take(order[:n], sorted=False)


def top_p(c: Candidates, row: Row) -> Candidates:
    c = c.by_logit()
    w = c.weights()
    running = np.cumsum(w)
    at_least = max(1, row.params.min_keep)
    enough = (running >= row.params.top_p * w.sum()) & (np.arange(1, len(w) + 1) >= at_least)
    n = int(np.argmax(enough)) + 1 if enough.any() else len(w)
    return c.take(slice(0, n))


def min_p(c: Candidates, row: Row) -> Candidates:
    c = c.by_logit()
    threshold = c.logits[0] + np.log(row.params.min_p)
    return c.take((c.logits >= threshold) | (np.arange(len(c.ids)) < max(1, row.params.min_keep)))


def xtc(c: Candidates, row: Row) -> Candidates:
    p = row.params
    if len(c.ids) < 2 or row.uniform(XTC) > p.xtc_probability:
        return c
    c = c.by_logit()
    above = c.probabilities() >= p.xtc_threshold
    last = int(np.argmin(above)) - 1 if not above.all() else len(above) - 1
    if last > 0 and len(c.ids) - last >= p.min_keep:
        return c.take(slice(last, None))
    return c


def temperature(c: Candidates, row: Row) -> Candidates:
    p = row.params
    if p.dynatemp_range > 0:
        if len(c.ids) <= 1:
            return c
        low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
        c = c.by_logit()
        spread = c.entropy() / np.log(len(c.ids))
        return scale(c, low + (high - low) * spread**p.dynatemp_exponent)
    return scale(c, p.temperature)


def scale(c: Candidates, t: float) -> Candidates:
    """logit / t; t <= 0 leaves only the first of the largest."""
    if t > 0:
        return replace(c, logits=c.logits / t)
    return c.by_logit().take(slice(0, 1))


def infill_filter(c: Candidates, row: Row) -> Candidates:
    p = row.params
    if not isinstance(p, BoundParams) or p.pieces is None:
        raise ConfigError("the infill sampler needs a vocabulary: call sampling.bind(params, tokenizer) first")
    c = c.by_logit()
    keep = infill(c.ids, c.probabilities(), p.pieces)
    if keep is None:
        return Candidates(np.array([p.pieces.eot]), np.array([1.0]), True)
    return c.take(keep)


FILTERS: dict[str, Callable[[Candidates, Row], Candidates]] = {
    "penalties": penalties,
    "dry": dry,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical,
    "top_p": top_p,
    "min_p": min_p,
    "xtc": xtc,
    "temperature": temperature,
    "infill": infill_filter,
}


@dataclass(frozen=True)
class Chosen:
    """The chosen token, the candidates it came from with their probabilities, and the state after it."""

    token: int
    ids: np.ndarray
    p: np.ndarray
    state: SamplerState


def sample_row(logits: np.ndarray, row: Row, state: SamplerState) -> Chosen:
    """One token from logits [V] float32 (bias and mask already in it)."""
    c = Candidates(np.arange(len(logits)), logits.astype(np.float64))
    if row.params.mirostat:
        return _mirostat(scale(c, row.params.temperature), row, state, len(logits))
    active = row.params.active_samplers()
    for name in active:
        if name != "adaptive_p":
            c = FILTERS[name](c, row)
    if "adaptive_p" in active:
        return _adaptive(c, row, state)
    return _draw(c, row, state)


def _draw(c: Candidates, row: Row, state: SamplerState) -> Chosen:
    c = c.by_logit()  # whatever order the filters left: equal sets give equal choices
    w = c.weights()
    running = np.cumsum(w)
    target = min(int(row.uniform(CHOICE) * float(running[-1])), int(running[-1]) - 1)
    at = int(np.searchsorted(running, target, side="right"))
    return Chosen(int(c.ids[at]), c.ids, w / w.sum(), state)


def _mirostat(c: Candidates, row: Row, state: SamplerState, n_vocab: int) -> Chosen:
    p = row.params
    c = c.by_logit()
    prob = c.probabilities()
    if p.mirostat == 1:
        n = min(100, int((prob > 0).sum()))
        s = 1.0
        if n > 1:
            t = np.log((np.arange(n - 1) + 2) / (np.arange(n - 1) + 1))
            b = np.log(prob[: n - 1] / prob[1:n])
            s = float((t * b).sum() / (t * t).sum())
        e = s - 1.0
        with np.errstate(all="ignore"):  # a lone candidate divides by zero, a large tau overflows: as C's floats do
            power = e * np.exp2(np.float64(state.mu)) / (1 - np.float64(n_vocab) ** -e)
            k = np.power(power, np.float64(1.0) / s)
        size = max(int(k), 1) if np.isfinite(k) else (len(c.ids) if k == np.inf else 1)
    else:
        with np.errstate(divide="ignore"):
            over = -np.log2(prob) > state.mu
        size = max(int(np.argmax(over)), 1) if over.any() else len(c.ids)
    chosen = _draw(c.take(slice(0, size)), row, state)
    surprise = -np.log2(chosen.p[chosen.ids == chosen.token][0])
    mu = state.mu - p.mirostat_eta * (surprise - p.mirostat_tau)
    return replace(chosen, state=replace(state, mu=float(mu)))


def _adaptive(c: Candidates, row: Row, state: SamplerState) -> Chosen:
    p = row.params
    original = c.probabilities()
    if p.adaptive_target < 0:
        chosen = _draw(c, row, state)
    else:
        wanted = min(max(2 * p.adaptive_target - state.weighted_sum / state.total_weight, 0.0), 1.0)
        x = np.abs(original - wanted) / 0.3
        chosen = _draw(Candidates(c.ids, np.where(original > 0, 5.0 - 10.0 * x * x / (1.0 + x), -np.inf)), row, state)
    decay = p.adaptive_decay
    after = replace(
        state,
        weighted_sum=float(original[c.ids == chosen.token][0]) + decay * state.weighted_sum,
        total_weight=1.0 + decay * state.total_weight,
    )
    return replace(chosen, state=after)
