"""Target models. `load_model` reads a GGUF file of any supported architecture onto its devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import joints
from ..errors import UnsupportedError
from ..parallel import WHOLE, Shard
from ..placement import Placement, default_device
from ..weights import Weights
from . import gemma3, llama, qwen2, qwen3, qwen35
from .base import Model, Output
from .config import Config, read_config
from .whole import check_all_used, check_blocks

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

__all__ = ["ARCHITECTURES", "Config", "Model", "Output", "RECURRENT", "load_model", "read_config"]

ARCHITECTURES: dict[str, Callable[[Weights, Config, Placement, Shard], Model]] = {
    "qwen35": qwen35.load,
    "qwen3": qwen3.load,
    "qwen2": qwen2.load,
    "llama": llama.load,
    "gemma3": gemma3.load,
}
RECURRENT = ("qwen35",)  # those with layers that cannot drop tokens from their state


def load_model(file: GGUFFile, placement: Placement | None = None, *, config: Config | None = None,
               weights: Weights | None = None, shard: Shard = WHOLE,
               progress: Callable[[int], None] | None = None) -> Model:
    """The target model of `file`. `weights` may be shared with a drafter that reads the same file; `config`
    replaces what the file's keys say; `shard` is this process's part of a tensor split.

    Errors: UnsupportedError for an architecture without code here, FileError and ConfigError for a bad file.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        hint = "; it is a drafter, give it with --model-draft" if name == "dflash" else ""
        raise UnsupportedError(
            f"{file.path}: architecture {name!r} is not supported as a target{hint}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    config = config or read_config(file)
    check_blocks(file, config)
    if placement is None:
        placement = Placement.single(default_device(), config.n_layers)
    weights = weights or Weights(file, progress)
    model = ARCHITECTURES[name](weights, config, placement, shard)
    check_all_used(weights, config)
    joints.assign(model.layers, shard)
    return model
