"""What every target model offers to the engine, and the walk over its layers that all architectures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from ..cache import Cache
from ..handover import Journey, hand_over, on
from ..kernels.fused import enter
from ..kernels.matmul import Activation, PackedWeight, WeightGroup, gather, matmul, prepare
from ..kernels.norm import rms_norm
from ..kernels.rope import RopeSpec, tables
from ..parallel import WHOLE, Shard
from ..rows import Rows
from ..unjoined import Joinable, Unjoined, each
from .config import Config

if TYPE_CHECKING:
    from .layers import Addition

Logits = Literal["all", "last", "none"]


@dataclass
class Output:
    """What a forward returns; row order is that of `Rows`."""

    logits: Joinable | None  # [B, W, V] for "all", [B, 1, V] (last valid row) for "last"
    hidden: Tensor  # [B, W, D] after the final norm, the vectors that the head multiplies
    taps: Tensor | None  # [B, W, m * D], residual streams entering the tapped layers, in the order asked for

    def first(self, n: int) -> Output:
        """Of the first n entries."""
        logits = None if self.logits is None else each(self.logits, lambda part: part[:n])
        return Output(logits, self.hidden[:n], None if self.taps is None else self.taps[:n])


@dataclass(frozen=True)
class Norm:
    """An RMS norm: weight [D]."""

    weight: Tensor
    eps: float


@dataclass
class Step:
    """Things all layers of one forward need, computed once a device."""

    rows: Rows
    positions: Tensor  # [B, W] int64
    store_positions: Tensor  # [B, W] int64, -1 for padding
    _tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows) -> Step:
        return cls(rows, rows.positions(), rows.store_positions())

    def rope(self, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        """cos and sin [B, W, n_rot/2] of these rows' positions, shared by all layers with this spec."""
        if id(spec) not in self._tables:
            self._tables[id(spec)] = tables(self.positions, spec)
        return self._tables[id(spec)]


@dataclass(frozen=True)
class Opening:
    """How a layer begins: a norm of the stream and the weights that multiply it."""

    norm: Norm
    weights: WeightGroup


@dataclass(frozen=True)
class Opened:
    """A layer's opening done: the norm, prepared, and its products."""

    n: Activation
    products: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, opening: Opening) -> Opened:
        """x [B, W, D]"""
        n = enter(x.view(-1, x.shape[-1]), opening.norm.weight, opening.norm.eps)
        return cls(n, matmul(n, opening.weights))


class Layer(Protocol):
    """One block. `device` says where its weights and caches live."""

    device: torch.device

    @property
    def opening(self) -> Opening: ...

    @property
    def additions(self) -> tuple[Addition, Addition]:
        """What adds to the stream: the mixer's last product, then the feed-forward layer's."""
        ...

    def __call__(self, x: Tensor, opened: Opened | None, step: Step, cache: Cache, after: Opening | None
                 ) -> tuple[Tensor, Opened | None]:
        """The stream [B, W, D] entering the layer to the one leaving it.

        opened: the layer's opening of x, where the layer before has done it. With `after`, that of the layer that
        follows is done likewise.
        """
        ...


@dataclass
class Head:
    """The output matrix, wherever its rows lie: hidden rows in, logits out, those of a part if ranks have the others.
    Drafters borrow it."""

    group: WeightGroup  # one weight, the rows held here
    shard: Shard = WHOLE
    bounds: Sequence[tuple[int, int]] | None = None  # each rank's rows; None: all rows are here

    @property
    def device(self) -> torch.device:
        return self.group.weights[0].device

    @property
    def n_rows(self) -> int:
        return self.bounds[-1][1] if self.bounds is not None else self.group.n_rows[0]

    @property
    def columns(self) -> tuple[int, int]:
        """Of all logits those that the rows held here give."""
        return (0, self.n_rows) if self.bounds is None else self.bounds[self.shard.rank]

    def __call__(self, hidden: Tensor) -> Joinable:
        """[.., D], moved to the head's device if need be, to [.., n_rows] float32 there."""
        (flat,) = hand_over([hidden.reshape(-1, hidden.shape[-1])], self.device)
        with on(self.device):
            (out,) = matmul(prepare(flat), self.group)
        return self.logits(out, hidden.shape[:-1])

    def logits(self, product: Tensor, shape: Sequence[int]) -> Joinable:
        """What `group` made of hidden rows, as logits of rows of this shape."""
        out = product.view(*shape, product.shape[-1])
        return out if self.bounds is None or self.shard.group is None else Unjoined(out, self.shard, self.bounds)

    def elsewhere(self, hidden: Tensor) -> Joinable:
        """A call for rows of another device, with the logits back there."""
        (there,) = hand_over([hidden], self.device)
        with on(self.device):
            return each(self(there), lambda part: hand_over([part], hidden.device)[0])


@dataclass(frozen=True)
class Stage:
    """A range of layers on one device."""

    start: int
    stop: int
    device: torch.device


class RunStage(Protocol):
    """`Model.run_stage`, or something that does the same."""

    def __call__(self, stage: Stage, rows: Rows, x: Tensor, cache: Cache, taps: Sequence[int]
                 ) -> tuple[Tensor, Sequence[Tensor]]: ...


@dataclass
class Model:
    """A target: embedding, layers in order, final norm, head. Architectures build it; nothing subclasses it."""

    config: Config
    embedding: PackedWeight  # [V, D]
    layers: Sequence[Layer]
    output_norm: Tensor  # [D]
    head: Head
    cache_layers: Sequence[object]  # what Cache.allocate needs to know of each layer, see cache
    head_bias: Tensor | None = None  # [V]
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    can_tap: bool = True

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def n_vocab(self) -> int:
        return self.head.n_rows

    def new_cache(self, n_slots: int, n_ctx: int, type_k: str = "f16", type_v: str = "f16") -> Cache:
        return Cache.allocate(self.cache_layers, n_slots, n_ctx, type_k, type_v)

    @cached_property
    def stages(self) -> list[Stage]:
        """The layers, cut where the device changes."""
        cuts = [0, *(i for i in range(1, len(self.layers)) if self.layers[i].device != self.layers[i - 1].device)]
        return [Stage(a, b, self.layers[a].device) for a, b in zip(cuts, [*cuts[1:], len(self.layers)])]

    def forward(self, rows: Rows, cache: Cache, *, taps: Sequence[int] = (), logits: Logits = "all",
                run: RunStage | None = None) -> Output:
        """All layers of the rows, stage by stage; rows in page-locked memory let the devices work on several calls at
        once. run: what runs a stage instead of `run_stage`, captured for instance.

        Tapped streams travel along with the residual: fetched at the end, they would stop the devices before.
        """
        with Journey() as journey:
            here = rows.to(self.embedding.device)
            journey.at(self.embedding.device)
            x = self.embed(here.tokens)
            tapped: dict[int, Tensor] = {}
            for stage in self.stages:
                wanted = tuple(i for i in range(stage.start, stage.stop) if i in taps)
                x, *carried = hand_over([x, *tapped.values()], stage.device)
                tapped = dict(zip(tapped, carried))
                here = here if here.tokens.device == stage.device else rows.to(stage.device)
                journey.at(stage.device)
                x, streams = (run or self.run_stage)(stage, here, x, cache, wanted)
                tapped |= zip(wanted, streams)
            x, *carried = hand_over([x, *tapped.values()], self.device)
            tapped = dict(zip(tapped, carried))
            here = here if here.tokens.device == self.device else rows.to(self.device)
            journey.at(self.device)
            hidden = rms_norm(x, self.output_norm, self.config.layer_norm_rms_epsilon)
            features = torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
            return Output(self.logits(hidden, here, logits), hidden, features)

    def run_stage(self, stage: Stage, rows: Rows, x: Tensor, cache: Cache, taps: Sequence[int]
                  ) -> tuple[Tensor, list[Tensor]]:
        """x [B, W, D] through a stage's layers, all on its device; the stream entering each tapped layer too."""
        step, opened, streams = Step.of(rows), None, []
        for i in range(stage.start, stage.stop):
            if i in taps:
                streams.append(x)
            after = self.layers[i + 1].opening if i + 1 < stage.stop else None
            x, opened = self.layers[i](x, opened, step, cache, after)
        return x, streams

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, W] ids to [B, W, D] float32 rows. Ids outside the vocabulary are the caller's bug, never indexed."""
        x = gather(self.embedding, tokens.reshape(-1)).view(*tokens.shape, -1)
        return x * self.embedding_scale if self.embedding_scale != 1.0 else x

    def logits(self, hidden: Tensor, rows: Rows, which: Logits) -> Joinable | None:
        if which == "none":
            return None
        if which == "last":
            last = (rows.n_rows - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
            hidden = hidden.gather(1, last)
        return self.project(hidden)

    def project(self, hidden: Tensor) -> Joinable:
        """[B, W, D] normed hidden rows through the head: [B, W, V] float32, of which a rank has its part."""
        out = self.head(hidden)
        if self.head_bias is not None:
            start, stop = self.head.columns
            bias = self.head_bias[start:stop]
            out = each(out, lambda part: part + bias)
        if self.logit_softcap > 0.0:
            out = each(out, lambda part: self.logit_softcap * torch.tanh(part / self.logit_softcap))
        return out
