"""One rank of the sums in Triton's interpreter: processes that share their inboxes on the CPU (see test_peer_sums.py).

    python peer_rank.py RANK OUT CALLS INBOX...        calls: rows and columns of each; inboxes: files that all map
"""

import json
import sys

import interpreter  # noqa: F401  # before any kernel
import torch

from ggufspec.kernels.peer import triton as kernel
from ggufspec.kernels.peer.link import Link, n_words


def part_of(rank: int, call: int, T: int, K: int) -> torch.Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(100 * call + rank))


def main() -> None:
    rank, out, calls, paths = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
    inboxes = [torch.from_file(path, shared=True, size=n_words(len(paths)), dtype=torch.int64) for path in paths]
    link = Link.of(rank, inboxes)
    results = []
    for call, (T, K) in enumerate(calls):
        part = part_of(rank, call, T, K)
        if call % 2:
            x = part_of(50, call, T, K)
            total, a = kernel.sum_add_rms_norm(x, part, part_of(60, call, 1, K)[0], 1e-6, link, limit=2_000_000)
            results.append((total, a.rows, a.scale))
        else:
            results.append((kernel.sum_parts(part, link, limit=2_000_000),))
    torch.save({"results": results, "late": int(link.late), "calls": link.calls}, out)


if __name__ == "__main__":
    main()
