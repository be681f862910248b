"""Per-slot memory of one gated DeltaNet layer: the committed state and the window of the last step's rows.

A step's rows are tentative: they are computed from the state without storing it, and their inputs are
recorded. `accept` says how many of them were right; the next `step` or `chunk` replays those into the state
first. The window is double: a step records into one half while it replays the other, `accept` exchanges them.
In front of the rows of a half stand the convolution inputs before them: what a row sees is always one stretch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_WINDOW = 17  # widest tentative step: 16 drafted tokens and the one before them


@dataclass(frozen=True)
class GdnSpec:
    """n_k key heads, n_v value heads (value head h reads key head h mod n_k), head size d of both."""

    n_k: int
    n_v: int
    d: int
    conv_kernel: int
    eps: float

    @property
    def key_dim(self) -> int:
        return self.n_k * self.d

    @property
    def conv_dim(self) -> int:
        return (2 * self.n_k + self.n_v) * self.d


@dataclass(frozen=True)
class GdnWeights:
    """conv [conv_dim, conv_kernel] (last tap: the current row), dt [n_v] added to alpha, a [n_v] negative."""

    conv: Tensor
    dt: Tensor
    a: Tensor
    taps: Tensor = field(init=False)  # conv transposed, [conv_kernel, conv_dim]: as a narrow step reads it

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", self.conv.T.contiguous())


@dataclass
class GdnState:
    """One layer, all slots. `state` is committed; `window_*` [2, n_slots, max_window, ..] hold inputs.

    Rows r .. r + conv_kernel - 2 of a half of `window_u` precede row r of its window: the committed tail of the
    convolution is what precedes row n_replay.

    counts [2, n_slots] int64: rows of the window to replay, and which half they stand in. Layers of a bank share
    one tensor of counts, so that accepting is one launch for all of them.
    """

    spec: GdnSpec
    state: Tensor  # [n_slots, n_v, d, d] float32, [value, key]
    window_u: Tensor  # [2, n_slots, conv_kernel - 1 + max_window, conv_dim] convolution inputs
    window_k: Tensor  # [2, n_slots, max_window, n_k, d] normalized keys
    window_v: Tensor  # [2, n_slots, max_window, n_v, d]
    window_g: Tensor  # [2, n_slots, max_window, n_v] log decay
    window_beta: Tensor  # [2, n_slots, max_window, n_v]
    arrived: Tensor  # [n_slots, n_v] int32, zero between steps: programs of a head that have ended
    counts: Tensor  # [2, n_slots] int64, a view into `shared`
    shared: Tensor  # [2, n_layers, n_slots]

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def n_slots(self) -> int:
        return self.state.shape[0]

    @property
    def max_window(self) -> int:
        return self.window_k.shape[2]

    @property
    def n_replay(self) -> Tensor:
        """[n_slots] int64, rows that the next step replays."""
        return self.counts[0]

    @property
    def half(self) -> Tensor:
        """[n_slots] int64, the half of the window that they stand in."""
        return self.counts[1]

    @property
    def n_bytes(self) -> int:
        tensors = (self.state, self.window_u, self.window_k, self.window_v, self.window_g, self.window_beta,
                   self.arrived, self.counts)  # fmt: skip
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class Bank:
    """Layers alike on one device: what lasts of them is one tensor each, so that a slot's is copied all at once.

    state [n_layers, n_slots, n_v, d, d], window_u [n_layers, 2, n_slots, ..]: the layers' own are views of them.
    """

    layers: list[GdnState]
    state: Tensor
    window_u: Tensor

    @property
    def counts(self) -> Tensor:
        """[2, n_layers, n_slots]"""
        return self.layers[0].shared


def allocate_bank(
    spec: GdnSpec, n_layers: int, n_slots: int, device: torch.device | str, max_window: int = MAX_WINDOW
) -> Bank:
    """Zeroed memory for new sequences in every slot; from then on `accept` of one layer accepts for all of them."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=device)

    shared = torch.zeros(2, n_layers, n_slots, dtype=torch.int64, device=device)
    state = zeros(n_layers, n_slots, spec.n_v, spec.d, spec.d)
    window_u = zeros(n_layers, 2, n_slots, spec.conv_kernel - 1 + max_window, spec.conv_dim)
    window = (2, n_slots, max_window)
    layers = [
        GdnState(
            spec,
            state[i],
            window_u[i],
            zeros(*window, spec.n_k, spec.d),
            zeros(*window, spec.n_v, spec.d),
            zeros(*window, spec.n_v),
            zeros(*window, spec.n_v),
            torch.zeros(n_slots, spec.n_v, dtype=torch.int32, device=device),
            shared[:, i],
            shared,
        )
        for i in range(n_layers)
    ]
    return Bank(layers, state, window_u)


def allocate(
    spec: GdnSpec, n_slots: int, device: torch.device | str, max_window: int = MAX_WINDOW
) -> GdnState:
    """Zeroed memory of one layer for new sequences in every slot."""
    return allocate_bank(spec, 1, n_slots, device, max_window).layers[0]


def trim(state: GdnState, slot: int, n: int) -> None:
    """Correct the last `accept` of a slot to n rows (its layers' shared count); before the next step or
    chunk."""
    state.shared[0, :, slot] = n


def tails(state: GdnState, slots: Tensor) -> Tensor:
    """[B, conv_kernel - 1, conv_dim]: the last committed convolution inputs of slots [B], oldest first."""
    before = torch.arange(state.spec.conv_kernel - 1, device=state.device)
    rows = state.n_replay[slots][:, None] + before
    return state.window_u[state.half[slots][:, None], slots[:, None], rows]


def set_tails(state: GdnState, slots: Tensor, rows: Tensor) -> None:
    """Give slots without accepted rows their last committed convolution inputs, as `tails` gives them."""
    state.window_u[state.half[slots], slots, : rows.shape[1]] = rows


def reset(state: GdnState, slot: int) -> None:
    """A new sequence begins in the slot."""
    state.state[slot] = 0
    state.window_u[:, slot] = 0
    state.n_replay[slot] = 0


def reset_bank(bank: Bank, slot: int) -> None:
    """A new sequence begins in the slot of all layers."""
    bank.state[:, slot] = 0
    bank.window_u[:, :, slot] = 0
    bank.counts[0, :, slot] = 0


def pack_bank(bank: Bank, slot: int) -> Tensor:
    """[n_layers, n] what `pack_slot` gives of each layer; nothing is pending in the slot."""
    first, second = bank.window_u[:, :, slot, : bank.layers[0].spec.conv_kernel - 1].unbind(1)
    tails = torch.where(bank.counts[1, :, slot, None, None] == 0, first, second)
    return torch.cat((bank.state[:, slot].flatten(1), tails.flatten(1)), 1)


def restore_bank(bank: Bank, slot: int, saved: Tensor) -> None:
    """Bring a slot of all layers back to what `pack_bank` copied."""
    state, spec = bank.state[:, slot], bank.layers[0].spec
    n, before = state[0].numel(), spec.conv_kernel - 1
    saved = saved.to(bank.state.device)
    state.copy_(saved[:, :n].view(state.shape))
    # both halves: the one that is not in use is written before it is read
    bank.window_u[:, :, slot, :before] = saved[:, None, n:].view(-1, 1, before, spec.conv_dim)
    bank.counts[0, :, slot] = 0


def pack_slot(state: GdnState, slot: int) -> Tensor:
    """State and tail of a slot, committed, as one flat tensor (a copy)."""
    return torch.cat((state.state[slot].flatten(), tails(state, one_slot(state, slot)).flatten()))


def one_slot(state: GdnState, slot: int) -> Tensor:
    return torch.full((1,), slot, device=state.device)  # filled there: the host waits for nothing


def fits(state: GdnState, saved: Tensor) -> bool:
    """Whether a saved slot can be restored into this layer."""
    return saved.numel() == state.state[0].numel() + (state.spec.conv_kernel - 1) * state.spec.conv_dim


def restore(state: GdnState, slot: int, saved: Tensor) -> None:
    """Bring a slot back to what `save` copied."""
    n = state.state[slot].numel()
    state.state[slot] = saved[:n].view(state.state.shape[1:]).to(state.device)
    state.n_replay[slot] = 0
    set_tails(state, one_slot(state, slot), saved[n:].view(1, -1, state.spec.conv_dim).to(state.device))
