"""The plainest speculative loop: no engine, no sampling but greedy, every step's draft and accepted count kept."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ggufspec.drafters.load import DraftOptions, SpecOptions, load_drafter
from ggufspec.gguf_file import open_gguf
from ggufspec.models import load_model
from ggufspec.placement import Placement
from ggufspec.rows import Rows, prompt_rows


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[list[int], int]] = field(default_factory=list)  # (draft as verified, accepted)

    @property
    def n_drafted(self) -> int:
        return sum(len(draft) for draft, _ in self.steps)

    @property
    def n_accepted(self) -> int:
        return sum(accepted for _, accepted in self.steps)


def load_target(path: Path):
    file = open_gguf(path)
    return file, load_model(file, Placement.single("cpu", 64))


def make_drafter(file, target, draft: Path | None, kinds, n_slots=1, n_ctx=512, **options):
    draft_options = {k: options.pop(k) for k in ("n_max", "n_min", "p_min") if k in options}
    spec = SpecOptions(types=tuple(kinds), draft=DraftOptions(**draft_options), **options)
    return load_drafter(
        spec, file, target, None if draft is None else open_gguf(draft), n_slots=n_slots, n_ctx=n_ctx
    )


def one(value: int) -> torch.Tensor:
    return torch.tensor([value])


@torch.inference_mode()
def generate(
    target, drafter, prompt, n_predict, *, slot=0, n_slots=1, n_ctx=512, banned=(), type_k="f32", type_v="f32",
    n_chunk=512, cache=None,
) -> Run:  # fmt: skip
    """Greedy text of `prompt` in one slot, with `banned` tokens never chosen by the target."""
    cache = cache or target.new_cache(n_slots, n_ctx, type_k, type_v)
    taps = drafter.taps if drafter else ()

    def choose(logits):
        logits = logits.clone()
        logits[..., list(banned)] = -torch.inf
        return logits.argmax(-1)

    cache.reset(slot)
    if drafter:
        drafter.reset(slot)
    for start in range(0, len(prompt), n_chunk):
        rows = prompt_rows(torch.tensor(prompt[start : start + n_chunk]), slot, start)
        output = target.forward(rows, cache, taps=taps, logits="last")
        if drafter:
            drafter.observe(rows, output)
    if drafter:
        drafter.begin(slot, list(prompt))
    run = Run([int(choose(output.logits[0, -1]))])
    n_past = len(prompt)
    while len(run.tokens) < n_predict:
        last = run.tokens[-1]
        room = min(n_ctx - n_past - 2, n_predict - len(run.tokens) - 1)
        drafted: list[int] = []
        if drafter and room > 0:
            draft = drafter.propose(one(slot), one(last), one(n_past), drafter.n_max)
            drafted = draft.tokens[0, : int(draft.n_tokens[0])].tolist()[:room]
        tokens = torch.tensor([[last, *drafted]])
        rows = Rows(tokens, one(slot), one(n_past), one(len(drafted) + 1), tentative=True)
        output = target.forward(rows, cache, taps=taps, logits="all")
        chosen = choose(output.logits[0]).tolist()
        a = 0
        while a < len(drafted) and chosen[a] == drafted[a]:
            a += 1
        cache.accept(one(slot), one(a + 1))
        if drafter:
            drafter.observe(rows, output)
            drafter.accept(one(slot), one(a))
            drafter.record(slot, len(drafted), a)
        run.steps.append((drafted, a))
        run.tokens += chosen[: a + 1]
        n_past += a + 1
    return run
