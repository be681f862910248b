"""Choosing tokens: argmax, top k, the selector's rows and walk, and the Markov head."""

from __future__ import annotations

import torch
from random_blocks import for_kernels, random_raw
from torch import Tensor

from ggufspec.kernels.matmul import fuse, pack
from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.matmul.triton import multiply
from ggufspec.kernels.matmul.weight import PackedWeight, WeightGroup
from ggufspec.kernels.select import plain as select_plain
from ggufspec.kernels.select import triton as select_triton

from .comparing import case, close, on, random, same


@case
def selection(device: str, real: bool) -> None:
    V = 248320 if real else 1500
    B = 2 if real else 1
    x = (random(B, 3, V) * 8).round()  # many ties
    x[0, 0, 3] = -0.0
    bias = random(3 * B, V)
    same(select_triton.argmax(x.to(device)), select_plain.argmax(x), "argmax")
    got = select_triton.argmax(x.view(3 * B, V).to(device), bias.to(device))
    same(got, select_plain.argmax(x.view(3 * B, V), bias), "argmax with bias")
    for k in (1, 10, 16, 40, 100, 300) if real else (1, 10, 70):
        values, ids = select_plain.top_k(x, k)
        got = select_triton.top_k(x.to(device), k)
        same(got[0], values, f"top {k}"), same(got[1], ids, f"ids of top {k}")
    for V, k in ((9, 9), (37, 16), (1025, 5), (2000, 16)):  # fewer runs than k, ends of runs, equal and infinite logits
        x = (random(2, V) * 2).round()
        x[1, V // 3 :] = -torch.inf
        for got, expected in zip(select_triton.top_k(x.to(device), k), select_plain.top_k(x, k)):
            same(got, expected, f"top {k} of {V}")
    few = torch.full((1, 1100), -torch.inf)
    few[0, 1000] = 1.0
    same(select_triton.top_k(few.to(device), 3)[1], torch.tensor([[1000, 0, 1]]), "few finite")


@case
def selector_walk(device: str, real: bool) -> None:
    B, n, k, R = (4, 7, 16, 256) if real else (2, 4, 5, 12)
    ids = torch.randint(0, 1000, (B, n, k), generator=torch.Generator().manual_seed(0))
    rest = random(B, n, k), random(B, n, R), random(B, 1 + (n - 1) * k, R), random(B, n, k, R)
    tokens, shares = select_plain.walk(ids, *rest)
    got = select_triton.walk(*on(device, ids, *rest))
    same(got[0], tokens, "tokens"), close(got[1], shares, 1e-5, "shares")


def packed(device: str, type_name: str, raw: Tensor, rows: int, columns: int) -> PackedWeight:
    """A weight as the kernels take it, on the CPU too."""
    if device != "cpu":
        return pack(raw, type_name, (rows, columns), device)
    return for_kernels(raw, type_name, rows, columns)


@case
def selector_rows(device: str, real: bool) -> None:
    V, R, n, k, B = (248320, 256, 7, 16, 2) if real else (300, 96, 3, 4, 2)
    types = ("Q8_0", "Q8_0"), ("Q8_0", "F16")  # one launch, and a launch a form
    ids = torch.randint(0, V, (B, n, k), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([3, V - 1])
    for pair in types:
        raws = [random_raw(type_name, V, R, seed=seed) for seed, type_name in enumerate(pair)]
        theirs = (packed(device, type_name, raw, V, R) for type_name, raw in zip(pair, raws))
        mine = (pack(raw, type_name, (V, R)) for type_name, raw in zip(pair, raws))
        for got, expected in zip(select_triton.selector_rows(*on(device, ids, last), *theirs),
                                 select_plain.selector_rows(ids, last, *mine)):  # fmt: skip
            same(got, expected, f"rows of {pair}")


@case
def markov_tokens(device: str, real: bool) -> None:
    """Each token is the best after the one before, up to the rounding of float16 products; its rows are exact."""
    V, r, n, B = (248320, 256, 7, 2) if real else (300, 96, 3, 2)
    type_name = "Q4_K" if real else "Q8_0"
    raws = [random_raw(type_name, V, r, seed=seed) for seed in (1, 2)]
    dense_table, dense_out = (decode(raw, type_name) for raw in raws)
    table, out = (packed(device, type_name, raw, V, r) for raw in raws)
    project = WeightGroup((out,)) if device == "cpu" else fuse([out])
    if device == "cpu":  # the product's kernel that runs anywhere
        select_triton.matmul = lambda a, group: (multiply(a, group.weights[0]),)
    last = torch.tensor([3, V - 1])
    biases = dense_table[last].double() @ dense_out.double().T
    logits = random(B, n + 1, V) * biases.abs().max().item()
    tokens, embedded = (t.cpu() for t in select_triton.markov_tokens(
        logits.to(device)[:, 1:], last.to(device), table, project
    ))
    before = torch.cat((last[:, None], tokens[:, :-1]), 1)
    same(embedded, dense_table[before], "rows of the table")
    scores = logits[:, 1:].double() + dense_table[before].double() @ dense_out.double().T
    missed = scores.max(-1).values - scores.gather(-1, tokens[..., None])[..., 0]
    assert missed.max() <= 2e-3 * scores.abs().max(), missed
