"""llama: pre-norm blocks, grouped-query attention, interleaved (NORM) RoPE with optional frequency divisors."""

from ..errors import ConfigError, UnsupportedError
from ..parallel import Shard
from ..placement import Placement
from ..weights import Weights
from .assemble import assemble, block, with_factors
from .base import Model
from .config import Config, Keys


def load(weights: Weights, config: Config, placement: Placement, shard: Shard) -> Model:
    keys = Keys(weights.file)
    path = weights.file.path
    n_expert = keys.integer("expert_count", 0)
    if n_expert > 0:
        raise UnsupportedError(f"{path}: llama with expert_count {n_expert} (mixture of experts) is not supported")
    if keys.text("rope.scaling.type", "linear") == "longrope":
        raise UnsupportedError(f"{path}: llama.rope.scaling.type longrope is not supported; none, linear, yarn are")
    if config.rope.n_rot != config.key_length:
        raise ConfigError(
            f"{path}: llama.rope.dimension_count is {config.rope.n_rot} but the head size is {config.key_length}; "
            "they must be equal for this architecture"
        )
    ropes = {device: with_factors(config.rope, weights, "rope_freqs.weight", device)
             for device in set(placement.layers)}
    return assemble(
        weights, config, placement,
        lambda i, device: block(weights, config, i, device, shard, norms=False, rope=ropes[device]),
        shard=shard,
    )
