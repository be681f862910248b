"""The kernels in Triton's interpreter against their twins; run as a process of its own by test_candidates.py."""

import torch
from candidates_rank import selected
from tied_logits import logits_of

from ggufspec.kernels.candidates import plain
from ggufspec.kernels.candidates import triton as kernel

for call, (T, k, bounds) in enumerate((
    (3, 1, ((0, 64), (64, 100))), (2, 5, ((0, 3), (3, 3), (3, 90))), (2, 12, ((0, 40), (40, 47), (47, 96), (96, 130)))
)):  # fmt: skip
    x = logits_of(call, T, bounds[-1][1])
    every = []
    for first, end in bounds:
        part = x[:, first:end]
        ids = selected(part, k)
        every.append(kernel.keys(part, ids, first, k))
        assert torch.equal(every[-1], plain.keys(part, ids, first, k))
    values, ids = kernel.merge(torch.stack(every))
    expected, expected_ids = plain.merge(torch.stack(every))
    assert torch.equal(values, expected) and torch.equal(ids, expected_ids)
