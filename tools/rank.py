"""A follower of a tensor split: the same engine on the same settings, led by rank 0. Started by the program itself."""

from __future__ import annotations

import pickle
import sys
from base64 import b64decode

from ggufspec.errors import GgufspecError
from ggufspec.placement import devices_of
from ggufspec.ranks import follow_parent, join
from ggufspec.tools.runtime import open_runtime
from ggufspec.tools.settings import Settings


def main() -> None:
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    follow_parent(parent)
    settings: Settings
    shares: tuple[float, ...]
    settings, shares = pickle.loads(b64decode(sys.argv[3]))
    devices = devices_of(settings.model.devices)
    try:
        ranks = join(rank, shares, devices[rank % len(devices)])
        runtime = open_runtime(settings, show_progress=False, ranks=ranks)
        while True:
            runtime.engine.step()
    except GgufspecError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
