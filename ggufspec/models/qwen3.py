"""qwen3: pre-norm blocks, grouped-query attention with per-head norms of q and k, SwiGLU."""

from ..parallel import Shard
from ..placement import Placement
from ..weights import Weights
from .assemble import assemble, block
from .base import Model
from .config import Config


def load(weights: Weights, config: Config, placement: Placement, shard: Shard) -> Model:
    return assemble(
        weights, config, placement,
        lambda i, device: block(weights, config, i, device, shard, norms=True, rope=config.rope),
        shard=shard,
    )
