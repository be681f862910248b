"""Quantized matmul in plain Triton: activations into the kernels' order, embedding rows, any type at any width.

The products here run anywhere Triton does, its CPU interpreter included; the fast ones are in `gluon`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul.repack import BLOCK, FORMS, Form, n_super_blocks
from ggufspec.kernels.matmul.values import element_at, file_value, float_value, form_value, place_of, power_near
from ggufspec.kernels.matmul.weight import Activation, PackedWeight
from ggufspec.kernels.overlap import begin, overlap

ROWS, TOKENS, COLUMNS = 32, 16, 64  # a tile of `multiply`: weight rows, tokens, columns a step
PROGRAMS = 256  # as many as `multiply` cuts K for
SUM_BLOCK = 128


@triton.jit
def prepare_rows(
    x, rows, scale, K, x_stride, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row: float16 in the kernels' order, divided by the power of two that puts its maximum in 2^14..2^15."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SIZE)
    e = p // 256 * 256 + element_at(p % 256)
    v = tl.load(x + row * x_stride + e, mask=e < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(v), 0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(largest > 0, tl.maximum(exponent - 14, 1), 127)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rows + row * WIDTH + p, (v * up).to(tl.float16), mask=p < WIDTH)
    tl.store(scale + row, (exponent << 23).to(tl.float32, bitcast=True))


def prepare(x: Tensor, pdl: bool | None = None) -> Activation:
    """x [T, K] float to float16 [T, S * 256] in the kernels' order, with a scale for each row.

    pdl: programmatic dependent launch, so that the product's kernel can read weights while this one runs (default:
    on cards that have it).
    """
    if pdl is None:
        pdl = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (9, 0)
    n_tokens, n_columns = x.shape
    width = n_super_blocks(n_columns) * BLOCK
    rows = torch.empty((n_tokens, width), dtype=torch.float16, device=x.device)
    scale = torch.empty(n_tokens, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(width)
    if n_tokens:
        prepare_rows[(n_tokens,)](
            x, rows, scale, n_columns, x.stride(0), width, size, pdl,
            num_warps=max(1, min(16, size // 1024)), launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return Activation(rows, n_columns, scale)


@triton.jit
def value(
    low, high, scale, extra, row, block, e, mask, rows, row_bytes, unit,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Elements e of a super-block of some rows, from the kernels' arrays (LOW > 0) or from file bytes (`low`)."""
    if LOW == 16:
        return float_value(low, row.to(tl.int64) + block.to(tl.int64) * rows, e, mask, SCALE)
    elif LOW:
        at = row.to(tl.int64) + block.to(tl.int64) * rows
        return form_value(low, high, scale, extra, at, e, unit, mask, LOW, HIGH, SCALE, OFFSET)
    else:
        return file_value(low, row.to(tl.int64) * row_bytes, block, e, mask, TYPE)


@triton.jit
def gather_rows(
    ids, out, low, high, scale, extra, K, rows, row_bytes, unit,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Super-block program_id(1) of weight row ids[program_id(0)], in file order, float32."""
    token = tl.program_id(0)
    row = tl.load(ids + token)
    block = tl.program_id(1)
    e = tl.arange(0, 256)
    mask = block * 256 + e < K
    v = value(low, high, scale, extra, row, block, e, mask, rows, row_bytes, unit, LOW, HIGH, SCALE, OFFSET, TYPE)
    tl.store(out + token.to(tl.int64) * K + block * 256 + e, v, mask=mask)


@triton.jit
def unpack_rows(
    out, low, high, scale, extra, first, count, K, rows, row_bytes, unit, factor, WIDTH,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Rows first.. times `factor` as float16 [count, WIDTH] in the kernels' column order; R rows by 256 columns."""
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    block = tl.program_id(1)
    p = tl.arange(0, 256)[None, :]
    e = element_at(p)
    mask = (r < count) & (block * 256 + e < K)
    row = first + tl.minimum(r, count - 1)
    v = value(low, high, scale, extra, row, block, e, mask, rows, row_bytes, unit, LOW, HIGH, SCALE, OFFSET, TYPE)
    tl.store(out + r.to(tl.int64) * WIDTH + block * 256 + p, (v * factor).to(out.dtype.element_ty), mask=r < count)


@triton.jit(do_not_specialize=["T"])
def multiply_rows(
    x, x_scale, out, low, high, scale, extra, T, K, S, n_rows, rows, row_bytes, unit, blocks,
    LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out[p, t, r] = sum of x[t, k] w[r, k] over part p of K: R weight rows and N tokens a program, C columns a step.

    Program (rows, tokens, part); a part is `blocks` super-blocks.
    """
    part = tl.program_id(2)
    r = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros([R, N], tl.float32)
    for step in range(part * blocks * (256 // C), tl.minimum((part + 1) * blocks, S) * (256 // C)):
        block = step // (256 // C)
        e = step % (256 // C) * C + tl.arange(0, C)
        mask = (r[:, None] < n_rows) & (block * 256 + e < K)[None, :]
        w = value(
            low, high, scale, extra, r[:, None], block, e[None, :], mask, rows, row_bytes, unit,
            LOW, HIGH, SCALE, OFFSET, TYPE,
        )  # fmt: skip
        at = tl.minimum(n, T - 1)[None, :].to(tl.int64) * (S * 256) + block * 256 + place_of(e)[:, None]
        b = tl.load(x + at)
        if PRECISION == "half":
            acc = tl.dot(w.to(tl.float16), b, acc)
        else:
            acc = tl.dot(w, b.to(tl.float32), acc, input_precision=PRECISION)
    acc *= tl.load(x_scale + tl.minimum(n, T - 1))[None, :]
    row = part.to(tl.int64) * T + n[None, :]
    tl.store(out + row * n_rows + r[:, None], acc, mask=(r[:, None] < n_rows) & (n[None, :] < T))


@dataclass(frozen=True)
class Source:
    """A weight as the kernels above take it."""

    arrays: tuple[Tensor, Tensor, Tensor, Tensor]
    rows: int
    row_bytes: int
    unit: float
    form: Form
    type_name: str

    @property
    def constants(self) -> dict:
        f = self.form
        return {"LOW": f.low, "HIGH": f.high, "SCALE": f.scale, "OFFSET": f.offset, "TYPE": self.type_name}


def source_of(weight: PackedWeight) -> Source:
    """Arrays may be a group's: a row's super-blocks then stand `rows` (the group's) apart."""
    parts = weight.parts
    if "file" in parts:
        raw = parts["file"]
        return Source((raw, raw, raw, raw), 0, raw.shape[1], 1.0, Form(0, 0, "file", 0), weight.type_name)
    low = parts["low"]
    other = (parts.get("high", low), parts.get("scale", low), parts.get("d", parts.get("min", low)))
    rows = low.stride(0) // low.shape[2]
    return Source((low, *other), rows, 0, 2.0**-weight.shift, FORMS[weight.type_name], weight.type_name)


def gather(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] as float32 [T, K], the bits of the format's own arithmetic."""
    s, n_columns = source_of(weight), weight.shape[1]
    out = torch.empty((ids.numel(), n_columns), dtype=torch.float32, device=ids.device)
    if ids.numel():
        gather_rows[(ids.numel(), n_super_blocks(n_columns))](
            ids.contiguous(), out, *s.arrays, n_columns, s.rows, s.row_bytes, s.unit, **s.constants,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def unpack_to(out: Tensor, weight: PackedWeight, first: int, factor: float) -> None:
    """Rows first.. of the weight times `factor` into out [count, S * 256], columns in the kernels' order."""
    s, count = source_of(weight), out.shape[0]
    unpack_rows[(triton.cdiv(count, 4), n_super_blocks(weight.shape[1]))](
        out, *s.arrays, first, count, weight.shape[1], s.rows, s.row_bytes, s.unit, factor, out.shape[1],
        **s.constants, R=4, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def finish_kernel(
    squares, power, next_power, scale, T, n_squares, K, eps, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A token's scale from its partial sums of squares, and the power of two near its root mean square."""
    begin(PDL)
    t, i = tl.program_id(0), tl.arange(0, SIZE)
    mean = tl.sum(tl.load(squares + i * T + t, i < n_squares, 0.0), 0) / K + eps
    tl.store(next_power + t, power_near(mean))
    tl.store(scale + t, tl.load(power + t) * tl.rsqrt(mean))


def finished(a: Activation) -> Activation:
    """The activation with what was left of its norm in its scale, for kernels that do not finish norms themselves."""
    if a.norm is None:
        return a
    assert a.scale is not None
    squares, scale = a.norm.squares, torch.empty_like(a.scale)
    n, T = squares.shape
    finish_kernel[(T,)](
        squares, a.scale, a.norm.next_power, scale, T, n, float(a.n_columns), a.norm.eps, triton.next_power_of_2(n),
        num_warps=1, **overlap(scale),
    )  # fmt: skip
    return Activation(a.rows, a.n_columns, scale)


@triton.jit
def add_parts_kernel(parts, out, n, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [n] = parts [P, n], added from the first on."""
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + i, i < n, 0.0)
    for p in range(1, P):
        total += tl.load(parts + p * n + i, i < n, 0.0)
    tl.store(out + i, total, i < n)


def blocks_a_part(n_rows: int, n_blocks: int) -> int:
    """Super-blocks of K that one program walks: short walks where rows alone make too few programs. Not a function of
    the number of tokens, so a row's sum has one order."""
    n_parts = max(1, min(n_blocks, PROGRAMS // triton.cdiv(n_rows, ROWS)))
    return triton.cdiv(n_blocks, n_parts)


def multiply(a: Activation, weight: PackedWeight) -> Tensor:
    """Rows [T, K] times the weight's transpose, float32 [T, rows]; a row's sum has one order at every T.

    Float16 products, except that BF16 and F32 weights keep their precision.
    """
    s, (n_rows, n_columns) = source_of(weight), weight.shape
    n_tokens, n_blocks = a.rows.shape[0], n_super_blocks(n_columns)
    blocks = blocks_a_part(n_rows, n_blocks)
    n_parts = triton.cdiv(n_blocks, blocks)
    parts = torch.empty((n_parts, n_tokens, n_rows), dtype=torch.float32, device=a.rows.device)
    precision = {"BF16": "ieee", "F32": "ieee"}.get(weight.type_name, "half")
    multiply_rows[(triton.cdiv(n_rows, ROWS), triton.cdiv(n_tokens, TOKENS), n_parts)](
        a.rows, a.scale, parts, *s.arrays, n_tokens, n_columns, n_blocks, n_rows, s.rows, s.row_bytes,
        s.unit, blocks, **s.constants, PRECISION=precision, R=ROWS, N=TOKENS, C=COLUMNS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    if n_parts == 1:
        return parts[0]
    out = torch.empty((n_tokens, n_rows), dtype=torch.float32, device=a.rows.device)
    add_parts_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](
        parts, out, out.numel(), n_parts, SUM_BLOCK, num_warps=1, **overlap(out)
    )
    return out
