"""Random matrices as file bytes, and weights as the kernels read them, on the CPU."""

import numpy as np
import torch

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.weight import PackedWeight
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


def for_kernels(raw: torch.Tensor, type_name: str, rows: int, columns: int) -> PackedWeight:
    """What `pack` makes of file bytes on a card, of a type in `repack.FORMS`."""
    shift = repack.shift_for(float(repack.largest_scale(raw, type_name)), type_name)
    parts = {name: part.contiguous() for name, part in repack.repack(raw, type_name, shift).items()}
    return PackedWeight(type_name, (rows, columns), torch.device("cpu"), parts=parts, shift=shift)
