"""One product of a launch of the narrow kernel, as the kernel takes it.

Kernels are compiled anew for every pattern of small and round numbers among their arguments; numbers therefore travel
hidden, as `number * 32 + 5`, so that one kernel serves all shapes: a model then runs from a few kilobytes of code, and
code that multiprocessors fetch anew at every launch costs more than a short product.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

ROWS, ADDED, SILU, GELU = range(4)  # what becomes of the sums, see `epilogue.finish`
ENDS = {"rows": ROWS, "added": ADDED, "silu": SILU, "gelu": GELU}


class Product(NamedTuple):
    """Absent tensors are stood for by others of their type."""

    low: Tensor  # the weights' arrays: see `repack`
    high: Tensor
    scale: Tensor
    extra: Tensor  # `d` or `min`
    x: Tensor  # float16 [T, S * 256] in the arrays' column order
    x_scale: Tensor  # [T]
    squares: Tensor  # [n_squares, T], see `epilogue.normed_factor`
    next_power: Tensor  # [T]
    out: Tensor  # float32
    out_rows: Tensor  # float16, in the arrays' column order
    out_side: Tensor
    stream: Tensor  # [T, n_out]
    stream_out: Tensor
    weight: Tensor  # [n_out]
    power: Tensor  # [T]
    row_start: Tensor  # [rows] the first row of a row's weight
    row_width: Tensor  # [rows] and that weight's number of rows, 0: a padding row
    partial: Tensor  # parts of tiles
    arrived: Tensor  # their counters, zero before and after
    out_scale: float
    columns: float
    eps: float
    min_scale: int  # pairs of float16, powers of two
    min_bias: int
    S: int  # hidden from here on: super-blocks of a row
    rows: int  # padded
    units: int
    n_units: int
    per_program: int
    n_squares: int
    n_out: int
    out_width: int
    form: int  # which of the launch's forms
    end: int  # of ENDS
    waits: int  # 1: its input comes from a product before it in the launch


PLACES = {name: place for place, name in enumerate(Product._fields)}
FIRST_HIDDEN = PLACES["S"]


def hidden(number: int) -> int:
    return number * 32 + 5


def hide(product: Product) -> Product:
    return Product(*product[:FIRST_HIDDEN], *map(hidden, product[FIRST_HIDDEN:]))


@constexpr_function
def index_of(name):
    return PLACES[name]


@constexpr_function
def is_hidden(name):
    return PLACES[name] >= FIRST_HIDDEN


@gluon.jit
def again(s):
    """s, in a way that the compiler does not see through: what is picked by it is not held in registers till then."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [s], gl.int32, False, 1)


@gluon.jit
def picked(products, s, N_STEPS: gl.constexpr):
    """The fields of product s, the last one past the end."""
    fields = ()
    for f in gl.static_range(len(products[0])):
        value = products[0][f]
        for k in gl.static_range(1, N_STEPS):
            if k == N_STEPS - 1:
                value = gl.where(s >= k, products[k][f], value)
            else:
                value = gl.where(s == k, products[k][f], value)
        fields = fields + (value,)
    return fields


@gluon.jit
def get(P, name: gl.constexpr):
    """A field by name; pointers and row counts with what is known of their alignment."""
    value = P[index_of(name)]
    if is_hidden(name):
        value = value >> 5
        if name == "rows":
            value = gl.multiple_of(value, 16)
    elif name == "low" or name == "high" or name == "scale" or name == "extra" or name == "x":
        value = gl.multiple_of(value, 16)
    return value
