"""The target alone, without sampling: prompt chunks and decode steps of random tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ggufspec.cache import Cache
from ggufspec.capture import Graphs
from ggufspec.models import Model
from ggufspec.prefill import Prefill
from ggufspec.rows import Rows
from ggufspec.unjoined import whole


class Stepper:
    """Slots of a model and their fill. Short prompt chunks and steps that all slots take are captured on a GPU."""

    def __init__(self, model: Model, n_slots: int, n_ctx: int, type_k: str, type_v: str, n_ubatch: int, n_batch: int,
                 use_graphs: bool = True):  # fmt: skip
        self.model = model
        self.device = model.device
        self.cache: Cache = model.new_cache(n_slots, n_ctx, type_k, type_v)
        self.n_past = [0] * n_slots
        self.n_batch = n_batch
        self.n_ubatch = min(n_ubatch, n_batch)
        one_device = self.device.type == "cuda" and all(layer.device == self.device for layer in model.layers)
        self.graphs = Graphs(self.device, self.cache.mutable) if use_graphs and one_device else None
        self.prefill = Prefill(model, None, self.cache, self.graphs)

    def clear(self, slot: int) -> None:
        self.cache.reset(slot)
        self.n_past[slot] = 0

    @torch.inference_mode()
    def prompt(self, tokens: Tensor, slot: int = 0) -> None:
        """Evaluate [n] tokens in batches of n_batch, in chunks of n_ubatch; a batch's last token has logits."""
        for start in range(0, len(tokens), self.n_batch):
            batch = tokens[start : start + self.n_batch]
            for at in range(0, len(batch), self.n_ubatch):
                chunk = batch[at : at + self.n_ubatch].tolist()
                self.prefill.run(chunk, slot, self.n_past[slot], is_last=at + len(chunk) == len(batch))
                self.n_past[slot] += len(chunk)

    @torch.inference_mode()
    def step(self, tokens: Tensor, slots: Sequence[int]) -> Tensor:
        """One token [B] for each of the slots, all of them together, waited for; their logits [B, 1, V]."""
        past = torch.tensor([self.n_past[s] for s in slots])
        host = torch.stack([tokens, torch.tensor(list(slots)), past])
        if self.device.type == "cuda":
            host = host.pin_memory().to(self.device, non_blocking=True)

        def stage(tokens: Tensor, slots: Tensor, n_past: Tensor) -> Any:
            one = torch.ones_like(slots)
            output = self.model.forward(Rows(tokens[:, None], slots, n_past, one, True), self.cache, logits="all")
            self.cache.accept(slots, one)
            assert output.logits is not None
            return whole(output.logits)

        arguments = (host[0], host[1], host[2])
        logits: Tensor = stage(*arguments) if self.graphs is None else self.graphs.run("step", stage, arguments)
        self.wait()
        for slot in slots:
            self.n_past[slot] += 1
        return logits

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- depth: a filled cache to return to --------------------------------------------------------------------

    def save(self, slot: int) -> tuple[int, list[Tensor]]:
        """Where the slot stands; attention cells below stay where they are."""
        return self.n_past[slot], self.cache.save_recurrent(slot)

    def restore(self, slot: int, saved: tuple[int, list[Tensor]]) -> None:
        self.cache.restore_recurrent(slot, saved[1])
        self.n_past[slot] = saved[0]


def now_ns() -> int:
    return time.perf_counter_ns()


def random_tokens(n: int, n_vocab: int, generator: torch.Generator, first: int | None = None) -> Tensor:
    """[n] int64; the first one is `first` (BOS) if given."""
    tokens = torch.randint(0, n_vocab, (n,), generator=generator)
    if first is not None and n > 0:
        tokens[0] = first
    return tokens
