"""`ggufspec bench synth`: GGUF files with random weights in real shapes, so that speed needs no download."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from ggufspec.gguf_header import TensorInfo
from ggufspec.gguf_write import Entry, Key, write_gguf
from ggufspec.quant import policy
from ggufspec.quant.layouts import BY_NAME, F32, Layout
from ggufspec.quant.quantize import quantize
from ggufspec.tools.synth_models import DEFAULTS, Recipe, changed, make_recipe

N_ENCODED = 1 << 20  # weights that are really quantized, per type
N_BLOCKS = 262147  # blocks of a tile: a prime above the vocabulary, so that every row of a head starts elsewhere in it
DEVIATION = 0.02
N_CHUNK_BYTES = 1 << 24


class Tiles:
    """Random blocks of each type: a pool is encoded once, a tile draws from it, tensors are cut from the
    tile.
    """

    def __init__(self, seed: int, deviation: float):
        self.rng = np.random.default_rng(seed)
        self.deviation = deviation
        self.tiles: dict[Layout, np.ndarray] = {}

    def tile(self, layout: Layout) -> np.ndarray:
        """uint8 [N_BLOCKS, block bytes]"""
        if layout not in self.tiles:
            weights = self.rng.standard_normal((N_ENCODED // 256, 256), np.float32) * np.float32(self.deviation)
            pool = quantize(weights, layout.name).reshape(-1, layout.n_bytes)
            self.tiles[layout] = pool[self.rng.integers(0, len(pool), N_BLOCKS)]
        return self.tiles[layout]

    def chunks(self, layout: Layout, n_bytes: int) -> Iterator[np.ndarray]:
        """`n_bytes` bytes of blocks, from a random place of the tile on and round it as often as needed."""
        tile = self.tile(layout).reshape(-1)
        place = int(self.rng.integers(0, N_BLOCKS)) * layout.n_bytes
        while n_bytes:
            chunk = tile[place : place + min(n_bytes, N_CHUNK_BYTES)]
            yield chunk
            n_bytes -= len(chunk)
            place = (place + len(chunk)) % len(tile)


def plan(recipe: Recipe, type_text: str) -> list[Entry]:
    """The tensors in file order, with the types that `ggufspec quantize` chooses for this file type."""
    facts = {key.name: key.value for key in recipe.keys}
    heads, heads_kv = (facts[f"{recipe.architecture}.attention.head_count{end}"] for end in ("", "_kv"))
    order = policy.visiting_order(recipe.shapes)
    infos = [TensorInfo(name, recipe.shapes[name], F32.id, 0, 4 * math.prod(recipe.shapes[name])) for name in order]
    decisions = policy.decide(
        infos,
        policy.Facts(
            architecture=recipe.architecture,
            n_blocks=facts[f"{recipe.architecture}.block_count"],
            n_gqa=heads // heads_kv,
            has_gqa=heads != heads_kv,
        ),
        policy.Choices(policy.file_type(type_text)),
    )
    return [Entry(d.name, recipe.shapes[d.name], BY_NAME[d.type_name]) for d in decisions]


def data(recipe: Recipe, entries: list[Entry], tiles: Tiles) -> Iterator[np.ndarray]:
    """The tensors' bytes in pieces."""
    for entry in entries:
        fill = recipe.fills[entry.name]
        if entry.layout is not F32 or len(entry.shape) > 1 and fill == 1.0:
            yield from tiles.chunks(entry.layout, entry.n_bytes)
            continue
        if fill == "normal":
            yield 0.3 * tiles.rng.standard_normal(entry.shape, np.float32)
        elif fill == "first_tap":  # a convolution that passes its input on
            values = np.zeros(entry.shape, np.float32)
            values[:, 0] = 1
            yield values
        else:
            yield np.full(entry.shape, fill, np.float32)


def write_model(recipe: Recipe, type_text: str, path: Path, seed: int, deviation: float, progress: bool = True) -> int:
    """Write the file and return its size in bytes."""
    file_type, entries = policy.file_type(type_text), plan(recipe, type_text)
    keys = [*recipe.keys, Key("general.quantization_version", "u32", 2), Key("general.file_type", "u32", file_type.id)]
    total = sum(entry.n_bytes for entry in entries)
    with tqdm(total=total, unit="B", unit_scale=True, desc=path.name, disable=None if progress else True) as bar:

        def counted() -> Iterator[np.ndarray]:
            for chunk in data(recipe, entries, Tiles(seed, deviation)):
                yield chunk
                bar.update(chunk.nbytes)

        return write_gguf(path, keys, entries, counted())


def _taps(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}, expected layer numbers separated by commas") from None


SIZE = click.IntRange(min=1)


@click.command(name="synth")
@click.argument("kind", type=click.Choice(list(DEFAULTS)))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--type", "type_text", default="q4_k_m", show_default=True, help="File type, as in quantize.")
@click.option("--seed", default=1, show_default=True, help="Seed of the weights.")
@click.option("--std", "deviation", default=DEVIATION, show_default=True, help="Standard deviation of the weights.")
@click.option("--tokens", type=click.Path(path_type=Path), help="tiktoken file for the vocabulary (default: bytes).")
@click.option("--layers", "n_layers", type=SIZE, help="Layers, without the MTP block.")
@click.option("--embd", "n_embd", type=SIZE, help="Width.")
@click.option("--ff", "n_ff", type=SIZE, help="Width of the feed-forward layer.")
@click.option("--heads", "n_head", type=SIZE, help="Query heads.")
@click.option("--kv-heads", "n_head_kv", type=SIZE, help="Key and value heads.")
@click.option("--head-dim", type=SIZE, help="Size of a head.")
@click.option("--vocab", "n_vocab", type=SIZE, help="Tokens in the vocabulary.")
@click.option("--ctx", "n_ctx", type=SIZE, help="Context length the file claims.")
@click.option("--key-heads", "n_key_heads", type=SIZE, help="Target: key heads of the DeltaNet layers.")
@click.option("--value-heads", "n_value_heads", type=SIZE, help="Target: value heads of the DeltaNet layers.")
@click.option("--state-size", type=SIZE, help="Target: head size of the DeltaNet layers.")
@click.option("--taps", callback=_taps, help="Drafters: target layers to read, separated by commas.")
@click.option("--block-size", type=SIZE, help="Drafters: tokens of a block.")
@click.option("--rank", type=SIZE, help="Drafters: Markov or selector rank.")
@click.option("--window", type=SIZE, help="DFlash2: sliding window.")
@click.option("--top-k", "top_k", type=SIZE, help="DFlash2: candidates of the selector.")
def command(
    kind: str, out: Path, type_text: str, seed: int, deviation: float, tokens: Path | None, **sizes: Any
) -> None:
    """Write a model with random weights: a qwen35 target with its MTP block, or a DSpark or DFlash2 drafter.

    Without size options the shapes are those of Qwen3.8-27B and its drafters (16.8 GB as q4_k_m). Tensor
    types are chosen as `ggufspec quantize` chooses them. Text from such a model is noise; its speed is that
    of a trained one.
    """
    recipe = make_recipe(kind, changed(kind, **sizes), tokens)
    n_bytes = write_model(recipe, type_text, out, seed, deviation)
    size = f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.2f} MB"
    click.echo(f"{out}: {size}, {len(recipe.shapes)} tensors")
