"""Writing into the cache: every storage type, linear and ring, alone and with norm and rope."""

from __future__ import annotations

import torch

from ggufspec.kernels import kv as kvs
from ggufspec.kernels.kv import plain as kv_plain
from ggufspec.kernels.kv import triton as kv_triton
from ggufspec.kernels.rope import RopeSpec
from ggufspec.kernels.rope import plain as rope_plain

from .comparing import EPS, case, close, on, random, same


def caches(device: str, type_k: str, type_v: str, *shape: int, ring: bool = False) -> tuple[kvs.KV, kvs.KV]:
    return (kvs.allocate(type_k, type_v, *shape, "cpu", ring=ring),
            kvs.allocate(type_k, type_v, *shape, device, ring=ring))  # fmt: skip


@case
def store(device: str, real: bool) -> None:
    W, n_kv, hd = (16, 4, 256) if real else (3, 2, 128)
    slots = torch.tensor([2, 0])
    for type_name in kvs.TYPES:
        for ring in (False, True):
            mine, theirs = caches(device, type_name, type_name, 3, 256, n_kv, hd, 64, ring=ring)
            k, v = random(2, W, n_kv, hd) * 2, random(2, W, n_kv, 64)
            k[0, 0, 0, :32] = 0.0
            positions = torch.stack((torch.arange(W) + (1000 if ring else 100), torch.arange(W)))
            positions[1, 2:] = -1
            kv_plain.store(mine, k, v, slots, positions)
            kv_triton.store(theirs, *on(device, k, v, slots, positions))
            if type_name == "bf16" and device == "cpu":  # the interpreter cuts off where a card rounds
                close(theirs.k.float(), mine.k.float(), 0.04, type_name)
                continue
            allowed = 2 if type_name == "iq4_nl" else 0  # its scale is a sum, taken in another order
            for a, b in ((mine.k, theirs.k), (mine.v, theirs.v)):
                different = int((a != b.cpu()).sum())
                assert different <= allowed * a.numel() // 1000, f"{type_name}: {different} bytes differ"


@case
def norm_rope_store(device: str, real: bool) -> None:
    B, W, H, n_kv, hd = (2, 8, 24, 4, 256) if real else (2, 2, 4, 2, 64)
    spec = RopeSpec(64 if real else 16)
    q_gate, k, v = random(B, W, H, 2, hd), random(B, W, n_kv, hd), random(B, W, n_kv, hd, seed=1)
    weights = random(hd), random(hd, seed=1)
    slots, positions = torch.tensor([1, 0]), torch.arange(B * W).view(B, W)
    tables = rope_plain.tables(positions, spec)
    for type_name in ("f32", "f16", "q8_0"):
        for norms in (None, (*weights, EPS)):
            mine, theirs = caches(device, type_name, type_name, 2, 256, n_kv, hd, hd)
            expected = kv_plain.norm_rope_store(mine, q_gate[..., 0, :], k, v, slots, positions, norms,
                                                (*tables, spec))  # fmt: skip
            dnorms = None if norms is None else (*on(device, *weights), EPS)
            dq, dk, dv, ds, dp, cos, sin = on(device, q_gate, k, v, slots, positions, *tables)
            got = kv_triton.norm_rope_store(theirs, dq[..., 0, :], dk, dv, ds, dp, dnorms, (cos, sin, spec))
            close(got, expected, 2e-5, f"q {type_name}")
            alone = kvs.allocate(type_name, type_name, 2, 256, n_kv, hd, hd, device)
            kv_triton.store_raw(alone, dk, dv, ds, dp, None if dnorms is None else dnorms[1:], (cos, sin, spec))
            same(alone.k, theirs.k.cpu(), "keys without queries"), same(alone.v, theirs.v.cpu(), "values alone")
            for slot, entry in ((1, 0), (0, 1)):
                first = int(positions[entry, 0])
                for a, b in zip(kv_plain.decode_cells(mine, slot, first, first + W),
                                kv_plain.decode_cells(theirs, slot, first, first + W)):  # fmt: skip
                    close(b, a, {"f32": 2e-5, "f16": 5e-3, "q8_0": 0.06}[type_name], f"cache {type_name}")
