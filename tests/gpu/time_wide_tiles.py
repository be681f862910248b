"""Microseconds of narrow products of 8 to 192 rows, with each division of work that `narrow.shape_for` chooses among.

    python tests/gpu/time_wide_tiles.py [--widths 32,64] [--products 0,3] [--own-config]

Prints a line a product and width. `planned` marks what a launch takes, "split" where that is two: tiles of 64 tokens,
then a tile for the rest. A time with `!`: some run's bits differed from those of the usual division.

Each time is of one launch in a graph of 16, over copies of the weights that the card's cache cannot hold. Products have
the config that the table in docs/performance.md was measured with; --own-config takes the card's tuned one instead.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from random_blocks import random_raw
from time_kernels import microseconds

from ggufspec.kernels import matmul as mm
from ggufspec.kernels.ahead import compiled_ahead
from ggufspec.kernels.matmul import narrow
from ggufspec.kernels.matmul.cuda import NARROW_TOKENS, Config, Launch, capability, config_for
from ggufspec.kernels.matmul.weight import Activation, Normed

EIGHT, FOUR = Config(WM=8, MT=1, ST=3, per_sm=2), Config(WM=4, MT=1, ST=3, per_sm=4)
TALL = Config(WM=4, MT=2, ST=4, per_sm=2)
PRODUCTS = (
    ("Q4_K", 34816, 5120, "silu", EIGHT), ("Q4_K", 5120, 17408, "added", EIGHT), ("Q6_K", 5120, 17408, "added", FOUR),
    ("Q4_K", 16384, 5120, "rows", EIGHT), ("Q8_0", 34816, 5120, "silu", TALL), ("Q8_0", 5120, 17408, "added", TALL),
)  # fmt: skip
WIDTHS = (8, 16, 24, 32, 48, 64, 72, 96, 128, 160, 192)
MADE_ROWS = 1024  # random rows, repeated: making them takes longer than timing
COPIES_BYTES = 200_000_000  # more than the card's cache
PER_GRAPH = 16
COMPARED_RUNS = 12  # of each division, over two copies of the weights: a race need not show in the first


class Product:
    """A launch in copies, and inputs for it of as many rows as a narrow product can have."""

    def __init__(self, type_name: str, rows: int, columns: int, ending: str, config: Config | None) -> None:
        self.columns, self.ending = columns, ending
        raw = random_raw(type_name, MADE_ROWS, columns, seed=rows + columns)
        weight = mm.pack(raw, type_name, (MADE_ROWS, columns), torch.device("cuda"))
        parts = {
            name: part.repeat(1, rows // MADE_ROWS, *[1] * (part.dim() - 2)).contiguous()
            for name, part in weight.parts.items()
        }
        first = mm.fuse([replace(weight, shape=(rows, columns), parts=parts)]).launches[0]
        own = config_for(capability(None), type_name, rows, first.n_super_blocks, first.block_bytes)
        first = replace(first, config=config or own)
        n_bytes = sum(p.numel() * p.element_size() for p in first.parts.values())
        n_copies = max(2, -(-COPIES_BYTES // n_bytes))
        self.launches = [first] + [
            replace(first, parts={name: p.clone() for name, p in first.parts.items()}) for _ in range(n_copies)
        ]
        self.name = f"{type_name} {rows} x {columns} {ending}, {n_bytes / 1e6:.0f} MB, {first.config}"
        self.x = torch.randn(NARROW_TOKENS, columns, device="cuda").half()
        self.stream = torch.randn(NARROW_TOKENS, rows, device="cuda")
        self.gain = torch.rand(rows, device="cuda") + 0.5
        self.power = torch.ones(NARROW_TOKENS, device="cuda")
        self.squares = torch.rand(40, NARROW_TOKENS, device="cuda") * columns / 40

    def divisions(self, n_tokens: int) -> dict[str, narrow.Shape | None]:
        """The usual division, and the others where this product's config has them. None: two launches, as planned."""
        launch, index = self.launches[0], torch.cuda.current_device()
        _, shared, most = narrow.card(index)
        hopper = (9, 0) <= capability(None) < (10, 0)
        wide = narrow.WIDE.get((launch.type_name, self.ending), narrow.NEVER)

        def shape(wide: narrow.Wide) -> narrow.Shape:
            return narrow.shape_for(launch.config, launch.block_bytes, n_tokens, shared, most, wide, hopper)

        found: dict[str, narrow.Shape | None] = {"usual": shape(narrow.NEVER)}
        if self.ending != "added" and (other := shape(narrow.Wide(17, wide.stages))) != found["usual"]:
            found["together" if other.together else "side by side"] = other
        *full, last = narrow.pieces_for(launch.config, launch.block_bytes, n_tokens, shared, most, wide, hopper)
        if full:
            return {**found, "split (planned)": None}
        return {f"{name} (planned)" if s == last.shape else name: s for name, s in found.items()}

    def same_bits(self, shape: narrow.Shape | None, n: int) -> bool:
        """Whether every run with this shape gives what the usual one does."""
        a, usual = self.inputs(n), next(iter(self.divisions(n).values()))
        kept = [self.run(launch, usual, a).view(torch.uint8) for launch in self.launches[:2]]
        runs = (self.run(self.launches[i % 2], shape, a).view(torch.uint8) for i in range(COMPARED_RUNS))
        return all(torch.equal(y, kept[i % 2]) for i, y in enumerate(runs))

    def run(self, launch: Launch, shape: narrow.Shape | None, a: Activation) -> torch.Tensor:
        """The launch's products, or what its ending makes of them."""
        n = a.rows.shape[0]
        if self.ending == "rows":
            return narrow.run(launch, a, shape=shape)[0]
        if self.ending == "added":
            assert a.scale is not None
            return narrow.run_added(launch, a, self.stream[:n], self.gain, 1e-6, a.scale, shape=shape)[0]
        return narrow.run_gated(launch, a, self.ending == "gelu", shape=shape).rows

    def inputs(self, n: int) -> Activation:
        a = Activation(self.x[:n], self.columns, self.power[:n].clone())
        if self.ending in ("rows", "added"):
            return a
        return replace(a, norm=Normed(self.squares[:, :n].contiguous(), torch.empty_like(self.power[:n]), 1e-6))

    def microseconds(self, shape: narrow.Shape | None, n: int) -> float:
        a, launches = self.inputs(n), self.launches
        return microseconds(lambda i: self.run(launches[i % len(launches)], shape, a), PER_GRAPH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="rows, 1 to 192")
    parser.add_argument("--products", default=",".join(map(str, range(len(PRODUCTS)))), help="numbers, from 0")
    parser.add_argument("--own-config", action="store_true", help="the card's tuned config of each product")
    options = parser.parse_args()
    widths = [int(w) for w in options.widths.split(",")]
    products = []
    for i in map(int, options.products.split(",")):
        type_name, rows, columns, ending, config = PRODUCTS[i]
        products.append(Product(type_name, rows, columns, ending, None if options.own_config else config))
    with compiled_ahead():
        for product in products:
            for n in widths:
                for shape in product.divisions(n).values():
                    product.run(product.launches[0], shape, product.inputs(n))
    torch.cuda.synchronize()
    for product in products:
        print(product.name, flush=True)
        for n in widths:
            times = []
            for name, shape in product.divisions(n).items():
                mark = "" if product.same_bits(shape, n) else "!"
                times.append(f"{name} {product.microseconds(shape, n):.1f}{mark}")
            print(f"  {n:3d}: " + ", ".join(times), flush=True)


if __name__ == "__main__":
    main()
