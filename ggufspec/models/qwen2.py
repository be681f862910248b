"""qwen2: as qwen3 without the norms of q and k, with biases on q, k and v. Drafters cannot tap it."""

from ..parallel import Shard
from ..placement import Placement
from ..weights import Weights
from .assemble import assemble, block
from .base import Model
from .config import Config


def load(weights: Weights, config: Config, placement: Placement, shard: Shard) -> Model:
    model = assemble(
        weights, config, placement,
        lambda i, device: block(weights, config, i, device, shard, norms=False, rope=config.rope),
        shard=shard,
    )
    model.can_tap = False
    return model
