"""Norms and gated activations."""

from __future__ import annotations

from ggufspec.kernels.norm import plain as norm_plain
from ggufspec.kernels.norm import triton as norm_triton

from .comparing import EPS, case, close, on, random, same


@case
def norms(device: str, real: bool) -> None:
    for T, D in ((1, 5120), (7, 5120), (48 * 8, 128)) if real else ((3, 100), (9, 64)):
        x, y, w = random(T, D), random(T, D, seed=1), random(D)
        dx, dy, dw = on(device, x, y, w)
        close(norm_triton.rms_norm(dx, dw, EPS), norm_plain.rms_norm(x, w, EPS), 1e-5, "rms_norm")
        total, normed = norm_triton.add_rms_norm(dx, dy, dw, EPS)
        same(total, x + y, "sum")
        close(normed, norm_plain.rms_norm(x + y, w, EPS), 1e-5, "add_rms_norm")
        close(norm_triton.gated_norm(dx, dy, dw, EPS), norm_plain.gated_norm(x, y, w, EPS), 2e-5, "gated_norm")
        for name in ("swiglu", "geglu", "sigmoid_gate"):
            close(getattr(norm_triton, name)(dx, dy), getattr(norm_plain, name)(x, y), 1e-5, name)
        for start, n in ((0, 1), (T // 2, max(1, T // 3))):
            part = norm_triton.add_rms_norm(dx[start : start + n], dy[start : start + n], dw, EPS)[1]
            same(part, normed[start : start + n], "rows alone")
