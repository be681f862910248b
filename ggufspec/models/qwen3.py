"""qwen3: pre-norm blocks, grouped-query attention with per-head norms of q and k, SwiGLU."""

from ..placement import Placement
from ..weights import Weights
from .assemble import assemble, block
from .base import Model
from .config import Config


def load(weights: Weights, config: Config, placement: Placement) -> Model:
    return assemble(
        weights, config, placement,
        lambda i, device: block(weights, config, i, device, norms=True, rope=config.rope),
    )
