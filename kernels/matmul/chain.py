"""Several products in one launch of the narrow kernel, its programs meeting between them.

    if stages(launches, n_tokens, device):    # else: this card or these weights need a launch each
        run(steps)                            # see `narrow` for steps; they share one config

The programs of such a launch wait for one another, so all of them must be on the card at once: `per_sm` programs a
multiprocessor, whose registers and shared memory are bounded accordingly.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ggufspec.kernels.matmul import repack
from ggufspec.kernels.matmul.cuda import MOST_PARTS, Config, Launch, capability
from ggufspec.kernels.matmul.narrow import RESERVED_BYTES, Step, card, cut, forms_of, launch_steps

TOKENS = 16  # more take a launch a product
TILES = (8, 16)
STEPS = 5  # of a layer's tail, where the next layer's first weights have two types


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Where programs count themselves: one launch at a time, in the order of one stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def stage_bytes(launches: Sequence[Launch], config: Config, tile: int) -> int:
    """Shared memory of one stage that holds a unit of any of the launches, and its activations."""
    widest: dict[tuple[str, int], int] = {}
    for launch in launches:
        for name, part in launch.parts.items():
            n_bytes = part[0, 0].numel() * part.element_size()
            widest[name, n_bytes] = n_bytes
    return config.KW * (config.n_rows * sum(widest.values()) + tile * repack.BLOCK * 2)


def stages(launches: Sequence[Launch], n_tokens: int, index: int | None) -> int:
    """Stages of one launch over all of these with n_tokens rows; 0 where they need a launch each."""
    forms = [repack.FORMS[launch.type_name] for launch in launches]
    kinds = {launch.parts[k].dtype for launch in launches for k in ("d", "min") if k in launch.parts}
    configs = {replace(launch.config, ST=0) for launch in launches}
    if n_tokens > TOKENS or max(len({form.low for form in forms}), len(kinds), len(configs)) > 1:
        return 0
    highs = {form.high for form in forms} - {0}
    if launches[0].config.whole or len(forms_of(launches)) > 2 or len(highs) > 1 or capability(index) < (8, 0):
        return 0
    config = launches[0].config
    _, shared, most = card(index)
    room = min(shared // config.per_sm, most) - RESERVED_BYTES
    tile = next(n for n in TILES if n >= n_tokens)
    fit = min(max(launch.config.ST for launch in launches), room // stage_bytes(launches, config, tile))
    return fit if fit >= 2 else 0


def run(steps: Sequence[Step], pdl: bool | None = None) -> None:
    """Launch the steps as one; `stages` has said that they can be."""
    launches, a = [step.launch for step in steps], steps[0].a
    n_tokens, index, config = a.rows.shape[0], a.rows.device.index, launches[0].config
    n_programs = config.per_sm * card(index)[0]
    shares = [cut(n.padded_rows, n.n_super_blocks, config, n_programs) for n in launches]
    steps = [*steps]
    while len(steps) < STEPS:  # of no work: launches of fewer products run the same code
        steps.append(replace(steps[-1], waits=False))
        shares.append(replace(shares[-1], n_units=0))
    tile = next(n for n in TILES if n >= n_tokens)
    n_stages = stages(launches, n_tokens, index)
    pdl = capability(index) >= (9, 0) if pdl is None else pdl
    launch_steps(steps, shares, MOST_PARTS, n_programs, tile, n_stages, config, counters(a.rows.device), pdl)
