"""The narrow product's launches: how a launch's work is cut, and what follows the sums in the same kernel.

    step, outs = rows_step(launch, a)                             products, float32, one tensor a weight
    step, (x, n) = added_step(launch, a, x, weight, eps, power)   x + product, and that as a product's normed input
    step, a = gated_step(launch, a, gelu)                         activation(gate) * up of interleaved rows
    start(step)                                                   one product a launch; `chain` runs several in one
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.cuda import MOST_PARTS, TOKEN_TILES, Config, Launch, block_bytes_of, capability
from ggufspec.kernels.matmul.product import ENDS, Product, hide
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


RESERVED_BYTES = 2048  # of shared memory, a program, for the driver and the compiler's own use


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


@dataclass(frozen=True)
class Cut:
    """A launch's work in shares: units a tile, units in all, units a program, parts a tile may be in (1: none is cut,
    and programs take whole tiles, as evenly as these allow)."""

    units: int
    n_units: int
    per_program: int
    n_parts: int
    n_programs: int


@functools.cache
def cut(n_rows: int, n_blocks: int, config: Config, n_programs: int) -> Cut:
    """Shares of `n_rows` (padded) rows by `n_blocks` super-blocks for about `n_programs` programs."""
    units = -(-n_blocks // config.KW)
    n_tiles = n_rows // config.n_rows
    if config.whole:
        return Cut(units, units * n_tiles, units, 1, min(n_tiles, n_programs))
    per_program = max(-(-units * n_tiles // n_programs), -(-units // (MOST_PARTS - 1)))
    parts = max(((t + 1) * units - 1) // per_program - t * units // per_program + 1 for t in range(n_tiles))
    # the kernel takes one part to mean that programs hold whole tiles
    return Cut(units, units * n_tiles, per_program, max(parts, 2), -(-units * n_tiles // per_program))


@dataclass(frozen=True)
class Ending:
    """What follows a tile's sums, see `epilogue.finish`: its name, tensors and sizes; `none` stands for absent ones."""

    name: str
    out: Tensor
    none: Tensor
    stream: Tensor | None = None
    weight: Tensor | None = None
    power: Tensor | None = None
    stream_out: Tensor | None = None
    side: Tensor | None = None
    n_out: int = 0
    out_width: int = 0


@dataclass(frozen=True)
class Step:
    """One product of a launch of the kernel. waits: its input comes from a product before it in the same launch."""

    launch: Launch
    a: Activation
    end: Ending
    waits: bool = False


def product(step: Step, share: Cut, tile: int, n_parts: int, form: int, extra: Tensor) -> Product:
    """tile: tokens a tile; n_parts: parts a tile may be in; form: of the launch's; extra: for a missing array."""
    from ggufspec.kernels.matmul.ptx import pair

    launch, a, end, parts = step.launch, step.a, step.end, step.launch.parts
    low = parts["low"]
    n_tiles = -(-a.rows.shape[0] // tile)
    n_partial = n_tiles * launch.padded_rows * n_parts * tile if n_parts > 1 else 1
    power = launch.shift - 24
    minimum = 2.0**power if repack.FORMS[launch.type_name].scale == "half_min" else -(2.0**power)
    assert a.scale is not None
    none, norm = a.scale, a.norm
    is_rows = end.name == "rows"
    return hide(Product(
        low, parts.get("high", low), parts.get("scale", low), parts.get("d", parts.get("min", extra)),
        a.rows, a.scale, none if norm is None else norm.squares, none if norm is None else norm.next_power,
        end.out if is_rows else none, a.rows if is_rows else end.out,
        *(none if t is None else t for t in (end.side, end.stream, end.stream_out, end.weight, end.power)),
        launch.row_start, launch.row_width,
        torch.empty(n_partial, dtype=torch.float32, device=low.device), launch.arrived,
        2.0**-power, float(a.n_columns), 0.0 if norm is None else norm.eps, pair(minimum), pair(-1024 * minimum),
        launch.n_super_blocks, launch.padded_rows, share.units, share.n_units, share.per_program,
        0 if norm is None else norm.squares.shape[0], end.n_out, end.out_width, form, ENDS[end.name], int(step.waits),
    ))  # fmt: skip


def forms_of(launches: Sequence[Launch]) -> list[str]:
    """The launches' forms, each once, as the kernel's constants say them."""
    forms = [repack.FORMS[launch.type_name] for launch in launches]
    return sorted({f"{form.low} {form.high} {form.scale} {form.offset}" for form in forms})


def n_squares(a: Activation) -> int:
    """Partial sums of a row's squares, rounded up to what the kernel loads at once; 0: the rows are normed."""
    return 0 if a.norm is None else max(32, 1 << (a.norm.squares.shape[0] - 1).bit_length())


@functools.cache
def plan(
    index: int | None, rows: int, n_blocks: int, block_bytes: int, n_tokens: int, config: Config
) -> tuple[Cut, int, int]:
    """How a launch is cut on a card: its shares, tokens a tile, stages."""
    n_multiprocessors, *shared_bytes = card(index)
    tile, stages = tile_and_stages(config, block_bytes, n_tokens, *shared_bytes)
    return cut(rows, n_blocks, config, config.per_sm * n_multiprocessors), tile, stages


def launch_steps(
    steps: Sequence[Step], shares: Sequence[Cut], n_parts: int, n_programs: int, tile: int, stages: int,
    config: Config, sync: Tensor, pdl: bool,
) -> None:  # fmt: skip
    from ggufspec.kernels.matmul.gluon import narrow

    n_tokens, launches = steps[0].a.rows.shape[0], [step.launch for step in steps]
    forms = forms_of(launches)
    extras = [launch.parts[k] for launch in launches for k in ("d", "min") if k in launch.parts]
    extra = extras[0] if extras else launches[0].parts["low"]
    products = tuple(
        product(step, share, tile, n_parts, forms.index(*forms_of([step.launch])), extra)
        for step, share in zip(steps, shares)
    )
    narrow[(n_programs, -(-n_tokens // tile))](
        products, sync, n_tokens,
        FORMS="\n".join(forms), ENDS=" ".join(map(str, sorted({ENDS[step.end.name] for step in steps}))), PARTS=n_parts,
        SQUARES=max(n_squares(step.a) for step in steps), N_STEPS=len(steps), N=tile,
        KW=config.KW, WM=config.WM, MT=config.MT, ST=stages, PDL=pdl,
        num_warps=config.KW * config.WM, maxnreg=config.n_registers(tile), launch_pdl=pdl,
        enable_fp_fusion=True,
    )  # fmt: skip


def start(step: Step, config: Config | None = None, pdl: bool | None = None, n_parts: int = 1) -> None:
    """One product. pdl: start before the previous kernel has ended and read weights meanwhile (default: from
    capability 9.0 on). n_parts: compile for at least so many parts a tile.
    """
    launch, n_tokens, index = step.launch, step.a.rows.shape[0], step.a.rows.device.index
    config = config or launch.config
    block_bytes = block_bytes_of(launch.parts)
    share, tile, stages = plan(index, launch.padded_rows, launch.n_super_blocks, block_bytes, n_tokens, config)
    pdl = capability(index) >= (9, 0) if pdl is None else pdl
    n_parts = max(n_parts, share.n_parts)
    launch_steps([step], [share], n_parts, share.n_programs, tile, stages, config, launch.arrived, pdl)


# ---- steps


def rows_step(launch: Launch, a: Activation, waits: bool = False) -> tuple[Step, list[Tensor]]:
    """Float32 [T, rows_i] for each of the launch's weights. T: 1..NARROW_TOKENS."""
    n_tokens = a.rows.shape[0]
    assert a.scale is not None
    out = torch.empty(sum(launch.n_rows) * n_tokens, dtype=torch.float32, device=a.rows.device)
    pieces = out.split([n * n_tokens for n in launch.n_rows])
    outs = [piece.view(n_tokens, n) for n, piece in zip(launch.n_rows, pieces)]
    return Step(launch, a, Ending("rows", out, a.scale), waits), outs


def empty_rows(n_tokens: int, columns: int, device: torch.device) -> Tensor:
    """Float16 rows of so many columns in the kernels' order, for a product to fill."""
    width = repack.n_super_blocks(columns) * repack.BLOCK
    make = torch.empty if width == columns else torch.zeros
    return make((n_tokens, width), dtype=torch.float16, device=device)


def added_step(
    launch: Launch, a: Activation, stream: Tensor, weight: Tensor, eps: float, power: Tensor, waits: bool = False
) -> tuple[Step, tuple[Tensor, Activation]]:
    """stream [T, D] + the product, and that times weight / power [T] as the input of a product yet to be normed."""
    n_tokens, D = stream.shape
    total, rows = torch.empty_like(stream), empty_rows(n_tokens, D, stream.device)
    n_tiles = launch.padded_rows // launch.config.n_rows
    squares = torch.empty((n_tiles, n_tokens), dtype=torch.float32, device=stream.device)
    end = Ending("added", rows, power, stream, weight, power, total, squares, D, rows.shape[1])
    norm = Normed(squares, torch.empty_like(power), eps)
    return Step(launch, a, end, waits), (total, Activation(rows, D, power, norm))


def gated_step(launch: Launch, a: Activation, gelu: bool, waits: bool = False) -> tuple[Step, Activation]:
    """activation(gate) * up of a launch of pairs: prepared rows."""
    n_tokens, F = a.rows.shape[0], launch.n_rows[0] // 2
    rows = empty_rows(n_tokens, F, a.rows.device)
    scale = torch.empty(n_tokens, dtype=torch.float32, device=a.rows.device)
    end = Ending("gelu" if gelu else "silu", rows, scale, side=scale, n_out=F, out_width=rows.shape[1])
    return Step(launch, a, end, waits), Activation(rows, F, scale)


def run(launch: Launch, a: Activation, **choices: Any) -> list[Tensor]:
    """`rows_step`, alone. choices: as of `start`."""
    step, outs = rows_step(launch, a)
    start(step, **choices)
    return outs
