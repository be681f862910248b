"""Which products of a tensor split sum over the ranks themselves, in their own launch (see `kernels.matmul.joint`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile

import torch.distributed as dist

from .kernels.matmul.cuda import Config
from .kernels.matmul.joint import Joint
from .models.base import Layer
from .models.layers import Addition
from .parallel import Shard

log = logging.getLogger(__name__)


def assign(layers: Sequence[Layer], shard: Shard) -> int:
    """Give the layers' last products their joints, in the order they run in; how many there are.

    A chain of joined products ends at the first that cannot be one: what follows it begins with a finished norm. Every
    step runs all of them or, with more rows, none, and an even number, so that sums always take halves in turn. Ranks
    agree: what one of them cannot do none does, and tiles are those of the first rank.
    """
    link = shard.link
    if link is None or link.boxes is None:
        return 0
    additions = [addition for layer in layers for addition in layer.additions][:-1]  # no norm follows the last
    chain = [addition for addition in takewhile(can_join, additions) if addition.shard.size > 1]
    configs = [addition.weight.launches[0].config for addition in chain]
    everyone: list[list[Config]] = [[] for _ in range(shard.size)]
    dist.all_gather_object(everyone, configs, group=shard.group)
    n = min(len(configs) for configs in everyone) // 2 * 2
    for i, addition in enumerate(chain[:n]):
        addition.joint = Joint(shard.rank, shard.size, link.boxes, i % 2, everyone[0][i])
    log.info("%d of the sums between ranks are made by the products themselves", n)
    return n


def can_join(addition: Addition) -> bool:
    """Whether the addition goes into the next norm without another launch, alone or over ranks."""
    return addition.is_plain and len(addition.weight.launches) == 1
