"""The target's choices for the rows of a step: which sampling path serves the slots, their masks and histories.

Rows of a verification are sampled as if all drafts before them were right: row i is only used when they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .grammar import GrammarState
from .job import TokenOut
from .rows import Rows
from .sampling import RowParams, SamplerState, SamplingParams, bind, sample_rows
from .sampling import device as device_sampling
from .slot import Slot

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


class Chooser:
    """Turns logits into tokens. The simple path never waits for the host; the general one serves everything."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, device: torch.device):
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        self.device = device
        self.is_eog = torch.zeros(n_vocab, dtype=torch.bool, device=device)
        if tokenizer.eog:
            self.is_eog[torch.tensor(sorted(tokenizer.eog), device=device)] = True
        self._bound: tuple[tuple[Any, ...], RowParams, int] | None = None

    def bind(self, params: SamplingParams) -> SamplingParams:
        return bind(params, self.tokenizer)

    def start(self, slot: Slot) -> None:
        """Prepare a slot that begins a job."""
        assert slot.job is not None
        slot.sampler = None
        spec = slot.job.request.grammar
        slot.grammar = None if spec is None else GrammarState.start(spec, self.tokenizer)

    def accept(self, slot: Slot, token: int) -> None:
        """A token was emitted: the grammar moves on."""
        if slot.grammar is not None and token not in self.tokenizer.eog:
            slot.grammar.advance(token)

    def first(self, logits: Tensor, slot: Slot) -> Chosen:
        """The first token after a prompt; logits [1, V]."""
        device = logits.device
        rows = Rows(
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            torch.tensor([slot.id], device=device),
            torch.tensor([slot.n_past - 1], device=device),
            torch.ones(1, dtype=torch.int64, device=device),
            tentative=False,
        )
        choices = self.rows(logits[None], rows, [slot])
        return self.report([slot], choices, choices.tokens.tolist())[0]

    def rows(self, logits: Tensor, rows: Rows, slots: Sequence[Slot]) -> Choices:
        """logits [B, W, V] to tokens [B, W]; row i of a slot chooses for position n_past + i + 1."""
        if all(self._simple(slot) for slot in slots):
            return Choices(self._simple_rows(logits, rows, slots))
        return self._general_rows(logits, rows, slots)

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

    def _simple(self, slot: Slot) -> bool:
        """Nothing but the row's own logits, parameters and position matters."""
        assert slot.job is not None
        p = slot.job.request.sampling
        return p.on_device and not p.penalizes and not p.n_probs and not p.logit_bias and slot.grammar is None

    def _simple_rows(self, logits: Tensor, rows: Rows, slots: Sequence[Slot]) -> Tensor:
        B, W, V = logits.shape
        flat = logits.reshape(B * W, V)
        params = [slot.job.request.sampling for slot in slots if slot.job is not None]
        if all(p.greedy for p in params):
            return flat.argmax(dim=1).view(B, W)
        row_params, n = self._row_params(slots, params, W)
        positions = (rows.positions() + 1).reshape(-1)
        return device_sampling.sample(flat, row_params, positions, n).tokens.view(B, W)

    def _row_params(self, slots: Sequence[Slot], params: list[SamplingParams], W: int) -> tuple[RowParams, int]:
        """Device tensors of the rows' parameters, kept while the same jobs run at the same width."""
        key = (W, *(slot.job.id for slot in slots if slot.job is not None))
        if self._bound is None or self._bound[0] != key:
            repeated = [p for p in params for _ in range(W)]
            made = RowParams.of(repeated, self.device, self.n_vocab)
            self._bound = (key, made, made.n_candidates)
        return self._bound[1], self._bound[2]

    def _general_rows(self, logits: Tensor, rows: Rows, slots: Sequence[Slot]) -> Choices:
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

    def _masks(self, slots: Sequence[Slot], drafted: list[list[int]], n_rows: list[int], W: int) -> Tensor | None:
        """Allowed tokens [B * W, V] bool. The grammar's own state never runs ahead: rows use a copy.

        Past a draft that the grammar forbids nothing is masked: those rows cannot be accepted.
        """
        if all(slot.grammar is None for slot in slots):
            return None
        masks = torch.ones(len(slots), W, self.n_vocab, dtype=torch.bool)
        for b, (slot, draft) in enumerate(zip(slots, drafted)):
            if slot.grammar is None:
                continue
            state = slot.grammar.clone()
            for i in range(n_rows[b]):
                masks[b, i] = state.allowed(self.n_vocab)
                if i < len(draft) and not (masks[b, i, draft[i]] and state.advance(draft[i])):
                    break
        return masks.view(-1, self.n_vocab).to(self.device)
