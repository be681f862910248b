"""A file is run as a whole or not at all: tensors that nothing here reads would change what the model says."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from ..errors import ConfigError, UnsupportedError
from ..weights import Weights
from .config import Config

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

log = logging.getLogger(__name__)

# Heads beside the one over the vocabulary (rerankers have them), which text does not need.
BESIDE = ("cls.",)


def block_of(tensor: str) -> int:
    """The block that a tensor belongs to, -1 for none."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else -1


def check_blocks(file: GGUFFile, config: Config) -> None:
    """ConfigError when the file has more blocks than its key says: a part of the model would be left out."""
    last = max(map(block_of, file.tensors), default=-1)
    if last >= config.block_count:
        raise ConfigError(
            f"{file.path}: key {config.architecture}.block_count is {config.block_count}, but the file has tensors of "
            f"{last + 1} blocks; expected the same"
        )


def check_all_used(weights: Weights, config: Config) -> None:
    """UnsupportedError when a loaded model left out a tensor of its file. MTP blocks are the drafter's.

    A block that is one by the key alone is left out with a warning, as llama.cpp does.
    """
    for i in range(config.n_layers, config.block_count):
        own = [name for name in weights.file.tensors if block_of(name) == i]
        if own and not any(".nextn." in name for name in own):
            log.warning(
                "%s: block %d is left out: key %s.nextn_predict_layers is %d, so that it should be an MTP block, but "
                "it has no nextn tensor", weights.file.path, i, config.architecture, config.nextn_predict_layers,
            )  # fmt: skip
    for name in weights.file.tensors:
        if name not in weights.used and block_of(name) < config.n_layers and not name.startswith(BESIDE):
            raise UnsupportedError(
                f"{weights.file.path}: tensor {name} is not part of a {config.architecture} model as known "
                "here; without it the text would be another model's"
            )


def check_block_used(weights: Weights, block: int) -> None:
    """The same for an MTP block alone."""
    for name in weights.file.tensors:
        if name not in weights.used and block_of(name) == block:
            raise UnsupportedError(
                f"{weights.file.path}: tensor {name} is not part of an MTP block as known here; "
                "this kind of drafter is not supported"
            )
