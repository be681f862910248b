"""What fits where, from the headers of files alone: bytes per device, the largest context.

Weights are measured by the loaders themselves (see measured), caches by the allocators themselves on PyTorch's `meta`
device; only the working memory of a step is an estimate. Devices are names, so a plan needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .admission import N_ON_DEVICE
from .cache import Cache, KVLayer, RecurrentLayer
from .capture import entry_counts
from .kernels.gdn.chunked import CHUNK
from .kernels.kv import CELL_CHUNK
from .kernels.matmul.cuda import SCRATCH_BYTES
from .kernels.matmul.narrow import slots_bytes
from .kernels.peer.link import WORD_BYTES, memory_words
from .measured import META, Measured, measure
from .prefill import WIDTHS, padded_width
from .question import Question
from .relay import devices_of_step

PARTS = ("weights", "KV", "recurrent", "checkpoints", "draft weights", "draft KV", "workspace", "graphs")
# Estimates: what a step needs beside weights and caches. tests/gpu/plan_memory.py holds their sum to a card.
LOGITS_COPIES = 3  # target's and drafter's logits, and what sampling makes of them
GRAPH_BYTES = 8 << 20  # the driver's own memory for one captured step
MULTIPROCESSORS = 132  # of a large card: what parts of tiles go through grows with them
CONTEXT_BYTES = 512 << 20  # the CUDA context and the kernels' code: not in what the driver calls free


@dataclass
class Plan:
    """Bytes by device and part for one context."""

    n_ctx: int
    parts: dict[torch.device, Counter[str]]
    memory: dict[torch.device, int | None]

    def total(self, device: torch.device) -> int:
        return sum(self.parts[device].values())

    def missing(self, device: torch.device) -> int:
        """Bytes that the device lacks; 0 when all fits."""
        limit = self.memory[device]
        return 0 if limit is None else max(self.total(device) - limit, 0)

    @property
    def fits(self) -> bool:
        return not any(self.missing(device) for device in self.parts)


class Planner:
    """Measures a question once, then answers for any context."""

    def __init__(self, question: Question):
        """`question` has passed `check`."""
        self.question = question
        self.processes = measure(question)
        self._known: dict[tuple[object, int], int] = {}

    def plan(self, n_ctx: int) -> Plan:
        """Bytes for `n_ctx` cells a slot."""
        q = self.question
        found: dict[torch.device, Counter[str]] = {device: Counter() for device in q.devices}

        def add(device: torch.device, part: str, n_bytes: int) -> None:
            found.setdefault(device, Counter())[part] += n_bytes

        for own in self.processes:
            for device, n in own.weights.items():
                add(device, "weights", n)
            for device, n in own.draft_weights.items():
                add(device, "draft weights", n)
            for layer in own.model.cache_layers:
                self._add_layer(layer, n_ctx, add)
            for device, cache_bytes in own.drafters:
                add(device, "draft KV", cache_bytes(n_ctx))
            for device, cache_bytes in own.rings:
                add(device, "checkpoints", min(q.n_checkpoints, N_ON_DEVICE) * cache_bytes(n_ctx))
            for device in {layer.device for layer in own.model.layers} | {own.output}:
                if device.type == "cuda":
                    add(device, "workspace", self._workspace(own, device) + slots_bytes(MULTIPROCESSORS))
            if len(self.processes) > 1 and own.output.type == "cuda":
                add(own.output, "workspace", WORD_BYTES * memory_words(len(self.processes)))  # for the ranks' sums
            for device in {layer.device for layer in own.model.layers}:
                if q.graphs and device.type == "cuda":
                    add(device, "graphs", self._graphs(own, device))
            for device in self._beside(own) if q.graphs else ():
                add(device, "graphs", self._steps(own, device))
        return Plan(n_ctx, found, {device: q.memory_of(device) for device in found})

    def _add_layer(self, layer: object, n_ctx: int, add: Callable[[torch.device, str, int], None]) -> None:
        q = self.question
        if isinstance(layer, KVLayer):
            add(layer.device, "KV", self._cache_bytes(layer, n_ctx))
        elif isinstance(layer, RecurrentLayer):
            add(layer.device, "recurrent", self._cache_bytes(layer, n_ctx))
            add(layer.device, "checkpoints", q.n_slots * min(q.n_checkpoints, N_ON_DEVICE) * state_bytes(layer))

    def layer_bytes(self, layer: KVLayer | RecurrentLayer, n_ctx: int) -> int:
        """All that a layer keeps besides its weights."""
        found: Counter[str] = Counter()
        self._add_layer(layer, n_ctx, lambda device, part, n_bytes: found.update({part: n_bytes}))
        return sum(found.values())

    def _cache_bytes(self, layer: KVLayer | RecurrentLayer, n_ctx: int) -> int:
        """The allocator's own answer, asked once for layers that are alike."""
        q, like = self.question, replace(layer, device=META)
        if (like, n_ctx) not in self._known:
            self._known[like, n_ctx] = Cache.allocate([like], q.n_slots, n_ctx, q.type_k, q.type_v).n_bytes
        return self._known[like, n_ctx]

    def _workspace(self, own: Measured, device: torch.device) -> int:
        """The most that work outside graphs takes at once: a prompt chunk in a layer, or logits; unpacked weights."""
        q = self.question
        is_captured = q.graphs and padded_width(q.n_ubatch) in WIDTHS
        between = self._between(own) if is_captured and len({layer.device for layer in own.model.layers}) > 1 else 0
        rows = between if is_captured else self._chunk(own, q.n_ubatch)
        return self._unpacked() + max(rows, self._logits(own, device))

    def _unpacked(self) -> int:
        """The buffer of unpacked weights, which graphs use too: gate and up together, the largest launch of a layer."""
        config = self.question.config
        rows = 2 * max(config.feed_forward_length)
        return min(SCRATCH_BYTES, 2 * rows // len(self.processes) * config.embedding_length)

    def _chunk(self, own: Measured, T: int) -> int:
        """Intermediate tensors of a prompt chunk of T rows in a layer."""
        config = self.question.config
        D, F = config.embedding_length, max(config.feed_forward_length) // len(self.processes)
        mixers = [prompt_bytes(layer, T) for layer in own.model.cache_layers if isinstance(layer, RecurrentLayer)]
        return max([4 * T * 3 * F, *mixers]) + 4 * T * 6 * D

    def _between(self, own: Measured) -> int:
        """Rows and taps of the chunks that a device has made and not yet given to the next."""
        return 2 * 4 * self.question.n_ubatch * self.question.config.embedding_length * (1 + own.taps)

    def _n_rows(self, own: Measured) -> int:
        """Rows of the widest step: all slots, each with its last token and a full draft."""
        return self.question.n_slots * (1 + (self.question.draft.n_max if own.drafters else 0))

    def _graphs(self, own: Measured, device: torch.device) -> int:
        """Of steps and prompts on a device with layers. They share one pool a device, as large as the largest needs;
        states are set aside while one is captured."""
        q, config = self.question, self.question.config
        states = sum(
            state_bytes(layer) for layer in own.model.cache_layers
            if isinstance(layer, RecurrentLayer) and layer.device == device
        )
        widths = [width for width in WIDTHS if width <= padded_width(q.n_ubatch)]
        chunk, logits = self._chunk(own, widths[-1]), self._logits(own, device)
        results = 4 * sum(widths) * config.embedding_length
        more = max(chunk - logits, 0) + results + len(widths) * GRAPH_BYTES + q.n_slots * states
        return self._steps(own, device) + more

    def _steps(self, own: Measured, device: torch.device) -> int:
        """Graphs of steps on any device: logits, what crosses between devices, the driver's memory."""
        q = self.question
        n_graphs = len(entry_counts(1, q.n_slots)) * (q.n_widths if own.drafters else 1)
        stream = 4 * self._n_rows(own) * q.config.embedding_length * (1 + own.taps)
        crossing = 2 * stream if len(self._of_a_step(own)) > 1 else 0  # what comes and what goes
        return self._logits(own, device) + crossing + n_graphs * GRAPH_BYTES

    def _logits(self, own: Measured, device: torch.device) -> int:
        """Bytes of the logits of a step where the target or a drafter makes them or chooses from them."""
        places = {own.output} if self.question.is_tensor else {own.output, *(place for place, _ in own.drafters)}
        return self._n_rows(own) * self.question.config.n_vocab * 4 * LOGITS_COPIES if device in places else 0

    def _of_a_step(self, own: Measured) -> set[torch.device]:
        """The devices of a process that a step works on. Drafts of a drafter on the CPU, or of another rank, come to it
        ready."""
        drafting = set() if self.question.is_tensor else {device for device, _ in own.drafters}
        return {*devices_of_step(own.model, None), *(device for device in drafting if device.type == "cuda")}

    def _beside(self, own: Measured) -> set[torch.device]:
        """GPUs that have a part in captured steps without a layer of the target. With layers on the CPU there are none:
        stages alone are captured."""
        devices = self._of_a_step(own)
        if any(device.type != "cuda" for device in devices):
            return set()
        return devices - {layer.device for layer in own.model.layers}

    def largest(self, device: torch.device | None = None, most: int | None = None) -> int:
        """The largest context a slot can have so that `device` (None: every device) has room, 0 when none.

        A multiple of 256, at most `most` (None: the training context).
        """
        top = self.question.config.context_length if most is None else most
        low, high = 0, -(-top // CELL_CHUNK)
        while low < high:
            middle = (low + high + 1) // 2
            plan = self.plan(middle * CELL_CHUNK)
            if plan.fits if device is None else not plan.missing(device):
                low = middle
            else:
                high = middle - 1
        return low * CELL_CHUNK


def state_bytes(layer: RecurrentLayer) -> int:
    """Bytes of one slot's committed state in a recurrent layer: what a checkpoint copies."""
    spec = layer.spec
    return 4 * (spec.n_v * spec.d * spec.d + (spec.conv_kernel - 1) * spec.conv_dim)


def prompt_bytes(layer: RecurrentLayer, T: int) -> int:
    """Bytes of T rows' intermediate tensors in a recurrent layer, see `kernels.gdn.scan`."""
    spec = layer.spec
    value = spec.n_v * spec.d
    states = 4 * -(-T // CHUNK) * value * spec.d
    return 4 * T * (2 * spec.conv_dim + 5 * value) + states  # inputs twice; z, U, Y, delta and o
