"""Which products of a tensor split sum over the ranks themselves, in their own launch (see `kernels.matmul.joint`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile

import torch
import torch.distributed as dist

from .kernels.fused import runs_narrow
from .kernels.matmul.cuda import Config, capability
from .kernels.matmul.joint import Joint
from .kernels.matmul.narrow import card
from .models.base import Layer
from .models.layers import Addition
from .parallel import Shard

log = logging.getLogger(__name__)


def assign(layers: Sequence[Layer], shard: Shard) -> int:
    """Give the layers' last products their joints, in the order they run in; how many there are.

    A chain of joined products ends at the first that cannot be one: what follows it begins with a finished norm. Every
    step runs all of them or, with more rows, none, and an even number, so that sums always take halves in turn. Ranks
    agree: what one of them cannot do none does, and tiles are those of the first rank. On cards of several kinds
    there are none: where fewer tokens fit a tile, ranks would wait for each other in different orders.
    """
    link = shard.link
    if link is None or link.boxes is None:
        return 0
    additions = [addition for layer in layers for addition in layer.additions][:-1]  # no norm follows the last
    chain = [addition for addition in takewhile(can_join, additions) if addition.shard.size > 1]
    configs = [addition.weight.launches[0].config for addition in chain]
    everyone: list[tuple[Kind | None, list[Config]]] = [(None, [])] * shard.size
    dist.all_gather_object(everyone, (kind(link.boxes.device), configs), group=shard.group)
    kinds, n = {found for found, _ in everyone}, min(len(configs) for _, configs in everyone) // 2 * 2
    if None in kinds or len(kinds) > 1:
        n = 0
    for i, addition in enumerate(chain[:n]):
        addition.joint = Joint(shard.rank, shard.size, link.boxes, i % 2, everyone[0][1][i])
    log.info("%d of the sums between ranks are made by the products themselves", n)
    return n


Kind = tuple[tuple[int, int], int, int]


def kind(device: torch.device) -> Kind | None:
    """What decides how many tokens a tile has: capability and shared memory. None: no kernel there that joins."""
    if not runs_narrow(device):
        return None
    _, shared, most = card(device.index)
    return capability(device.index), shared, most


def can_join(addition: Addition) -> bool:
    """Whether the addition goes into the next norm without another launch, alone or over ranks."""
    return addition.is_plain and len(addition.weight.launches) == 1
