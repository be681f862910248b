"""Quantized matmul on CUDA: upload and repack, groups, launches."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

ROW_MULTIPLE = 128  # packed rows are padded to this, so that no tile needs a mask on its loads
UPLOAD_BYTES = 64 << 20  # piece of a weight that goes through pinned memory at once
REPACK_BYTES = 64 << 20  # and that is rearranged at once on the device
NARROW_ROWS = 16
PART_COUNTS = (1, 4, 16, 64, 256)  # what the kernel is compiled for; a tile in fewer parts leaves some empty


@dataclass(frozen=True)
class Config:
    """How the narrow kernel cuts a launch; see `gluon.narrow`. per_sm: programs a multiprocessor runs at once.

    Never a function of the number of tokens: the order of sums follows from it.
    """

    KW: int = 2
    WM: int = 4
    MT: int = 2
    ST: int = 2
    per_sm: int = 2

    @property
    def n_rows(self) -> int:
        return 16 * self.WM * self.MT

    @property
    def n_registers(self) -> int:
        """Registers a thread may have for `per_sm` programs to fit."""
        return min(255, 65536 // (32 * self.KW * self.WM * self.per_sm) // 8 * 8)


@dataclass(frozen=True)
class Launch:
    """Weights of one type laid row after row, multiplied by one kernel.

    members: their places in the group. parts: arrays [S, rows, n], rows padded. row_start, row_width int32 [rows]: the
    first row of a row's weight and that weight's number of rows (0: padding). arrived: int32 zeros, the kernel's
    counters, so one launch must not run on two streams at once.
    """

    type_name: str
    members: tuple[int, ...]
    n_rows: tuple[int, ...]
    parts: dict[str, Tensor]
    shift: int
    row_start: Tensor
    row_width: Tensor
    arrived: Tensor
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
    arrived = torch.zeros(padded // 16, dtype=torch.int32, device=device)
    return Launch(type_name, members, n_rows, parts, shift, row_start, row_width, arrived, Config()), views


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


@functools.cache
def _n_multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@dataclass(frozen=True)
class Cut:
    """A launch's work in equal shares: units a tile, units in all, units a program, parts a tile may be in."""

    units: int
    n_units: int
    per_program: int
    n_parts: int

    @property
    def n_programs(self) -> int:
        return -(-self.n_units // self.per_program)


@functools.cache
def cut(n_rows: int, n_blocks: int, config: Config, n_programs: int) -> Cut:
    """Shares of `n_rows` (padded) rows by `n_blocks` super-blocks for about `n_programs` programs."""
    units = -(-n_blocks // config.KW)
    n_tiles = n_rows // config.n_rows
    per_program = -(-units * n_tiles // n_programs)
    parts = max(((t + 1) * units - 1) // per_program - t * units // per_program + 1 for t in range(n_tiles))
    return Cut(units, units * n_tiles, per_program, next(n for n in PART_COUNTS if n >= parts))


def run(
    launch: Launch, a: Activation, config: Config | None = None, pdl: bool = False, n_parts: int = 1
) -> list[Tensor]:
    """One launch of the narrow kernel: float32 [T, rows_i] for each of its weights. T: 1..16.

    pdl: start before the previous kernel has ended and read weights meanwhile (capability 9.0 on). n_parts: compile
    for at least so many parts a tile.
    """
    from ggufspec.kernels.matmul.gluon import narrow, pair

    config = config or launch.config
    form, parts, low = repack.FORMS[launch.type_name], launch.parts, launch.parts["low"]
    n_tokens, device = a.rows.shape[0], a.rows.device
    n_columns = 8 if n_tokens <= 8 else 16
    share = cut(launch.padded_rows, launch.n_super_blocks, config, config.per_sm * _n_multiprocessors(device.index))
    n_parts = max(n_parts, share.n_parts)
    out = torch.empty(sum(launch.n_rows) * n_tokens, dtype=torch.float32, device=device)
    n_partial = launch.padded_rows * n_parts * n_columns if n_parts > 1 else 1
    partial = torch.empty(n_partial, dtype=torch.float32, device=device)
    power = launch.shift - 24
    minimum = 2.0**power if form.scale == "half_min" else -(2.0**power)
    assert a.scale is not None
    narrow[(share.n_programs,)](
        low, parts.get("high", low), parts["scale"], parts.get("d", parts.get("min", low)),
        a.rows, a.scale, out, launch.row_start, launch.row_width, partial, launch.arrived,
        launch.n_super_blocks, launch.padded_rows, n_tokens, share.units, share.n_units, share.per_program,
        2.0**-power, pair(minimum), pair(-1024 * minimum),
        LOW=form.low, HIGH=form.high, SCALE=form.scale, OFFSET=form.offset, N=n_columns,
        KW=config.KW, WM=config.WM, MT=config.MT, ST=config.ST, PARTS=n_parts, PDL=pdl,
        num_warps=config.KW * config.WM, maxnreg=config.n_registers, launch_pdl=pdl,
    )  # fmt: skip
    sizes = [n * n_tokens for n in launch.n_rows]
    return [piece.view(n_tokens, n) for n, piece in zip(launch.n_rows, out.split(sizes))]


def matmul(a: Activation, group: WeightGroup) -> tuple[Tensor, ...]:
    """Rows [T, K], T of 1..16, times each weight's transpose."""
    out: list[Tensor] = [a.rows] * len(group.weights)
    for launch in group.launches:
        for k, y in zip(launch.members, run(launch, a)):
            out[k] = y
    return tuple(out)
