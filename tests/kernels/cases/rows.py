"""A step's rows: positions, blocks, drafts laid out, and what of them is accepted."""

from __future__ import annotations

import torch

from ggufspec.kernels.rows import plain as rows_plain
from ggufspec.kernels.rows import triton as rows_triton

from .comparing import case, on, same


@case
def rows(device: str, real: bool) -> None:
    g = torch.Generator().manual_seed(0)
    B, V = (5, 300) if real else (4, 20)
    for W in (1, 2, 5, 16):
        n_past, last, n_draft = (torch.randint(0, W, (B,), generator=g) for _ in range(3))
        sampled, wide = (torch.randint(0, V, (B, W + 2), generator=g) for _ in range(2))
        for a, b in zip(rows_triton.positions(*on(device, n_past, n_draft + 1), W),
                        rows_plain.positions(n_past, n_draft + 1, W)):  # fmt: skip
            same(a, b, "positions")
        n_past[1], n_draft[1] = -1, -1  # padding
        for a, b in zip(rows_triton.masked_block(*on(device, last), 7, W, n_past.to(device)),
                        rows_plain.masked_block(last, 7, W, n_past)):  # fmt: skip
            same(a, b, "masked block")
        wide[:, W // 2 :] -= V // 4  # ids outside on both sides
        dlast, dwide, dn = on(device, last, wide * 2, n_draft)
        tokens, n_rows = rows_plain.lay_out(last, wide[:, : W - 1] * 2, n_draft, V)
        for a, b in zip(rows_triton.lay_out(dlast, dwide[:, : W - 1], dn, V), (tokens, n_rows)):
            same(a, b, "lay out")
        sampled[:, : W // 2 + 1] = torch.cat((tokens[:, 1:], sampled), 1)[:, : W // 2 + 1]
        is_eog = torch.rand(V, generator=g) < 0.1
        expected = rows_plain.accepted_prefix(tokens, sampled[:, :W], n_rows, is_eog)
        dtokens, dsampled, dn, deog = on(device, tokens, sampled, n_rows, is_eog)
        same(rows_triton.accepted_prefix(dtokens, dsampled[:, :W], dn, deog), expected, "accepted")
