"""Products of many rows on CUDA: a launch's weights to float16 once, then one product of the library's.

    a = prepare(x)                       # T rows, more than the narrow kernel takes: one scale for all of them
    y = multiply_launch(a, launch)       # [T, padded rows] float32, in the order of the launch's rows
    outs = multiply(a, group)            # each weight's columns: views into such results

Activations of wide batches are divided by FIXED_SCALE, the same for every row, so that this factor and that of the
float16 weights are one number, which the library multiplies its sums by before it writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.cuda import SCRATCH_BYTES, Launch, capability
from ggufspec.kernels.matmul.values import FIXED_SCALE, fixed_half
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

SCALE = float(FIXED_SCALE.value)
COLUMNS = 2048  # of a row that a program of `prepare_kernel` takes
UNPACK_TILE = 64  # weight rows of a program of `gluon.unpack`


# ---- activations


@triton.jit
def arranged(v, N: tl.constexpr):
    """Values of N columns (whole super-blocks) in the file's order to the kernels' order, see `repack`."""
    v = tl.reshape(v, [N // 256, 2, 4, 8, 4])
    return tl.reshape(tl.permute(v, (0, 3, 2, 4, 1)), [N])


@triton.jit
def prepare_kernel(x_ptr, rows_ptr, K, x_row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, piece): COLUMNS columns of x / FIXED_SCALE as float16 in the kernels' order."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    v = tl.load(x_ptr + row * x_row + e, e < K, 0.0).to(tl.float32)
    tl.store(rows_ptr + row * WIDTH + e, arranged(fixed_half(v), COLUMNS), e < WIDTH)


def empty_rows(T: int, K: int, device: torch.device) -> Activation:
    """An activation of T rows with one scale, for a kernel to fill."""
    width = repack.n_super_blocks(K) * repack.BLOCK
    return Activation(torch.empty((T, width), dtype=torch.float16, device=device), K, fixed=SCALE)


def piece_of(width: int) -> int:
    """Columns a program takes of a row that wide: a power of two of super-blocks."""
    return min(COLUMNS, triton.next_power_of_2(width))


def prepare(x: Tensor) -> Activation:
    """x [T, K] to float16 [T, S * 256] in the kernels' order, divided by FIXED_SCALE."""
    x = x if x.stride(1) == 1 else x.contiguous()
    T, K = x.shape
    a = empty_rows(T, K, x.device)
    width = a.rows.shape[1]
    piece = piece_of(width)
    prepare_kernel[(T, triton.cdiv(width, piece))](
        x, a.rows, K, x.stride(0), width, piece, num_warps=4, enable_fp_fusion=True
    )
    return a


# ---- weights


def half_factor(weight: PackedWeight | Launch) -> float:
    """What float16 weights are multiplied by to lie in the middle of float16's range."""
    return 2.0 ** (weight.shift - 24) if "low" in weight.parts else 1.0


def unpack_half(out: Tensor, weight: PackedWeight, first: int) -> None:
    """Rows first.. times `half_factor` into out [count, S * 256], float16, columns in the kernels' order."""
    from ggufspec.kernels.matmul import triton as plain

    count, n_blocks = out.shape[0], repack.n_super_blocks(weight.shape[1])
    if "low" not in weight.parts or capability(weight.device.index) < (8, 0):
        plain.unpack_to(out, weight, first, half_factor(weight))
        return
    from ggufspec.kernels.matmul.gluon import unpack
    from ggufspec.kernels.matmul.ptx import pair

    source = plain.source_of(weight)
    minimum = half_factor(weight) * (1 if source.form.scale == "half_min" else -1)
    unpack[(-(-count // UNPACK_TILE), n_blocks)](
        *source.arrays, out, n_blocks, source.rows, first, count, pair(minimum), pair(-1024 * minimum),
        LOW=source.form.low, HIGH=source.form.high, SCALE=source.form.scale, OFFSET=source.form.offset,
        WM=4, MT=1, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


scratch_of: dict[torch.device, Tensor] = {}  # see `scratch`
_recorded: dict[int, Tensor] = {}  # by address: buffers that graphs write to, kept after larger ones take their place


def scratch(n: int, device: torch.device) -> Tensor:
    """n float16 of the device's one buffer for unpacked weights: what a product reads until the next is queued.

    One stream a device uses it, that of the model's forward, graphs and all.
    """
    held = scratch_of.get(device)
    if held is None or held.numel() < n:
        scratch_of.pop(device, None)
        held = scratch_of[device] = torch.empty(n, dtype=torch.float16, device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded[held.data_ptr()] = held
    return held[:n]


# ---- products


def product(a: Tensor, w: Tensor, factor: float, out: Tensor) -> None:
    """out = factor * a w^T: a [T, n], w [R, n] float16, sums in float32, out [T, R] float32 with any row stride."""
    # Given twice the sums' type and beta 0, the first argument is not read: the library scales its sums by alpha.
    torch.ops.aten.addmm.dtype_out(a[:1, :1], a, w.T, torch.float32, beta=0, alpha=factor, out=out)


def multiply_rows(a: Activation, weight: PackedWeight) -> Tensor:
    """[T, K] times the transpose of a weight, all rows its arrays hold: [T, rows] float32."""
    n_rows, width = weight.shape[0], a.rows.shape[1]
    out = torch.empty((a.rows.shape[0], n_rows), dtype=torch.float32, device=a.rows.device)
    factor = (1.0 if a.fixed is None else a.fixed) / half_factor(weight)
    step = min(n_rows, max(256, SCRATCH_BYTES // 2 // width // 256 * 256))
    for first in range(0, n_rows, step):
        count = min(step, n_rows - first)
        w = scratch(count * width, a.rows.device).view(count, width)
        unpack_half(w, weight, first)
        product(a.rows, w, factor, out[:, first : first + count])
    if a.fixed is None:  # rows prepared for the narrow kernel, each with its own scale
        assert a.scale is not None
        out *= a.scale.unsqueeze(1)
    return out


def multiply_launch(a: Activation, launch: Launch) -> Tensor:
    """All weights of a launch at once: [T, padded rows] float32, columns in the order of the launch's rows."""
    joined = PackedWeight(
        launch.type_name, (launch.padded_rows, a.n_columns), a.rows.device, parts=launch.parts, shift=launch.shift
    )
    return multiply_rows(a, joined)


def multiply(a: Activation, group: WeightGroup) -> tuple[Tensor, ...]:
    """One [T, rows_i] float32 per weight of the group: views of a launch's common result."""
    out: dict[int, Tensor] = {}
    for launch in group.launches:
        columns = multiply_launch(a, launch)[:, : sum(launch.n_rows)]
        out.update(zip(launch.members, columns.split(launch.n_rows, 1)))
    return tuple(out[k] if k in out else multiply_rows(a, w) for k, w in enumerate(group.weights))
