"""Compile every kernel of this folder's rooms at the sizes of a 27-billion-parameter model."""

import torch
from compiling import compiling
from random_blocks import random_raw

from ggufspec.kernels import gdn, overlap
from ggufspec.kernels import kv as kvs
from ggufspec.kernels.attention import AttentionSpec, shape
from ggufspec.kernels.attention import triton as attention_triton
from ggufspec.kernels.carry import triton as carry_triton
from ggufspec.kernels.conv import triton as conv_triton
from ggufspec.kernels.gdn import GdnSpec, GdnWeights
from ggufspec.kernels.gdn import prompt as gdn_prompt
from ggufspec.kernels.gdn import scan as gdn_scan
from ggufspec.kernels.gdn import step as gdn_step
from ggufspec.kernels.kv import triton as kv_triton
from ggufspec.kernels.matmul import PackedWeight, repack
from ggufspec.kernels.norm import triton as norm_triton
from ggufspec.kernels.prepared import triton as prepared_triton
from ggufspec.kernels.rope import RopeSpec
from ggufspec.kernels.rope import triton as rope_triton
from ggufspec.kernels.rows import triton as rows_triton
from ggufspec.kernels.select import triton as select_triton

KERNELS = {
    "norm_kernel", "activation_kernel", "tables_kernel", "rotate_kernel", "store_kernel", "spin_kernel",
    "split_kernel", "combine_kernel", "prompt_kernel", "step_kernel", "accept_kernel", "committed_kernel",
    "block_max_kernel", "first_max_kernel", "pack_top_kernel", "merge_top_kernel", "unpack_kernel", "walk_kernel",
    "dynamic_conv_kernel", "norm_input_kernel", "activation_input_kernel", "gated_input_kernel",
    "pair_input_kernel", "conv_input_kernel", "conv_norm_kernel",
    "positions_kernel", "masked_block_kernel", "lay_out_kernel", "accepted_prefix_kernel",
    "markov_row_kernel", "run_max_kernel", "top_of_runs_kernel", "before_kernel", "keep_kernel", "take_kernel",
    "selector_rows_kernel",
}  # fmt: skip
PROMPT = {"prompt_inputs_kernel", "tail_kernel", "system_kernel", "scan_kernel", "output_kernel"}  # of gated DeltaNet


def everything(capability: int) -> None:
    overlap.overlaps = lambda x: capability >= 90
    shape.capability = lambda device: divmod(capability, 10)
    with compiling(capability) as names:
        norms()
        attention()
        recurrent(capability)
        selection()
        bookkeeping()
    expected = KERNELS | PROMPT if capability >= 80 else KERNELS
    assert set(names) == expected, expected ^ set(names)


def norms() -> None:
    x, w = torch.zeros(3, 5120), torch.zeros(5120)
    norm_triton.add_rms_norm(x, x, w, 1e-6)
    norm_triton.swiglu(x, x)
    norm_triton.gated_norm(torch.zeros(48, 128), torch.zeros(48, 128), torch.zeros(128), 1e-6)
    prepared_triton.add_rms_norm(x, x, w, 1e-6)
    prepared_triton.add_rms_norm_kept(x, x, w, 1e-6)
    prepared_triton.rms_norm_pair(x, x, w, w, 1e-6)
    prepared_triton.swiglu(torch.zeros(3, 17408), torch.zeros(3, 17408))
    prepared_triton.gated_norm(torch.zeros(3, 48, 128), torch.zeros(3, 48, 128), torch.zeros(128), 1e-6)


def attention() -> None:
    spec, positions = RopeSpec(64), torch.arange(8).view(1, 8)
    cos, sin = rope_triton.tables(positions, spec)
    q, k, w = torch.zeros(1, 8, 24, 256), torch.zeros(1, 8, 4, 256), torch.zeros(256)
    rope_triton.rotate(q, cos, sin, spec)
    slots, n = torch.tensor([0]), torch.tensor([8])
    for types in (("f16", "f16"), ("q8_0", "q8_0"), ("bf16", "f32"), ("bf16", "bf16"), ("q5_1", "iq4_nl"),
                  ("iq4_nl", "iq4_nl")):  # fmt: skip
        kv = kvs.allocate(*types, 1, 512, 4, 256, 256, "cpu")
        kv_triton.norm_rope_store(kv, q, k, k, slots, positions, (w, w, 1e-6), (cos, sin, spec))
        mask = AttentionSpec(0.1, window=100, sinks=torch.zeros(24))
        for width in (1, 8):  # tiles of two heights
            rows = q[:, :width]
            attention_triton.attend(rows, kv, slots, n, n, mask, gate=rows)
        if types[0] == "q8_0":
            attention_triton.attend(torch.zeros(1, 40, 24, 256), kv, slots, n, n, AttentionSpec(0.1))


def recurrent(capability: int) -> None:
    spec = GdnSpec(16, 48, 128, 4, 1e-6)
    weights = GdnWeights(torch.zeros(spec.conv_dim, 4), torch.zeros(48), torch.zeros(48))
    state, slots = gdn.allocate(spec, 1, "cpu"), torch.tensor([0])
    rows = torch.zeros(1, 8, spec.conv_dim), torch.zeros(1, 8, 48), torch.zeros(1, 8, 48)
    u, alpha, beta = rows
    for division in (gdn_step.Division(1), gdn_step.Division(2), gdn_step.Division(4), gdn_step.Division(2, 4)):
        gdn_step.step_prepared(u, torch.zeros(1, 8, 6144), alpha, beta, weights, torch.zeros(128), 1e-6, state, slots,
                               slots + 8, spec, division)  # fmt: skip
    gdn_step.accept(state, slots, slots, slots)
    gdn_step.committed(state.counts, slots)
    if capability >= 80:
        gdn_scan.config_for = lambda device: gdn_scan.HOPPER if capability == 90 else gdn_scan.USUAL
        gdn_prompt.chunk(*rows, weights, state, slots, slots, spec)


def arrays(type_name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A weight's arrays as the kernels read them."""
    raw = random_raw(type_name, rows, columns, seed=1)
    return {name: part.contiguous() for name, part in repack.repack(raw, type_name, 0).items()}


def selection() -> None:
    x = torch.zeros(2, 248320)
    select_triton.argmax(x)
    select_triton.top_k(x, 16)
    select_triton.top_k(x, 100)
    table = PackedWeight("Q4_K", (40, 256), torch.device("cpu"), parts=arrays("Q4_K", 40, 256), shift=0)
    ids = torch.zeros(1, 7, 16, dtype=torch.int64)
    select_triton.selector_rows(ids, ids[:, 0, 0], table, table)
    select_triton.matmul = lambda a, group: (torch.zeros(2, 248320),)
    select_triton.markov_tokens(torch.zeros(2, 3, 248320), torch.zeros(2, dtype=torch.int64), table, None)
    select_triton.walk(torch.zeros(1, 7, 16, dtype=torch.int64), torch.zeros(1, 7, 16), torch.zeros(1, 7, 256),
                       torch.zeros(1, 97, 256), torch.zeros(1, 7, 16, 256))  # fmt: skip
    h, dyn, base = torch.zeros(1, 8, 5120), torch.zeros(1, 8, 2, 2, 320), torch.zeros(2, 2, 5120)
    conv_triton.dynamic_conv(h, dyn, base, 1)
    conv_triton.prepared_conv(h, dyn, base, 0)
    conv_triton.add_conv_norm(h, h, dyn, base, 1, torch.zeros(5120), 1e-6)


def bookkeeping() -> None:
    n, draft = torch.ones(2, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
    rows_triton.positions(n, n, 8)
    rows_triton.masked_block(n, 9, 8, n)
    tokens, n_rows = rows_triton.lay_out(n, draft, n, 248320)
    rows_triton.accepted_prefix(tokens, tokens, n_rows, torch.zeros(248320, dtype=torch.bool))
    state = torch.zeros(4, 5120), torch.zeros(4, 16, 5120), n
    carry_triton.before(state[0], n, n, torch.zeros(2, 8, 5120))
    carry_triton.keep(*state, torch.zeros(2, 8, 5120), n, n, True)
    carry_triton.take(*state, n, n)
