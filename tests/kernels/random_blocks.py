"""Random matrices as file bytes."""

import numpy as np
import torch

from ggufspec.quant import layouts

HALF_AT = {  # bytes of each block that hold float16 numbers
    "F16": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def random_raw(type_name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Bytes of a random matrix: every quant and scale bit random, every float of ordinary size."""
    layout = layouts.BY_NAME[type_name]
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "BF16"):
        x = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
        return (x if type_name == "F32" else x.bfloat16()).view(torch.uint8)
    b = rng.integers(0, 256, (rows, columns // layout.n_elements, layout.n_bytes), dtype=np.uint8)
    for at in HALF_AT[type_name]:
        d = (rng.standard_normal(b.shape[:2]) * 0.01).astype(np.float16)
        b[..., at : at + 2] = d[..., None].view(np.uint8)
    return torch.from_numpy(b.reshape(rows, -1))
