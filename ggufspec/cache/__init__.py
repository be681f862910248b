"""All per-sequence memory of a model: one packed KV store per attention layer, one state per recurrent layer.

Caches hold the committed past. The rows of the last step are tentative until `accept`: KV cells past the committed
length are simply never visible, recurrent layers replay the accepted inputs at the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, PlacementError
from ..handover import hand_over, on
from ..kernels import gdn, kv
from ..kernels.gdn import Bank, GdnSpec, GdnState
from ..kernels.kv import KV


@dataclass(frozen=True)
class KVLayer:
    """What an attention layer keeps: heads and head sizes. A window > 0 limits what is visible, not what is kept."""

    n_kv: int
    key_length: int
    value_length: int
    device: torch.device


@dataclass(frozen=True)
class RecurrentLayer:
    """What a gated DeltaNet layer keeps."""

    spec: GdnSpec
    device: torch.device


@dataclass
class SlotState:
    """A copy of one slot on the host: restoring it brings back exactly the same continuation."""

    n_past: int
    kv: list[tuple[Tensor, Tensor] | None]  # packed cells [n_past, ...] of K and V
    recurrent: list[Tensor | None]  # state and conv tail as one flat tensor, committed

    @property
    def n_bytes(self) -> int:
        tensors = [t for pair in self.kv if pair for t in pair] + [t for t in self.recurrent if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class Cache:
    kv: list[KV | None]  # one entry a layer
    recurrent: list[GdnState | None]
    n_slots: int
    n_ctx: int  # cells a slot
    type_k: str
    type_v: str
    leaders: list[GdnState]  # one recurrent layer a bank: its counts are those of all layers there
    banks: list[Bank]  # recurrent layers alike on one device

    @classmethod
    def allocate(cls, layers: Sequence[object], n_slots: int, n_ctx: int, type_k: str, type_v: str) -> Cache:
        """All memory at once; nothing grows later."""
        if n_slots < 1 or n_ctx < 1:
            raise ConfigError(f"a cache of {n_slots} slots with {n_ctx} cells was asked for; both must be 1 or more")
        kvs: list[KV | None] = []
        states: list[GdnState | None] = []
        alike: dict[RecurrentLayer, int] = Counter(layer for layer in layers if isinstance(layer, RecurrentLayer))
        banks = {}
        for like, n in alike.items():
            try:
                banks[like] = gdn.allocate_bank(like.spec, n, n_slots, like.device)
            except torch.OutOfMemoryError as error:
                raise PlacementError(
                    f"{like.device} has no memory left for the states of {n} recurrent layers in {n_slots} slot(s); "
                    "use fewer slots (-np)"
                ) from error
        left = {like: iter(bank.layers) for like, bank in banks.items()}
        for layer in layers:
            if isinstance(layer, KVLayer):
                kvs.append(kv.allocate(type_k, type_v, n_slots, n_ctx, layer.n_kv, layer.key_length,
                                       layer.value_length, layer.device))
                states.append(None)
            elif isinstance(layer, RecurrentLayer):
                kvs.append(None)
                states.append(next(left[layer]))
            else:
                raise TypeError(f"unknown cache layer {layer!r}")
        leaders = [bank.layers[0] for bank in banks.values()]
        return cls(kvs, states, n_slots, n_ctx, type_k, type_v, leaders, list(banks.values()))

    @property
    def has_recurrent(self) -> bool:
        return any(s is not None for s in self.recurrent)

    @property
    def n_bytes(self) -> int:
        return sum(k.n_bytes for k in self.kv if k is not None) + sum(
            s.n_bytes for s in self.recurrent if s is not None
        )

    def accept(self, slots: Tensor, n: Tensor, n_rows: Tensor | None = None) -> None:
        """Commit the first n[b] rows of slot slots[b]'s last tentative step; [B] int64 on the device.

        n_rows: those of the step; entries without rows were padding. None: there was no padding.
        """
        given = [slots, n] if n_rows is None else [slots, n, n_rows]
        there: dict[torch.device, list[Tensor]] = {}
        for state in self.leaders:
            if state.device not in there:
                there[state.device] = hand_over(given, state.device)
            with on(state.device):
                gdn.accept(state, *there[state.device])

    def trim(self, slot: int, n: int) -> None:
        """Correct the last `accept` of a slot to n rows; only before the next forward."""
        for state in self.leaders:
            gdn.trim(state, slot, n)

    def mutable(self, device: torch.device | None = None) -> list[Tensor]:
        """What running a step and `accept` any number of times changes in place and putting back undoes.

        Accepted rows of recurrent layers are committed first: of the windows, which such runs overwrite, only the
        convolutions' tails are needed then. device: nothing elsewhere is returned or committed; layers there may be in
        the middle of a step, between their rows and `accept`. None: all devices.
        """
        states = [s for s in self.recurrent if s is not None and device in (None, s.device)]
        for s in states:
            with on(s.device):
                gdn.commit(s, torch.arange(s.n_slots, device=s.device))
        kept = [t for s in states for t in (s.state, s.window_u[:, :, : s.spec.conv_kernel - 1])]
        return kept + [s.shared for s in self.leaders if device in (None, s.device)]

    def reset(self, slot: int) -> None:
        """Start a new sequence in a slot."""
        for bank in self.banks:
            gdn.reset_bank(bank, slot)

    def save(self, slot: int, n_past: int) -> SlotState:
        """Copy the committed past of a slot to the host; pending rows of recurrent layers are committed first."""
        kvs = [None if k is None else kv.save(k, slot, n_past) for k in self.kv]
        banks = [iter(part.cpu()) for part in self.save_recurrent(slot)]
        own = {id(layer): rows for bank, rows in zip(self.banks, banks) for layer in bank.layers}
        return SlotState(n_past, kvs, [None if s is None else next(own[id(s)]) for s in self.recurrent])

    def save_recurrent(self, slot: int, is_committed: bool = False) -> list[Tensor]:
        """Only the recurrent part, on its device: a checkpoint (the KV cells below it stay where they are).

        is_committed: the slot's last forward was a prompt's, so that no accepted rows are pending.
        """
        saved = []
        for bank in self.banks:
            with on(bank.state.device):
                saved.append(gdn.save_bank(bank, slot, is_committed))
        return saved

    def restore_recurrent(self, slot: int, saved: list[Tensor]) -> None:
        for bank, part in zip(self.banks, saved):
            gdn.restore_bank(bank, slot, part)

    def restore(self, slot: int, saved: SlotState) -> None:
        """All or nothing: everything is checked before the first byte is written."""
        if len(saved.kv) != len(self.kv) or saved.n_past > self.n_ctx:
            raise ConfigError(
                f"a saved slot of {len(saved.kv)} layers and {saved.n_past} tokens does not fit a cache of "
                f"{len(self.kv)} layers and {self.n_ctx} cells"
            )
        for k, pair in zip(self.kv, saved.kv):
            if (k is None) != (pair is None) or (k is not None and pair is not None and not kv.fits(k, pair)):
                raise ConfigError("a saved slot has other cache types or head sizes than this cache")
        for state, part in zip(self.recurrent, saved.recurrent):
            if (state is None) != (part is None) or (
                state is not None and part is not None and not gdn.fits(state, part)
            ):
                raise ConfigError("a saved slot has a recurrent state of another size than this model's")
        for k, pair in zip(self.kv, saved.kv):
            if k is not None and pair is not None:
                kv.restore(k, slot, pair)
        for state, part in zip(self.recurrent, saved.recurrent):
            if state is not None and part is not None:
                gdn.restore(state, slot, part)
