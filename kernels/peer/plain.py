"""The sums' oracle: every rank's part in one place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ggufspec.kernels.matmul import Activation
from ggufspec.kernels.prepared import plain


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """The ranks' parts, added up in rank order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sum_add_rms_norm(x: Tensor, parts: Sequence[Tensor], weight: Tensor, eps: float) -> tuple[Tensor, Activation]:
    return plain.add_rms_norm(x, sum_parts(parts), weight, eps)
