"""One rank of the exchange in Triton's interpreter: processes that share their inboxes (see test_candidates.py).

    python candidates_rank.py RANK OUT CALLS INBOX...        calls: rows, candidates, this rank's first column and last
"""

import json
import sys

import interpreter  # noqa: F401  # before any kernel
import torch
from tied_logits import logits_of

from ggufspec.kernels.candidates import triton as kernel
from ggufspec.kernels.peer.link import Link, n_words
from ggufspec.kernels.select import plain


def selected(part: torch.Tensor, k: int) -> torch.Tensor:
    m = min(k, part.shape[1])
    return plain.top_k(part, m)[1] if m else torch.empty(part.shape[0], 0, dtype=torch.int64)


def main() -> None:
    rank, out, calls, paths = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
    inboxes = [torch.from_file(path, shared=True, size=n_words(len(paths)), dtype=torch.int64) for path in paths]
    link = Link.of(rank, inboxes)
    results = []
    for call, (T, k, V, bounds) in enumerate(calls):
        first, end = bounds[rank]
        part = logits_of(call, T, V)[:, first:end]
        results.append(kernel.exchange(part, selected(part, k), first, k, link, limit=2_000_000))
    torch.save({"results": results, "late": int(link.late), "calls": link.calls}, out)


if __name__ == "__main__":
    main()
