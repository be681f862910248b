"""A saved state away from the devices, and what it weighs there: what the host cache of prompts keeps and counts."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def host_copy(value: Any) -> tuple[Any, int]:
    """(the same lists, tuples, dictionaries and dataclasses with every tensor on the host, the tensors' bytes).

    Tensors that are on the host already are kept, not copied.
    """
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return host, host.numel() * host.element_size()
    if isinstance(value, list | tuple):
        copies = [host_copy(item) for item in value]
        return type(value)(copy for copy, _ in copies), sum(n for _, n in copies)
    if isinstance(value, dict):
        copies = [host_copy(item) for item in value.values()]
        return dict(zip(value, (copy for copy, _ in copies))), sum(n for _, n in copies)
    if is_dataclass(value) and not isinstance(value, type):
        named = {f.name: host_copy(getattr(value, f.name)) for f in fields(value)}
        return type(value)(**{name: copy for name, (copy, _) in named.items()}), sum(n for _, n in named.values())
    return value, 0
