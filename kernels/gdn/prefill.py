"""Prompt chunks of a gated DeltaNet layer: rows go into the committed state at once."""

import torch
from torch import Tensor

from ggufspec.kernels.gdn import plain
from ggufspec.kernels.gdn.chunked import chunked, padded
from ggufspec.kernels.gdn.state import GdnSpec, GdnState, GdnWeights, set_tails, tails

SHORT_ROWS = 8  # up to this width the recurrence is quicker than a padded chunk
MINIMUM_CAPABILITY = (8, 0)  # cards before it multiply the chunks in the library


def chunk(
    u: Tensor,
    alpha: Tensor,
    beta: Tensor,
    weights: GdnWeights,
    state: GdnState,
    slots: Tensor,
    n_rows: Tensor,
    spec: GdnSpec,
) -> Tensor:
    """Rows of each slot as one sequence; the slots' windows have been replayed. Rows past n_rows give anything."""
    if u.is_cuda and torch.cuda.get_device_capability(u.device) >= MINIMUM_CAPABILITY:
        from ggufspec.kernels.gdn import prompt

        with torch.cuda.device(u.device):
            return prompt.chunk(u, alpha, beta, weights, state, slots, n_rows, spec)
    B, width, _ = u.shape
    W = int(n_rows.max())  # the rest is padding
    u, alpha, beta = (x[:, :W] for x in (u, alpha, beta))
    before = tails(state, slots)
    q, k, v, g, gate = plain.chunk_inputs(u, alpha, beta, weights, before, n_rows, spec)
    if W <= SHORT_ROWS:
        rows = [plain.naive(q[b], k[b], v[b], g[b], gate[b], state.state[slots[b]]) for b in range(B)]
        out, new = (torch.stack(part) for part in zip(*rows))
    else:
        out, new = chunked(q, k, v, g, gate, state.state[slots])
    state.state[slots] = new
    keep = n_rows[:, None] + torch.arange(spec.conv_kernel - 1, device=u.device)
    joined = torch.cat((before, u), 1)
    set_tails(state, slots, joined.gather(1, keep.unsqueeze(-1).expand(-1, -1, joined.shape[-1])))
    return padded(out, width)
