"""The target's choices for the rows of a step: which sampling path serves the slots, their masks and histories.

Rows of a verification are sampled as if all drafts before them were right: row i is only used when they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import RequestError
from .grammar import GrammarState
from .job import TokenOut
from .pinned import sent
from .rows import Rows
from .sampling import RowParams, SamplerState, SamplingParams, bind, sample_rows
from .sampling import device as device_sampling
from .sampling.device import n_candidates
from .slot import Slot
from .unjoined import Joinable, argmax, biased, each, whole

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass
class Chosen:
    """Host results for one slot: tokens in order, each with what the client asked to know of it."""

    tokens: list[int]
    reported: list[TokenOut]


@dataclass
class Choices:
    """What `Chooser.rows` found: tokens on the device, and host data of rows that need it."""

    tokens: Tensor  # [B, W] int64
    logprobs: list[list[tuple[int, float]] | None] | None = None  # row-major, when anyone asked
    states: list[SamplerState | None] | None = None


MAX_BIASES = 1024  # logit biases of a request that the simple path takes
PADDING = SamplingParams(temperature=0.0)  # of entries whose choices nobody reads


Sampled = tuple[int, int]  # the shape of a plan, see there


@dataclass(frozen=True)
class Plan:
    """Sampling that needs nothing but logits, positions and these tensors.

    params None: every row takes the maximum. bias: token ids and what is added to their logits, [R, K] each, or None.
    """

    params: RowParams | None
    n_candidates: int
    bias: tuple[Tensor, Tensor] | None = None
    serial: int = field(default_factory=count().__next__)  # another plan, another number

    @property
    def n_biases(self) -> int:
        """Biased tokens a row, padding included."""
        return 0 if self.bias is None else self.bias[0].shape[1]

    @property
    def shape(self) -> Sampled:
        """(candidates to sample from, 0 where every row takes the maximum; biased tokens a row)"""
        return 0 if self.params is None else self.n_candidates, self.n_biases

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = () if self.params is None else tuple(getattr(self.params, f.name) for f in fields(self.params))
        return (*own, *(self.bias or ()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Plan:
        """The same plan reading its parameters from other tensors (a graph's input buffers)."""
        own, bias = (tensors[:-2], (tensors[-2], tensors[-1])) if self.bias is not None else (tensors, None)
        return Plan(None if self.params is None else RowParams(*own), self.n_candidates, bias)


def is_simple(params: SamplingParams) -> bool:
    """Whether the simple path serves a request that samples like this."""
    p = params
    return p.on_device and not p.penalizes and not p.n_probs and len(p.logit_bias) <= MAX_BIASES


class Chooser:
    """Turns logits into tokens. The simple path never waits for the host; the general one serves everything."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, device: torch.device):
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        self.device = device
        self.is_eog = torch.zeros(n_vocab, dtype=torch.bool, device=device)
        if tokenizer.eog:
            self.is_eog[torch.tensor(sorted(tokenizer.eog), device=device)] = True
        # jobs, the shape of their plans, and these by width, padding and what they are to cover
        self._plans: tuple[list[int], Sampled | None, dict[tuple[int, int, Sampled], Plan | None]] = [], (0, 0), {}

    def bind(self, params: SamplingParams) -> SamplingParams:
        return bind(params, self.tokenizer)

    def start(self, slot: Slot) -> None:
        """Prepare a slot that begins a job."""
        assert slot.job is not None
        slot.sampler = None
        spec = slot.job.request.grammar
        slot.grammar = None if spec is None else GrammarState.start(spec, self.tokenizer)

    def accept(self, slot: Slot, token: int) -> RequestError | None:
        """A token is about to be emitted: the grammar moves on. The reason when it cannot."""
        grammar = slot.grammar
        if grammar is None:
            return None
        if grammar.error is None and token not in self.tokenizer.eog and not grammar.advance(token):
            return RequestError("grammar: no token of the vocabulary fits what it expects next")
        return grammar.error

    def first(self, logits: Joinable, slot: Slot) -> Chosen:
        """The first token after a prompt; logits [1, 1, V]."""
        # Pairs, as what a kernel reads by itself begins at a whole multiple of 16 bytes.
        table = sent([[slot.id, 0], [slot.n_past - 1, 0], [1, 0], [0, 0]], self.device)
        ids, n_past, n_rows, tokens = (pair[:1] for pair in table)
        rows = Rows(tokens[None], ids, n_past, n_rows, tentative=False)
        choices = self.rows(logits, rows, [slot])
        return self.report([slot], choices, choices.tokens.tolist())[0]

    def rows(self, logits: Joinable, rows: Rows, slots: Sequence[Slot]) -> Choices:
        """logits [B, W, V] to tokens [B, W]; row i of a slot chooses for position n_past + i + 1."""
        plan = self.plan(slots, rows.width)
        if plan is None:
            return self.general(logits, rows, slots)
        return Choices(self.simple(logits, rows, plan))

    def report(self, slots: Sequence[Slot], choices: Choices, emitted: Sequence[Sequence[int]]) -> list[Chosen]:
        """Host results: emitted[b] are the tokens of slot b that stand (the first of its row's choices)."""
        W = choices.tokens.shape[1]
        out = []
        for b, (slot, tokens) in enumerate(zip(slots, emitted)):
            reported = []
            for i, token in enumerate(tokens):
                piece = self.tokenizer.piece(token)
                logprobs = choices.logprobs[b * W + i] if choices.logprobs is not None else None
                if logprobs:
                    reported.append(TokenOut(token, piece, logprobs[0][1], logprobs[1:]))
                else:
                    reported.append(TokenOut(token, piece))
            if choices.states is not None:
                slot.sampler = choices.states[b * W + len(tokens) - 1]
            out.append(Chosen(list(tokens), reported))
        return out

    # -- paths -------------------------------------------------------------------------------------------------

    def plan(self, slots: Sequence[Slot], W: int, n_padding: int = 0, least: Sampled = (0, 0)) -> Plan | None:
        """How these slots' rows can be sampled without the host, or None. Kept while the same jobs run.

        n_padding: entries after the slots', of which any choice will do. least: a `Plan.shape` that the plan's is to
        cover; more candidates, and biases of nothing, change no choice.
        """
        shape = self.sampled(slots)
        if shape is None:
            return None
        plans, key = self._plans[2], (W, n_padding, least)
        if key not in plans:
            params = [slot.job.request.sampling for slot in slots if slot.job is not None] + [PADDING] * n_padding
            plans[key] = self._make_plan(params, W, (max(shape[0], least[0]), max(shape[1], least[1])))
        return plans[key]

    def sampled(self, slots: Sequence[Slot]) -> Sampled | None:
        """`Plan.shape` of what `plan` returns for these slots."""
        jobs = [slot.job for slot in slots if slot.job is not None]
        ids = [job.id for job in jobs]
        if self._plans[0] != ids:
            has_grammar = any(slot.grammar is not None for slot in slots)
            self._plans = ids, None if has_grammar else self._shape([job.request.sampling for job in jobs]), {}
        return self._plans[1]

    def _shape(self, params: Sequence[SamplingParams]) -> Sampled | None:
        if not all(map(is_simple, params)):
            return None
        longest = max(len(p.logit_bias) for p in params)
        is_greedy = all(p.greedy for p in params)
        # biases: a power of two, so that few numbers occur
        return (
            0 if is_greedy else max(n_candidates(p, self.n_vocab) for p in params),
            1 << (longest - 1).bit_length() if longest else 0,
        )

    def _make_plan(self, params: Sequence[SamplingParams], W: int, shape: Sampled) -> Plan:
        bias = self._biases([p.logit_bias for p in params], W, shape[1])
        if shape[0] == 0:
            return Plan(None, 1, bias)
        return Plan(RowParams.of([p for p in params for _ in range(W)], self.device, self.n_vocab), shape[0], bias)

    def blank(self, n_rows: int, shape: Sampled) -> Plan:
        """A plan of this shape (see `Plan.shape`), of rows whose choices nobody reads."""
        return self._make_plan([PADDING] * n_rows, 1, shape)

    def shape_of(self, params: SamplingParams) -> Sampled | None:
        """`Plan.shape` of a request that asks for this sampling; None when the host takes part."""
        return self._shape([self.bind(params)])

    def _biases(self, biases: Sequence[tuple[tuple[int, float], ...]], W: int, K: int
                ) -> tuple[Tensor, Tensor] | None:
        """Token ids and biases [R, K] of all rows."""
        if K == 0:
            return None
        rows = [list(entries) + [(0, 0.0)] * (K - len(entries)) for entries in biases for _ in range(W)]
        ids = sent([[token for token, _ in row] for row in rows], self.device)
        return ids, sent([[value for _, value in row] for row in rows], self.device)

    def simple(self, logits: Joinable, rows: Rows, plan: Plan) -> Tensor:
        """logits [B, W, V] to tokens [B, W], on the device throughout."""
        B, W, _ = logits.shape
        flat = each(logits, lambda part: part.flatten(0, 1))
        if plan.bias is not None:
            flat = biased(flat, *plan.bias)
        if plan.params is None:
            return argmax(flat).view(B, W)
        positions = (rows.positions() + 1).reshape(-1)
        return device_sampling.sample(flat, plan.params, positions, plan.n_candidates).tokens.view(B, W)

    def general(self, logits: Joinable, rows: Rows, slots: Sequence[Slot]) -> Choices:
        logits = whole(logits)
        B, W, V = logits.shape
        drafted = rows.tokens[:, 1:].tolist()
        n_rows = rows.n_rows.tolist()
        params: list[SamplingParams] = []
        histories: list[Sequence[int]] = []
        states: list[SamplerState | None] = []
        for slot, draft in zip(slots, drafted):
            assert slot.job is not None
            p = slot.job.request.sampling
            past = slot.history(p.history_needed)
            for i in range(W):
                params.append(p)
                histories.append([*past, *draft[:i]][-p.history_needed :] if p.history_needed else ())
                states.append(slot.sampler if i == 0 else None)
        sampled = sample_rows(
            logits.reshape(B * W, V),
            params,
            (rows.positions() + 1).reshape(-1),
            histories=histories,
            masks=self._masks(slots, drafted, n_rows, W),
            states=states,
            first_rows=[i == 0 for _ in range(B) for i in range(W)],
        )
        return Choices(sampled.tokens.view(B, W), sampled.logprobs, sampled.states)

    def _masks(self, slots: Sequence[Slot], drafted: list[list[int]], n_rows: list[int], W: int
               ) -> list[GrammarState | None] | None:
        """The grammar of each row, row-major; None where nothing is masked. A slot's own state never runs ahead.

        Past a draft that the grammar forbids nothing is masked: those rows cannot be accepted.
        """
        if all(slot.grammar is None for slot in slots):
            return None
        masks: list[GrammarState | None] = []
        for slot, draft, n in zip(slots, drafted, n_rows):
            rows = slot.grammar.rows(draft, n) if slot.grammar is not None else []
            masks += rows + [None] * (W - len(rows))
        return masks
