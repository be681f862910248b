"""Products of many rows under Triton's CPU interpreter, against float64. Run by `test_matmul_wide.py`."""

import torch
from random_blocks import random_raw

from ggufspec.kernels.matmul import repack, wide
from ggufspec.kernels.matmul.cuda import Config, Launch
from ggufspec.kernels.matmul.decode import decode
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

CPU, K = torch.device("cpu"), 512
ROWS = (24, 40)


def reference_product(a: torch.Tensor, w: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    assert out.stride(1) == 1
    out.copy_(factor * (a.float() @ w.float().T))


def launch_of(raw: torch.Tensor, type_name: str) -> Launch:
    """Two weights of one type row after row, padded to 128 rows."""
    shift = repack.shift_for(float(repack.largest_scale(raw, type_name)), type_name)
    parts = {}
    for name, part in repack.repack(raw, type_name, shift).items():
        parts[name] = part.new_zeros((part.shape[0], 128, *part.shape[2:]))
        parts[name][:, : raw.shape[0]] = part
    none = torch.zeros(0)
    return Launch(type_name, (0, 2), ROWS, parts, shift, none, none, Config())


def check(type_name: str) -> None:
    raw = random_raw(type_name, sum(ROWS), K, seed=3)
    other = random_raw("F32", 10, K, seed=4)
    launch = launch_of(raw, type_name)
    weights = tuple(PackedWeight(t, (n, K), CPU, parts={"file": r}) for t, n, r in
                    ((type_name, ROWS[0], raw[: ROWS[0]]), ("F32", 10, other), (type_name, ROWS[1], raw[ROWS[0] :])))
    group = WeightGroup(weights, (launch,))
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(2)) * 3
    a = wide.prepare(x)
    assert a.fixed == wide.SCALE and a.scale is None
    assert (repack.disorder(a.rows.float()) * wide.SCALE - x).abs().max() < 5e-3
    own = torch.tensor([2.0**k for k in range(7)])
    scaled = Activation((a.rows.float() / own[:, None]).half(), K, own * wide.SCALE)
    expected = [x.double() @ decode(r, t).double().T for t, r in ((type_name, raw), ("F32", other))]
    expected = [expected[0][:, : ROWS[0]], expected[1], expected[0][:, ROWS[0] :]]
    for activation in (a, scaled):
        for y, e in zip(wide.multiply(activation, group), expected):
            assert y.shape == e.shape and (y - e).norm() / e.norm() < 6e-4
    whole = wide.multiply_launch(a, launch)
    assert whole.shape == (7, 128) and torch.equal(whole[:, 24:64], wide.multiply(a, group)[2])
    assert not whole[:, 64:].any()


def everything() -> None:
    wide.capability = lambda index: (7, 5)  # the interpreter runs no assembly
    wide.product = reference_product
    for limit in (wide.SCRATCH_BYTES, 1):  # all rows at once, and in pieces
        wide.SCRATCH_BYTES = limit
        for type_name in ("Q4_K", "Q6_K", "Q8_0"):
            check(type_name)
    x = torch.randn(3, 300)
    rows = wide.prepare(torch.cat((x, x), 1)[:, :300])
    assert rows.rows.shape == (3, 512) and not repack.disorder(rows.rows.float())[:, 300:].any()
    assert (repack.disorder(rows.rows.float())[:, :300] * wide.SCALE - x).abs().max() < 2e-3
