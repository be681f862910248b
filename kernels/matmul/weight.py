"""What a quantized matmul works on: a weight in its kernel's order, a group of weights, an activation."""

from dataclasses import dataclass, field

from torch import Tensor, device

from ggufspec.errors import FileError, UnsupportedError
from ggufspec.kernels.matmul.decode import DECODERS
from ggufspec.quant import layouts


@dataclass(frozen=True)
class PackedWeight:
    """One weight matrix [rows, columns] of a tensor type, held on one device.

    On the CPU `raw` is the file's bytes and `dense` their float32 values, decoded once (None: decode at every
    use). On CUDA `parts` are the arrays the kernels read (see `repack`); nothing else is kept.
    """

    type_name: str
    shape: tuple[int, int]
    device: device
    raw: Tensor | None = None
    dense: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    shift: int = 0

    @property
    def n_bytes(self) -> int:
        """Memory held on the device."""
        held = [t for t in (self.raw, self.dense, *self.parts.values()) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)


@dataclass(frozen=True)
class WeightGroup:
    """Weights that multiply the same activation, in the caller's order; `launches`: the CUDA kernels' tables."""

    weights: tuple[PackedWeight, ...]
    launches: tuple = ()

    @property
    def n_columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def n_rows(self) -> tuple[int, ...]:
        return tuple(w.shape[0] for w in self.weights)

    @property
    def n_bytes(self) -> int:
        return sum(w.n_bytes for w in self.weights)


@dataclass(frozen=True)
class Normed:
    """What an activation still lacks of its RMS norm: its rows are x * weight / scale, see `gluon.narrow`.

    squares [P, T]: partial sums of x^2. next_power [T]: written by the first product with these rows, the power of
    two that the rows after it are divided by.
    """

    squares: Tensor
    next_power: Tensor
    eps: float


@dataclass(frozen=True)
class Activation:
    """Rows [T, K] ready for every group with K columns.

    On the CPU `rows` are the float32 rows themselves. On CUDA they are float16 in the kernels' column order, each
    row divided by the power of two in `scale` [T] that keeps it in range; with `norm`, what is left of their norm.
    Rows of wide batches are all divided by one number, which the host knows: `fixed`, instead of `scale`.
    """

    rows: Tensor
    n_columns: int
    scale: Tensor | None = None
    norm: Normed | None = None
    fixed: float | None = None


def check_pack(raw: Tensor, type_name: str, shape: tuple[int, int]) -> None:
    """Refuse bytes that are not `shape` rows of `type_name`."""
    if type_name not in DECODERS:
        known = ", ".join(DECODERS)
        raise UnsupportedError(f"tensor type {type_name} cannot be multiplied; this runtime knows {known}")
    layout = layouts.BY_NAME[type_name]
    rows, columns = shape
    if columns % layout.n_elements:
        raise FileError(
            f"a {type_name} matrix has {columns} columns, not a multiple of its block of {layout.n_elements}"
        )
    expected = (rows, layout.row_bytes(columns))
    if tuple(raw.shape) != expected:
        raise FileError(
            f"a {type_name} matrix of {rows} x {columns} needs bytes {list(expected)}, got {list(raw.shape)}"
        )


def check_group(weights: tuple[PackedWeight, ...]) -> None:
    """Refuse a group whose weights do not share an input."""
    if not weights:
        raise ValueError("a weight group needs at least one weight")
    columns = {w.shape[1] for w in weights}
    devices = {w.device for w in weights}
    if len(columns) > 1 or len(devices) > 1:
        raise ValueError(f"weights of one group need one input: columns {sorted(columns)}, devices {devices}")
