"""What an attention layer sees."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """scale multiplies q.k. causal: a row sees positions up to its own; otherwise all stored positions, the
    rows of its own step included (a draft block). window n > 0: only positions less than n behind the row.
    sinks: float32 [H], one more logit a head that adds to the softmax's denominator only.
    """

    scale: float
    causal: bool = True
    window: int = 0
    sinks: Tensor | None = None
