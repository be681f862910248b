"""The dynamic convolution, alone and into a norm or a matmul's input."""

from __future__ import annotations

from ggufspec.kernels.conv import plain as conv_plain
from ggufspec.kernels.conv import triton as conv_triton
from ggufspec.kernels.matmul.triton import prepare

from .comparing import EPS, case, close, on, random


@case
def dynamic_conv(device: str, real: bool) -> None:
    B, T, D, K, G = (2, 8, 5120, 2, 320) if real else (2, 5, 32, 3, 4)
    h, dyn, base = random(B, T, D), random(B, T, 2, K, G), random(2, K, D)
    for side in (0, 1):
        close(conv_triton.dynamic_conv(*on(device, h, dyn, base), side), conv_plain.dynamic_conv(h, dyn, base, side),
              1e-5, f"side {side}")  # fmt: skip
        x, weight = random(B, T, D, seed=1), random(D)
        dx, dweight, *d = on(device, x, weight, h, dyn, base)
        a, expected = conv_triton.prepared_conv(*d, side), prepare(conv_triton.dynamic_conv(*d, side).flatten(0, 1))
        values, close_values = (r.rows.float() * r.scale[:, None] for r in (a, expected))
        close(values, close_values.cpu(), 1.2e-3 * close_values.abs().max().item(), f"prepared, side {side}")
        total, normed, a = conv_triton.add_conv_norm(dx, *d, side, dweight, EPS)
        expected_total, expected_normed, _ = conv_plain.add_conv_norm(x, h, dyn, base, side, weight, EPS)
        close(total, expected_total, 1e-5, "sum"), close(normed, expected_normed, 1e-5, "norm")
        expected = prepare(normed.flatten(0, 1))
        close(a.rows.float() * a.scale[:, None], (expected.rows.float() * expected.scale[:, None]).cpu(), 4e-3, "norm")
