"""A follower of a tensor split: the same engine on the same settings, led by rank 0.

The program starts followers itself, as this module; those that torchrun starts are the program, and call `follow`.
"""

from __future__ import annotations

import os
import pickle
import sys

from ggufspec.errors import GgufspecError
from ggufspec.placement import devices_of
from ggufspec.ranks import LeaderGone, Ranks, follow_parent, join, leave_signals_to_leader, torchrun_rank
from ggufspec.tools.runtime import open_runtime
from ggufspec.tools.settings import Settings


def is_follower() -> bool:
    """Whether torchrun has started this process to follow another one."""
    return torchrun_rank() > 0


def follow(settings: Settings, ranks: Ranks | None = None) -> None:
    """Do as rank 0 does until it has ended; ends this process. torchrun's followers have no `ranks` yet.

    It ends without ceremony: the library's threads still wait for ranks that are gone.
    """
    rank, status = torchrun_rank() if ranks is None else ranks.rank, 1
    try:
        runtime = open_runtime(settings, show_progress=False, ranks=ranks)
        while True:
            runtime.engine.step()
    except LeaderGone:
        status = 0
    except GgufspecError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def follow_torchrun(settings: Settings) -> None:
    """`follow`, where torchrun's agent passes signals on to all."""
    leave_signals_to_leader()
    follow(settings)


def main() -> None:
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    follow_parent(parent)
    settings: Settings
    shares: tuple[float, ...]
    settings, shares = pickle.load(sys.stdin.buffer)
    devices = devices_of(settings.model.devices)
    follow(settings, join(rank, shares, devices[rank % len(devices)]))


if __name__ == "__main__":
    main()
