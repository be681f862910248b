"""Encode stress rows through the Triton searches and through numpy; print one line a type that differs.

With TRITON_INTERPRET=1 the kernels run on the CPU, on tensors that stay there; with a GPU, on it.
"""

import os
import sys

import numpy as np
import torch
from rows import stress_rows

from ggufspec.quant import layouts
from ggufspec.quant.quantize import ENCODERS, quantize


def main(names: list[str], n_rows: int, n_columns: int) -> int:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.set_num_threads(1)
    kinds = stress_rows(n_rows, n_columns)
    x = np.concatenate(list(kinds.values()))
    importance = np.random.default_rng(5).uniform(0.01, 10, n_columns).astype(np.float32)
    n_bad = 0
    for name in names:
        for w in (None, importance):
            moved = None if w is None else torch.from_numpy(w).to(device)
            raw = ENCODERS[name](torch.from_numpy(x).to(device), moved).cpu().numpy()
            bad = (raw.reshape(len(x), -1) != quantize(x, name, w)).reshape(-1, layouts.BY_NAME[name].n_bytes).any(1)
            if bad.any():
                n_bad += 1
                rows = np.flatnonzero(bad) // (n_columns // layouts.BY_NAME[name].n_elements)
                print(name, "imatrix" if w is not None else "plain", {list(kinds)[r // n_rows] for r in rows})
    return n_bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[3:] or list(ENCODERS), int(sys.argv[1]), int(sys.argv[2])) > 0)
