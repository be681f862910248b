"""Processes of a tensor split: start one per device, keep their engines in step, end all when one ends.

Rank 0 owns the requests. Before every step it shares what came in since the last one; from then on all ranks compute
the same tokens from the same inputs, which is checked. The sharing runs over a CPU group, the layers' sums over the
devices' own.
"""

from __future__ import annotations

import atexit
import datetime
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import PlacementError
from .job_queue import Inbox
from .kernels.peer import Link
from .parallel import Shard, check_group
from .peers import connect

WATCH_SECONDS = 0.5
PATIENCE_WITH_WATCHER = 4 * WATCH_SECONDS
PATIENCE = datetime.timedelta(days=365)  # an idle server waits for requests inside a collective


class LeaderGone(PlacementError):
    """The first rank has ended between two steps: it is done, or its own status says why not."""


@dataclass
class Ranks:
    """This process's place among the ranks."""

    rank: int
    shares: tuple[float, ...]
    device: torch.device
    devices: Any  # group for sums and joins between devices
    host: Any  # group for requests and checks
    link: Link | None = None  # memory that all ranks map, for the sums of a step's few rows

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.shares, self.devices, self.link)

    def share(self, inbox: Inbox) -> Inbox:
        """Rank 0's inbox on every rank (`job_queue.Link`). Jobs travel by value, so ids agree everywhere."""
        data = torch.frombuffer(bytearray(pickle.dumps(inbox)), dtype=torch.uint8) if self.rank == 0 else torch.empty(0)
        try:
            size = torch.tensor([data.numel()])
            dist.broadcast(size, 0, group=self.host)
        except RuntimeError as error:
            if self.rank != 0:
                raise LeaderGone(f"rank {self.rank}: the first rank has ended") from error
            raise self.lost(error) from error
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.host)
        if self.rank == 0:
            return inbox
        first: Inbox = pickle.loads(bytes(data.numpy()))
        if first.emitted != inbox.emitted:
            raise PlacementError(f"rank {self.rank} did not emit the tokens of rank 0 in the last step")
        return first

    def total(self, n: int) -> int:
        """The sum of all ranks' n (`job_queue.Link`)."""
        sums = torch.tensor([n])
        dist.all_reduce(sums, group=self.host)
        return int(sums)

    def lost(self, error: RuntimeError) -> Exception:
        """The reason for an error of the library's in the middle of a step (`job_queue.Link`); others as they are.

        It says which connection broke. Whoever watches the processes knows which of them ended, and why: that is told
        first, and ends this one.
        """
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return error
        time.sleep(PATIENCE_WITH_WATCHER)
        return PlacementError(f"rank {self.rank} lost the other ranks: {str(error).splitlines()[0]}")


def join(rank: int, shares: tuple[float, ...], device: torch.device) -> Ranks:
    """Become one of the ranks; the address of rank 0 is in MASTER_ADDR and MASTER_PORT."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if device.type == "cuda" else None
    dist.init_process_group(backend, rank=rank, world_size=len(shares), timeout=PATIENCE, device_id=own)
    devices = dist.group.WORLD
    host = dist.new_group(backend="gloo", timeout=PATIENCE) if backend != "gloo" else devices
    ranks = Ranks(rank, shares, device, devices, host)
    check_group(ranks.shard)
    ranks.link = connect(rank, len(shares), device, host)
    return ranks


def torchrun_world() -> int:
    """The processes that torchrun has started on all hosts; 0 when this one was started by hand."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def torchrun_rank() -> int:
    """The rank that torchrun gave this process; 0 when it was started by hand."""
    return int(os.environ["RANK"]) if torchrun_world() else 0


def from_torchrun(shares: tuple[float, ...], devices: Sequence[torch.device]) -> Ranks | None:
    """The rank that torchrun gave this process, or None when it was started by hand.

    devices: this host's, one a process of it.
    """
    world = torchrun_world()
    if not world:
        return None
    if len(shares) != world:
        raise PlacementError(f"torchrun started {world} processes, --tensor-split has {len(shares)} shares above 0")
    return join(torchrun_rank(), shares, devices[int(os.environ["LOCAL_RANK"]) % len(devices)])


def start(shares: tuple[float, ...], devices: Sequence[torch.device], settings: bytes) -> Ranks:
    """Start ranks 1.. as `python -m ggufspec.tools.rank` and become rank 0, until this process ends.

    settings: what each of them reads from its standard input: a prompt may be longer than an argument, and a key is
    nothing for the list of processes.
    When a follower ends before this process does, its reason is on stderr and this process ends too.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    followers = []
    for rank in range(1, len(shares)):
        command = [sys.executable, "-P", "-m", "ggufspec.tools.rank", str(rank), str(os.getpid())]
        with tempfile.TemporaryFile() as file:
            file.write(settings)
            file.seek(0)
            followers.append(subprocess.Popen(command, stdin=file))
    closing = threading.Event()
    threading.Thread(target=_watch_followers, args=(followers, closing), daemon=True).start()
    atexit.register(_stop, followers, closing)
    return join(0, shares, devices[0])


def leave(status: int) -> None:
    """End this process if it is one of several ranks: as the interpreter would, but for the library's threads, which
    now and then do not stand its end and abort what had gone well."""
    if dist.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _stop(followers: Sequence[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    closing.set()
    for follower in followers:  # all at once: one that still ran would say that it has lost another
        follower.kill()
    for follower in followers:
        follower.wait()


def _watch_followers(followers: Sequence[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    while not closing.wait(WATCH_SECONDS):
        for rank, follower in enumerate(followers, start=1):
            status = follower.poll()
            if status is not None and not closing.is_set():
                print(f"error: rank {rank} ended with status {status}; all ranks end", file=sys.stderr, flush=True)
                for other in followers:
                    other.kill()
                os._exit(1)


def leave_signals_to_leader() -> None:
    """Ctrl-C, and often SIGTERM (of a service manager, of `timeout`), go to all processes: rank 0 decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def follow_parent(parent: int) -> None:
    """End this process soon after rank 0 has ended, however that happened."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    leave_signals_to_leader()
    threading.Thread(target=watch, daemon=True).start()
