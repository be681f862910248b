"""Attention of a step's rows over the packed cache, the rows themselves included (store them first)."""

from types import ModuleType

from torch import Tensor

from ggufspec.kernels.attention import plain
from ggufspec.kernels.attention.spec import AttentionSpec
from ggufspec.kernels.kv.storage import KV
from ggufspec.kernels.matmul import Activation

__all__ = ["AttentionSpec", "attend", "attend_prepared"]


def room(x: Tensor) -> ModuleType:
    """The twin or the kernels, by the device of x."""
    if x.is_cuda:
        from ggufspec.kernels.attention import triton

        return triton
    return plain


def attend(
    q: Tensor,
    kv: KV,
    slots: Tensor,
    n_past: Tensor,
    n_rows: Tensor,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    q_rotated: bool = False,
) -> Tensor:
    """q [B, W, H, hd] (after norm and rotary embedding) of slots [B] to [B, W, H, hd_v] float32.

    Row i of entry b stands at position n_past[b] + i and sees stored positions below n_past[b] + n_rows[b] as
    `spec` allows. Query head h reads key head h // (H / n_kv). Rows past n_rows give finite numbers of no
    meaning.

    gate [B, W, H, hd_v]: the result is multiplied by sigmoid(gate). q_rotated: q comes from `kv.norm_rope_store`,
    which has applied the cache's Hadamard rotation already.
    """
    return room(q).attend(q, kv, slots, n_past, n_rows, spec, gate, q_rotated)


def attend_prepared(
    q: Tensor,
    kv: KV,
    slots: Tensor,
    n_past: Tensor,
    n_rows: Tensor,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    q_rotated: bool = False,
) -> Activation:
    """`attend` straight into a matmul's input [B * W, H * hd_v], gate included; narrow batches in the same launches."""
    return room(q).attend_prepared(q, kv, slots, n_past, n_rows, spec, gate, q_rotated)
