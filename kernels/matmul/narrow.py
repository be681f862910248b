"""The narrow product's launches: how a launch's work is cut, and what follows the sums in the same kernel.

    run(launch, a)                                  products, float32, one tensor a weight
    run_added(launch, a, stream, weight, before)    stream + product, and that as the next product's normed input
    run_gated(launch, a, gelu)                      activation(gate) * up of a launch of `cuda.interleave`, prepared
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.cuda import (
    MOST_PARTS,
    NARROW_TOKENS,
    TOKEN_TILES,
    Config,
    Launch,
    capability,
)
from ggufspec.kernels.matmul.joint import COLUMNS, ROWS, Joint
from ggufspec.kernels.matmul.weight import Activation, Normed


@functools.cache
def card(index: int | None) -> tuple[int, int, int]:
    """Multiprocessors, and the shared memory of a multiprocessor and the most one program may have."""
    properties = torch.cuda.get_device_properties(index)
    return (
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


SQUARES = 64  # partial sums of squares that a kernel takes at least: an input that was normed at once has only one
MOST_ROWS = 512  # weight rows that a multiprocessor's programs may work on at a time
RESERVED_BYTES = 2048  # of shared memory, a program, for the driver and the compiler's own use


TOGETHER_TILE = 64  # tokens, of tiles that four warps multiply at once
WIDE_ROWS = 128  # weight rows of tiles that `WIDE` is about


class Wide(NamedTuple):
    """Tokens from which a product's work is divided otherwise than usual, and the most stages of tiles of 64 tokens."""

    from_tokens: int
    stages: int = 2


# By type and ending, where it was quicker on one H200 (docs/performance.md). Not a guess for others: "added", and Q6_K,
# gained little or lost.
WIDE = {
    ("Q4_K", "rows"): Wide(17), ("Q4_K", "silu"): Wide(17, 3), ("Q4_K", "gelu"): Wide(17, 3),
    ("Q8_0", "silu"): Wide(33, 3), ("Q8_0", "gelu"): Wide(33, 3),
}  # fmt: skip
NEVER = Wide(NARROW_TOKENS + 1)


@functools.cache
def slots(device: torch.device) -> Tensor:
    """Room for one part of a tile from every program of a launch, float32, empty; for all launches on the device.

    Made when weights are loaded, before anything is captured.
    """
    from ggufspec.kernels.matmul.values import EMPTY

    n = slots_bytes(card(device.index)[0]) // 4
    return torch.full((n,), EMPTY.value, dtype=torch.int32, device=device).view(torch.float32)


def slots_bytes(n_multiprocessors: int) -> int:
    return n_multiprocessors * MOST_ROWS * NARROW_TOKENS * 4


def tile_and_stages(config: Config, block_bytes: int, n_tokens: int, shared: int, most: int) -> tuple[int, int]:
    """Tokens a tile, and stages: room is left for `per_sm` programs where two stages allow it.

    shared: bytes of shared memory of a multiprocessor; most: what one program may have.
    """
    tile = next((n for n in TOKEN_TILES if n >= n_tokens), TOKEN_TILES[-1])
    while True:
        for room in (min(shared // config.per_sm, most), most):
            stages = config.n_stages(block_bytes, tile, room - RESERVED_BYTES)
            if stages >= 2:
                return tile, stages
        tile //= 2


def spare_stages(config: Config, block_bytes: int, tile: int, stages: int, shared: int, most: int) -> int:
    """Stages of activations to allocate on top, for `per_sm` programs to take all shared memory of a multiprocessor.

    A launch's programs start where those of the launch before have ended. With room for more, some multiprocessors
    would get more than their share, and the launch would wait for those. None where warps split K: how much their sums
    need besides is the compiler's affair.
    """
    if config.KW > 1:
        return 0
    activations = config.KW * tile * repack.BLOCK * 2
    used = stages * (config.KW * config.n_rows * block_bytes + activations)
    return max(0, min(shared // config.per_sm, most) - RESERVED_BYTES - used) // activations


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
    per_program = max(-(-units * n_tiles // n_programs), -(-units // (MOST_PARTS - 1)))
    parts = max(((t + 1) * units - 1) // per_program - t * units // per_program + 1 for t in range(n_tiles))
    return Cut(units, units * n_tiles, per_program, parts)


@dataclass(frozen=True)
class Shape:
    """What depends on the number of tokens: of a tile, stages, spare ones, registers of a thread, parts of a tile.

    together: four warps multiply at once. None of it bears on the order of a sum.
    """

    tile: int
    stages: int
    spare: int
    n_registers: int
    together: bool = False
    n_parts: int = 0


def shape_for(
    config: Config, block_bytes: int, n_tokens: int, shared: int, most: int, wide: Wide, hopper: bool
) -> Shape:
    """The shape for so many tokens. shared, most: as of `tile_and_stages`.

    A tile of 32 tokens has all registers it can use, which can leave room for fewer programs than `per_sm`. Where
    `wide` says so it has fewer, and programs run beside each other; above 32 tokens four warps multiply together.
    """
    is_wide = n_tokens >= wide.from_tokens and config.KW == 1 and config.n_rows == WIDE_ROWS
    if is_wide and hopper and n_tokens > TOKEN_TILES[-1]:
        stages = config.n_stages(block_bytes, TOGETHER_TILE, most - RESERVED_BYTES, wide.stages)
        if stages >= 2:
            return Shape(TOGETHER_TILE, stages, 0, 255, together=True)
    tile, stages = tile_and_stages(config, block_bytes, n_tokens, shared, most)
    spare = spare_stages(config, block_bytes, tile, stages, shared, most)
    few = tile <= 16 or (is_wide and n_tokens <= tile)
    return Shape(tile, stages, spare, config.n_registers() if few else 255)


@dataclass(frozen=True)
class Piece:
    """The tokens of one launch of the kernel, and its shape. first: a multiple of its tile."""

    first: int
    n_tokens: int
    shape: Shape


def pieces_for(
    config: Config, block_bytes: int, n_tokens: int, shared: int, most: int, wide: Wide, hopper: bool
) -> tuple[Piece, ...]:
    """The launches for so many tokens, arguments as of `shape_for`.

    A tile of 64 tokens takes as long half empty as full: up to 32 tokens after full ones are a launch of their own.
    """
    shape = shape_for(config, block_bytes, n_tokens, shared, most, wide, hopper)
    rest = n_tokens % shape.tile
    if not shape.together or not 0 < rest <= TOKEN_TILES[-1]:
        return (Piece(0, n_tokens, shape),)
    own = shape_for(config, block_bytes, rest, shared, most, wide, hopper)
    return Piece(0, n_tokens - rest, shape), Piece(n_tokens - rest, rest, own)


@dataclass(frozen=True)
class Ending:
    """What follows a tile's sums, see `gluon.narrow`: its name, tensors and sizes in the kernel's order."""

    name: str
    out: Tensor
    stream: Tensor
    weight: Tensor
    power: Tensor
    stream_out: Tensor
    side: Tensor
    n_out: int = 0
    out_width: int = 0
    joint: Joint | None = None  # where other ranks have parts of the sums


def launch_narrow(
    launch: Launch, a: Activation, end: Ending, config: Config, share: Cut, piece: Piece, pdl: bool
) -> None:
    """Launch the kernel for a piece of the tokens."""
    from ggufspec.kernels.matmul.gluon import narrow
    from ggufspec.kernels.matmul.ptx import pair

    shape = piece.shape
    form, parts, low = repack.FORMS[launch.type_name], launch.parts, launch.parts["low"]
    WM, MT = (config.n_rows // 16, 1) if shape.together else (config.WM, config.MT)
    power = launch.shift - 24
    minimum = 2.0**power if form.scale == "half_min" else -(2.0**power)
    assert a.scale is not None
    norm = a.norm
    n_squares = 0 if norm is None else norm.squares.shape[0]
    squares, next_power, eps = (a.scale, a.scale, 0.0) if norm is None else (norm.squares, norm.next_power, norm.eps)
    joint = end.joint
    boxes, half, rank, ranks = (launch.row_start, 0, 0, 1) if joint is None else (
        joint.boxes, joint.half, joint.rank, joint.size
    )  # fmt: skip
    narrow[(share.n_programs, -(-piece.n_tokens // shape.tile))](
        low, parts.get("high", low), parts.get("scale", low), parts.get("d", parts.get("min", low)),
        a.rows, a.scale, end.out, launch.row_start, launch.row_width, slots(a.rows.device),
        squares, next_power, end.stream, end.weight, end.power, end.stream_out, end.side, boxes, half,
        launch.n_super_blocks, launch.padded_rows, a.rows.shape[0], piece.first // shape.tile,
        share.units, share.n_units, share.per_program, 2.0**-power, pair(minimum), pair(-1024 * minimum), n_squares,
        float(a.n_columns), eps, end.n_out, end.out_width,
        LOW=form.low, HIGH=form.high, SCALE=form.scale, OFFSET=form.offset, N=shape.tile,
        KW=config.KW, WM=WM, MT=MT, TOGETHER=shape.together, ST=shape.stages, PARTS=shape.n_parts, PDL=pdl,
        SQUARES=max(SQUARES, 1 << (n_squares - 1).bit_length()) if n_squares else 0, END=end.name, SPARE=shape.spare,
        RANK=rank, RANKS=ranks, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=config.KW * WM, maxnreg=shape.n_registers, launch_pdl=pdl,
        enable_fp_fusion=True,
    )  # fmt: skip


@functools.cache
def plan(
    index: int | None, rows: int, n_blocks: int, block_bytes: int, n_tokens: int, config: Config, wide: Wide
) -> tuple[Cut, tuple[Piece, ...]]:
    """How a launch is cut on a card: its shares, and its tokens; with spare stages, for launches that overlap."""
    n_multiprocessors, shared, most = card(index)
    assert config.per_sm * config.n_rows <= MOST_ROWS, f"more rows than a multiprocessor's {MOST_ROWS}: {config}"
    hopper = (9, 0) <= capability(index) < (10, 0)
    pieces = pieces_for(config, block_bytes, n_tokens, shared, most, wide, hopper)
    return cut(rows, n_blocks, config, config.per_sm * n_multiprocessors), pieces


def start(
    launch: Launch, a: Activation, end: Ending, config: Config | None = None, pdl: bool | None = None,
    n_parts: int = 1, shape: Shape | None = None,
) -> None:  # fmt: skip
    """pdl: start before the previous kernel has ended and read weights meanwhile (default: from capability 9.0 on).

    n_parts: compile for at least so many parts a tile. shape: for all tokens, instead of what is planned for them.
    """
    config, index = config or launch.config, a.rows.device.index
    wide = WIDE.get((launch.type_name, end.name), NEVER)
    n_tokens = a.rows.shape[0]
    share, pieces = plan(index, launch.padded_rows, launch.n_super_blocks, launch.block_bytes, n_tokens, config, wide)
    if shape is not None:
        pieces = (Piece(0, n_tokens, shape),)
    pdl = capability(index) >= (9, 0) if pdl is None else pdl
    for piece in pieces:
        spare = piece.shape.spare if pdl else 0
        own = replace(piece.shape, spare=spare, n_parts=max(n_parts, share.n_parts))
        launch_narrow(launch, a, end, config, share, replace(piece, shape=own), pdl)


def run(launch: Launch, a: Activation, **choices: Any) -> list[Tensor]:
    """Float32 [T, rows_i] for each of the launch's weights. T: 1..NARROW_TOKENS. choices: as of `start`."""
    n_tokens = a.rows.shape[0]
    assert a.scale is not None
    out = torch.empty(sum(launch.n_rows) * n_tokens, dtype=torch.float32, device=a.rows.device)
    start(launch, a, Ending("rows", out, out, out, out, out, out), **choices)
    sizes = [n * n_tokens for n in launch.n_rows]
    return [piece.view(n_tokens, n) for n, piece in zip(launch.n_rows, out.split(sizes))]


def run_added(
    launch: Launch, a: Activation, stream: Tensor, weight: Tensor, eps: float, power: Tensor,
    joint: Joint | None = None, **choices: Any,
) -> tuple[Tensor, Activation]:  # fmt: skip
    """stream [T, D] + the product, and that times weight / power [T] as the input of a product yet to be normed.

    joint: the product is a part, as all ranks have one; the parts' sum is added. T: at most `joint.ROWS`.
    """
    if joint is not None:
        choices["config"] = joint.config
    n_tokens, D = stream.shape
    width = repack.n_super_blocks(D) * repack.BLOCK
    total = torch.empty_like(stream)
    rows = (torch.empty if width == D else torch.zeros)((n_tokens, width), dtype=torch.float16, device=stream.device)
    n_tiles = launch.padded_rows // (choices.get("config") or launch.config).n_rows
    squares = torch.empty((n_tiles, n_tokens), dtype=torch.float32, device=stream.device)
    start(launch, a, Ending("added", rows, stream, weight, power, total, squares, D, width, joint), **choices)
    return total, Activation(rows, D, power, Normed(squares, torch.empty_like(power), eps))


def run_gated(launch: Launch, a: Activation, gelu: bool, **choices: Any) -> Activation:
    """activation(gate) * up of a launch of pairs: prepared rows."""
    n_tokens, F = a.rows.shape[0], launch.n_rows[0] // 2
    width = repack.n_super_blocks(F) * repack.BLOCK
    rows = (torch.empty if width == F else torch.zeros)((n_tokens, width), dtype=torch.float16, device=a.rows.device)
    scale = torch.empty(n_tokens, dtype=torch.float32, device=a.rows.device)
    end = Ending("gelu" if gelu else "silu", rows, scale, scale, scale, scale, scale, F, width)
    start(launch, a, end, **choices)
    return Activation(rows, F, scale)
