"""The hidden rows carried from step to step."""

from __future__ import annotations

import torch

from ggufspec.kernels.carry import plain as carry_plain
from ggufspec.kernels.carry import triton as carry_triton

from .comparing import case, on, random, same


@case
def carry(device: str, real: bool) -> None:
    D, most, B, W = (5120, 16, 3, 5) if real else (1100, 4, 2, 3)
    slots, n_past, n_rows = torch.tensor([2, 0, 3])[:B], torch.tensor([0, 9, 4])[:B], torch.tensor([W, 1, 2])[:B]
    mine = random(4, D), random(4, most, D), torch.ones(4, dtype=torch.int64)
    theirs = tuple(t.clone() for t in on(device, *mine))
    hidden, dslots, dpast, drows = random(B, W, D), *on(device, slots, n_past, n_rows)
    for h in (None, hidden):
        dh = None if h is None else h.to(device)
        same(carry_triton.before(theirs[0], dslots, dpast, dh), carry_plain.before(mine[0], slots, n_past, h), "before")
    for tentative in (False, True):
        carry_plain.keep(*mine, hidden, slots, n_rows, tentative)
        carry_triton.keep(*theirs, hidden.to(device), dslots, drows, tentative)
        for a, b in zip(theirs, mine):
            same(a, b, "kept")
    for accepted in (0, 1, W):
        carry_plain.take(*mine, slots, torch.full_like(slots, accepted))
        carry_triton.take(*theirs, dslots, torch.full_like(dslots, accepted))
        same(theirs[0], mine[0], "taken")
    n_past[1], n_rows[1] = -1, 0  # padding
    padded = carry_plain.before(mine[0], slots, n_past)
    same(carry_triton.before(theirs[0], dslots, n_past.to(device)), padded, "padded")
    hidden, drows = hidden + 1, n_rows.to(device)
    for room, held, moved in ((carry_plain, mine, (hidden, slots, n_rows)),
                              (carry_triton, theirs, (hidden.to(device), dslots, drows))):  # fmt: skip
        before = [t[slots[1]].clone() for t in held]
        room.keep(*held, *moved, True)
        room.take(*held, moved[1], moved[2] - 1)
        for a, b in zip(held, before):
            same(a[slots[1]], b, "padding")
    for a, b in zip(theirs, mine):
        same(a, b, "kept beside padding")
