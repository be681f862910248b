"""Ranks of a tensor split on logical CPU devices: one process each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_ranks(worker: Path, shares: Sequence[float], out: Path, *more: str) -> list[dict]:
    """What every rank of `worker RANK SHARES OUT MORE...` wrote to OUT.RANK."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(worker.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths
    }
    text = ",".join(map(str, shares))
    ranks = [
        subprocess.Popen([sys.executable, str(worker), str(r), text, str(out), *more], env=environment,
                         stderr=subprocess.PIPE)
        for r in range(len(shares))
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors.decode()[-2000:]
    return [json.loads(Path(f"{out}.{r}").read_text()) for r in range(len(shares))]
