"""Quantized matmul on CUDA: upload and repack, groups, launches."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

ROW_MULTIPLE = 64  # packed rows are padded to this, so that no tile needs a mask on its loads
UPLOAD_BYTES = 64 << 20  # piece of a weight that goes through pinned memory at once
REPACK_BYTES = 64 << 20  # and that is rearranged at once on the device
NARROW_ROWS = 16


@dataclass(frozen=True)
class Config:
    """How one launch of the narrow kernel cuts its work; see `gluon.narrow`. K is cut in n_split * KW parts."""

    KW: int = 4
    WM: int = 1
    MT: int = 2
    ST: int = 3
    n_split: int = 1

    @property
    def n_rows(self) -> int:
        return 16 * self.WM * self.MT


@dataclass(frozen=True)
class Launch:
    """Weights of one type laid row after row, multiplied by one kernel.

    members: their places in the group. parts: arrays [S, rows, n], rows padded. row_start, row_width int32 [rows]: the
    first row of a row's weight and that weight's number of rows (0: padding).
    """

    type_name: str
    members: tuple[int, ...]
    n_rows: tuple[int, ...]
    parts: dict[str, Tensor]
    shift: int
    row_start: Tensor
    row_width: Tensor
    config: Config

    @property
    def n_super_blocks(self) -> int:
        return self.parts["low"].shape[0]

    @property
    def padded_rows(self) -> int:
        return self.parts["low"].shape[1]


# ---- upload


@functools.cache
def _staging(device: torch.device) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    """Two pinned buffers, and the events after which each may be filled again."""
    buffers = [torch.empty(UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return buffers, [torch.cuda.Event() for _ in range(2)]


def upload(raw: Tensor, device: torch.device) -> Tensor:
    """Bytes on the CPU (a mapped file, say) to the device through pinned memory, copies overlapping the reads."""
    if raw.device.type == "cuda":
        return raw.to(device)
    buffers, free = _staging(device)
    flat, out = raw.reshape(-1), torch.empty(raw.numel(), dtype=torch.uint8, device=device)
    for k, start in enumerate(range(0, raw.numel(), UPLOAD_BYTES)):
        piece = flat[start : start + UPLOAD_BYTES]
        buffer = buffers[k % 2][: piece.numel()]
        free[k % 2].synchronize()
        buffer.copy_(piece)
        out[start : start + piece.numel()].copy_(buffer, non_blocking=True)
        free[k % 2].record()
    return out.view(raw.shape)


# ---- pack, unpack


def pack(raw: Tensor, type_name: str, shape: tuple[int, int], device: torch.device) -> PackedWeight:
    """File bytes [rows, row_bytes] to the kernels' arrays on the device (types of `repack.FORMS`), else file bytes."""
    raw = upload(raw, device)
    shift = None
    if type_name in repack.FORMS:
        shift = repack.shift_for(float(repack.largest_scale(raw, type_name)), type_name)
    if shift is None:
        return PackedWeight(type_name, shape, device, parts={"file": raw})
    step = max(1, REPACK_BYTES // raw.shape[1])
    parts: dict[str, Tensor] = {}
    for row in range(0, shape[0], step):
        for name, piece in repack.repack(raw[row : row + step], type_name, shift).items():
            if name not in parts:
                parts[name] = piece.new_empty((piece.shape[0], shape[0], *piece.shape[2:]))
            parts[name][:, row : row + step] = piece
    return PackedWeight(type_name, shape, device, parts=parts, shift=shift)


def unpack(weight: PackedWeight) -> Tensor:
    """The file's bytes again, on the CPU."""
    if "file" in weight.parts:
        return weight.parts["file"].cpu()
    step = max(1, REPACK_BYTES // (weight.shape[1] * 2))
    pieces = []
    for row in range(0, weight.shape[0], step):
        parts = {name: part[:, row : row + step] for name, part in weight.parts.items()}
        pieces.append(repack.unrepack(parts, weight.type_name, weight.shape[1], weight.shift).cpu())
    return torch.cat(pieces)


# ---- groups


def _with_shift(weight: PackedWeight, shift: int) -> dict[str, Tensor]:
    """The weight's arrays with its scales times 2^shift instead of 2^weight.shift (exact while shift is smaller)."""
    if shift == weight.shift:
        return weight.parts
    raw = repack.unrepack(weight.parts, weight.type_name, weight.shape[1], weight.shift)
    return repack.repack(raw, weight.type_name, shift)


def _launch(members: tuple[int, ...], weights: list[PackedWeight]) -> tuple[Launch, list[PackedWeight]]:
    """One launch over weights of one type, and the weights again as views into its arrays."""
    type_name, device = weights[0].type_name, weights[0].device
    shift = min(w.shift for w in weights)
    n_rows = tuple(w.shape[0] for w in weights)
    total = sum(n_rows)
    padded = -(-total // ROW_MULTIPLE) * ROW_MULTIPLE
    held = [_with_shift(w, shift) for w in weights]
    parts = {}
    for name, first in held[0].items():
        if len(held) == 1 and padded == total and first.is_contiguous():
            parts[name] = first
            continue
        joined = first.new_zeros((first.shape[0], padded, *first.shape[2:]))
        start = 0
        for n, h in zip(n_rows, held):
            joined[:, start : start + n] = h[name]
            start += n
        parts[name] = joined
    starts = [sum(n_rows[:k]) for k in range(len(n_rows))]
    views = [
        replace(w, parts={name: part[:, s : s + n] for name, part in parts.items()}, shift=shift)
        for w, s, n in zip(weights, starts, n_rows)
    ]
    repeats = torch.tensor([*n_rows, padded - total])
    row_start = torch.repeat_interleave(torch.tensor([*starts, 0]), repeats).int().to(device)
    row_width = torch.repeat_interleave(torch.tensor([*n_rows, 0]), repeats).int().to(device)
    config = Config()
    return Launch(type_name, members, n_rows, parts, shift, row_start, row_width, config), views


def fuse(weights: tuple[PackedWeight, ...]) -> WeightGroup:
    """One launch a type. The group's `weights` are views into the launches' arrays: drop the ones given."""
    by_type: dict[str, list[int]] = {}
    for k, w in enumerate(weights):
        by_type.setdefault(w.type_name if "low" in w.parts else f"file {k}", []).append(k)
    out, launches = list(weights), []
    for members in by_type.values():
        if "low" not in weights[members[0]].parts:
            raise NotImplementedError
        launch, views = _launch(tuple(members), [weights[k] for k in members])
        launches.append(launch)
        for k, view in zip(members, views):
            out[k] = view
    return WeightGroup(tuple(out), tuple(launches))


# ---- multiply


def run(launch: Launch, a: Activation, config: Config | None = None) -> list[Tensor]:
    """One launch of the narrow kernel: float32 [T, rows_i] for each of its weights. T: 1..16."""
    from ggufspec.kernels.matmul.gluon import narrow, pair
    from ggufspec.kernels.matmul.triton import add_parts

    config = config or launch.config
    form, parts = repack.FORMS[launch.type_name], launch.parts
    n_tokens, rows, n_blocks = a.rows.shape[0], launch.padded_rows, launch.n_super_blocks
    total = sum(launch.n_rows)
    n_iter = -(-n_blocks // (config.KW * config.n_split))
    out = torch.empty((config.n_split, total * n_tokens), dtype=torch.float32, device=a.rows.device)
    power = launch.shift - 24
    minimum = 2.0**power if form.scale == "half_min" else -(2.0**power)
    low = parts["low"]
    assert a.scale is not None
    narrow[(rows // config.n_rows, config.n_split)](
        low, parts.get("high", low), parts["scale"], parts.get("d", parts.get("min", low)),
        a.rows, a.scale, out, launch.row_start, launch.row_width,
        n_blocks, rows, n_tokens, out.stride(0), n_iter, 2.0**-power, pair(minimum), pair(-1024 * minimum),
        LOW=form.low, HIGH=form.high, SCALE=form.scale, OFFSET=form.offset, N=8 if n_tokens <= 8 else 16,
        KW=config.KW, WM=config.WM, MT=config.MT, ST=config.ST, num_warps=config.KW * config.WM,
    )  # fmt: skip
    y = out[0] if config.n_split == 1 else add_parts(out)
    return [piece.view(n_tokens, n) for n, piece in zip(launch.n_rows, y.split([n * n_tokens for n in launch.n_rows]))]


def matmul(a: Activation, group: WeightGroup) -> tuple[Tensor, ...]:
    """Rows [T, K], T of 1..16, times each weight's transpose."""
    out: list[Tensor] = [a.rows] * len(group.weights)
    for launch in group.launches:
        for k, y in zip(launch.members, run(launch, a)):
            out[k] = y
    return tuple(out)
