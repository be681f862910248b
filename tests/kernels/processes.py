"""Python processes of their own: for what replaces parts of Triton, which is for a whole process."""

import os
import subprocess
import sys
from pathlib import Path

from ggufspec.kernels.peer.link import WORD_BYTES, n_words

FOLDER = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """This folder's modules can be imported; kernels are interpreted only where a process says so itself."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    held = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    held.pop("TRITON_INTERPRET", None)
    return held


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder, or `-c` code, with `more` in its environment; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER, env=environment(**more), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def inboxes_in(folder: Path, size: int) -> list[Path]:
    """Files of zeros that ranks of a test map as their inboxes (see `kernels.peer.link`)."""
    paths = [folder / f"inbox{r}" for r in range(size)]
    for path in paths:
        with path.open("wb") as f:
            f.truncate(WORD_BYTES * n_words(size))
    return paths
