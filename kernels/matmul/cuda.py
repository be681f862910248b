"""Quantized matmul on CUDA: upload and repack, groups, and which kernel runs for how many rows.

rows      kernel
1..192    `gluon.narrow`, 8 to 64 tokens a tile: one order of sums, so a row's bits are the same at each of them
193..     weights to float16 (`gluon.unpack`), then the library's product, float32 sums: `wide`
F32, scales that float16 cannot hold, and cards below capability 8.0 take `triton.multiply` instead of `gluon.narrow`.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ggufspec.errors import UnsupportedError
from ggufspec.kernels import tune
from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.weight import Activation, PackedWeight, WeightGroup

ROW_MULTIPLE = 128  # packed rows are padded to this, so that no tile needs a mask on its loads
UPLOAD_BYTES = 64 << 20  # piece of a weight that goes through pinned memory at once
REPACK_BYTES = 64 << 20  # and that is rearranged at once on the device
NARROW_TOKENS = 192  # above, unpacking once and multiplying in the library is quicker
TOKEN_TILES = (8, 16, 32)
SCRATCH_BYTES = 512 << 20  # float16 weights unpacked at a time for wide batches
MINIMUM_CAPABILITY = (7, 5)
MOST_PARTS = 8  # a tile's parts cross memory and are added at its end: few tiles are not cut finer than this


@dataclass(frozen=True)
class Config:
    """How the narrow kernel cuts a launch; see `gluon.narrow`. per_sm: programs a multiprocessor runs at once.

    Never a function of the number of tokens: the order of sums follows from it.
    """

    KW: int = 1
    WM: int = 4
    MT: int = 2
    ST: int = 3
    per_sm: int = 2

    @property
    def n_rows(self) -> int:
        return 16 * self.WM * self.MT

    def n_registers(self) -> int:
        """Registers a thread may have for `per_sm` programs to fit."""
        return min(255, 65536 // (32 * self.KW * self.WM * self.per_sm) // 8 * 8)

    def n_stages(self, block_bytes: int, n_tokens: int, shared_bytes: int, wide: int = 2) -> int:
        """Stages that fit in so much shared memory, at most `ST` (`wide` for wide tiles), perhaps less than 2."""
        stage = self.KW * (self.n_rows * block_bytes + n_tokens * repack.BLOCK * 2)
        return min(self.ST if n_tokens <= 16 else wide, shared_bytes // stage)


# by measurement on one H200, for types and cards without entries in `kernels.tune`
USUAL = Config(ST=4)
SMALL = Config(MT=1, ST=3, per_sm=4)
SMALL_BYTES = 32 << 20
FLOATS = Config(MT=1, ST=3, per_sm=2)  # 16 bits a weight: stages are large


def config_for(capability: tuple[int, int], type_name: str, rows: int, blocks: int, block_bytes: int) -> Config:
    """The tuned config of the nearest shape, or a rule: small launches want more and shorter programs."""
    tuned = tune.nearest(capability, type_name, rows, blocks)
    if tuned is not None:
        return Config(**tuned)
    if block_bytes >= 2 * repack.BLOCK:
        return FLOATS
    return SMALL if rows * blocks * block_bytes < SMALL_BYTES else USUAL


@dataclass(frozen=True)
class Launch:
    """Weights of one type laid row after row, multiplied by one kernel.

    members: their places in the group. parts: arrays [S, rows, n], rows padded. row_start, row_width int32 [rows]: the
    first row of a row's weight and that weight's number of rows (0: padding). A device's launches run one after
    another: they share the slots through which the parts of tiles go.
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

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one row's super-block; every launch asks for it."""
        return block_bytes_of(self.parts)


@functools.cache
def capability(index: int | None) -> tuple[int, int]:
    """The card's compute capability; UnsupportedError below the least the kernels run on."""
    found = torch.cuda.get_device_capability(index)
    if found < MINIMUM_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise UnsupportedError(
            f"{name} has compute capability {found[0]}.{found[1]}; the kernels need "
            f"{MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]} or later: run on the CPU or another card"
        )
    return found


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
    capability(device.index)
    with torch.cuda.device(device):
        return _pack(upload(raw, device), type_name, shape, device)


def _pack(raw: Tensor, type_name: str, shape: tuple[int, int], device: torch.device) -> PackedWeight:
    """Bytes on the device to arrays."""
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


def block_bytes_of(parts: dict[str, Tensor]) -> int:
    """Bytes of one row's super-block over all arrays."""
    return sum(p[0, 0].numel() * p.element_size() for p in parts.values())


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
    if device.type == "cuda":
        from ggufspec.kernels.matmul import narrow

        narrow.slots(parts["low"].device)
    blocks = parts["low"].shape[0]
    config = config_for(capability(device.index), type_name, total, blocks, block_bytes_of(parts))
    return Launch(type_name, members, n_rows, parts, shift, row_start, row_width, config), views


def interleave(first: PackedWeight, second: PackedWeight, n: int) -> Launch:
    """One launch of two weights of a type and shape, n rows of each in turn."""
    shift, (n_rows, _) = min(first.shift, second.shift), first.shape
    parts = {}
    pieces = _with_shift(first, shift), _with_shift(second, shift)
    for name, piece in pieces[0].items():
        joined = piece.new_empty((piece.shape[0], n_rows // n, 2, n, *piece.shape[2:]))
        for k, held in enumerate(pieces):
            joined[:, :, k] = held[name].unflatten(1, (-1, n))
        parts[name] = joined.flatten(1, 3)
    both = PackedWeight(first.type_name, (2 * n_rows, first.shape[1]), first.device, parts=parts, shift=shift)
    return _launch((0,), [both])[0]


def fuse(weights: tuple[PackedWeight, ...]) -> WeightGroup:
    """One launch a type. The group's `weights` are views into the launches' arrays: drop the ones given."""
    by_type: dict[str, list[int]] = {}
    for k, w in enumerate(weights):
        if "low" in w.parts:
            by_type.setdefault(w.type_name, []).append(k)
    out, launches = list(weights), []
    for members in by_type.values():
        launch, views = _launch(tuple(members), [weights[k] for k in members])
        launches.append(launch)
        for k, view in zip(members, views):
            out[k] = view
    return WeightGroup(tuple(out), tuple(launches))


# ---- multiply


def matmul(a: Activation, group: WeightGroup) -> tuple[Tensor, ...]:
    """Rows [T, K] times each weight's transpose."""
    from ggufspec.kernels.matmul import narrow, triton, wide

    n_tokens, index = a.rows.shape[0], a.rows.device.index
    if n_tokens == 0:
        return tuple(a.rows.new_empty((0, w.shape[0]), dtype=torch.float32) for w in group.weights)
    if n_tokens > NARROW_TOKENS:
        return wide.multiply(a, group)
    out: dict[int, Tensor] = {}
    if capability(index) >= (8, 0):
        for launch in group.launches:
            out.update(zip(launch.members, narrow.run(launch, a)))
    if len(out) < len(group.weights):
        a = triton.finished(a)
    return tuple(out[k] if k in out else triton.multiply(a, w) for k, w in enumerate(group.weights))
