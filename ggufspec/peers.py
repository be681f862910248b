"""Memory that all ranks of a tensor split map: set up once, tried out, and given up for the library where it fails.

Every rank allocates an inbox and maps the others' through CUDA's handles between processes. That needs one host and
cards that can write to each other's memory. Then sums whose results are known are made, with a limit on every wait: a
link that does not carry eight bytes as one, or not at all, would otherwise hang a step or falsify it.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels.matmul.values import EMPTY
from .kernels.peer import ROWS, Link, plain
from .kernels.peer.link import box_of, memory_words

log = logging.getLogger(__name__)

POLLS = 2_000_000  # a second or more: the ranks start a tried call together
TRIED_COLUMNS = 5120


def connect(rank: int, size: int, device: torch.device, host: Any) -> Link | None:
    """The link of this rank, or None when sums go through the library; all ranks of group `host` agree on it.

    One line of the log says which, and why.
    """
    if device.type != "cuda":
        return None
    link = None
    reason = obstacle(gathered((socket.gethostname(), device.index), size, host))
    if reason is None:
        link, reason = mapped(rank, size, device, host)
    if reason is None:
        assert link is not None
        reason = agreed(trial(link, device, host), size, host)
    if reason is not None:
        log.info("sums between ranks go through NCCL: %s", reason)
        return None
    log.info("sums of up to %d rows between %d ranks go through peer memory", ROWS, size)
    return link


def gathered(value: Any, size: int, host: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=host)
    return values


def agreed(reason: str | None, size: int, host: Any) -> str | None:
    """The first rank's reason not to go on, if any has one."""
    return next((r for r in gathered(reason, size, host) if r is not None), None)


def obstacle(places: list[tuple[str, int]]) -> str | None:
    """Why ranks on these (host, card) cannot map each other's memory; the same answer on every rank."""
    hosts, cards = {name for name, _ in places}, [card for _, card in places]
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(cards)) < len(cards):
        return "two ranks share a card"
    for own in cards:
        for other in cards:
            if own != other and not torch.cuda.can_device_access_peer(own, other):
                return f"CUDA{own} has no peer access to CUDA{other}"
    return None


def mapped(rank: int, size: int, device: torch.device, host: Any) -> tuple[Link | None, str | None]:
    """Allocate this rank's inbox and map all others': the link, or why some rank could not."""
    from torch.multiprocessing.reductions import reduce_tensor

    own, handle, failed = None, None, None
    try:
        own = torch.zeros(memory_words(size), dtype=torch.int64, device=device)
        box_of(own, size).fill_(EMPTY.value)
        torch.cuda.synchronize(device)
        # Never freed: the other processes map it, and when they end is not ours to know.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))
        handle = reduce_tensor(own)
    except RuntimeError as error:
        failed = f"rank {rank} cannot share memory: {first_line(error)}"
    handles = gathered(handle, size, host)
    reason = agreed(failed, size, host)
    if reason is not None or own is None:
        return None, reason
    link = None
    try:
        others = [None if other == rank else opened(handles[other], device) for other in range(size)]
        link = Link.of(rank, [own if inbox is None else inbox for inbox in others])
    except RuntimeError as error:
        failed = f"rank {rank} cannot map the others' memory: {first_line(error)}"
    return link, agreed(failed, size, host)


def opened(handle: tuple[Any, tuple[Any, ...]], device: torch.device) -> Tensor:
    """Another rank's inbox, mapped on this rank's card, whose kernels write there: on its owner's they could not.

    handle: what `reduce_tensor` made of it. The owner's card was idle then: there is no event to wait for.
    """
    rebuild, arguments = handle
    bound = inspect.signature(rebuild).bind(*arguments)
    bound.arguments |= {"storage_device": device.index, "event_sync_required": False}
    tensor: Tensor = rebuild(*bound.args)
    return tensor


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def trial(link: Link, device: torch.device, host: Any) -> str | None:
    """Sums of one row and of all, twice into either half; why they cannot be relied on, or None."""
    from .kernels.peer import triton

    def parts(call: int, rows: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(call)
        return list(torch.randn(link.size, rows, TRIED_COLUMNS, generator=generator).to(device))

    triton.sum_parts(parts(0, 1)[link.rank], link, limit=1)  # compiles, which takes ranks different times
    torch.cuda.synchronize(device)
    link.late.zero_()
    dist.barrier(group=host)
    reason = None
    for call, rows in enumerate((1, ROWS, 1, ROWS, ROWS, 8, 8), start=1):
        all_parts = parts(call, rows)
        torch.cuda.synchronize(device)
        dist.barrier(group=host)  # every rank makes every call, whatever came out of the one before
        got = triton.sum_parts(all_parts[link.rank], link, limit=POLLS)
        if bool(link.late):
            reason = reason or f"numbers did not reach rank {link.rank} in time"
        if not torch.equal(got, plain.sum_parts(all_parts)):
            reason = reason or f"rank {link.rank} read other numbers than were written"
    return reason
