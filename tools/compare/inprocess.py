"""The child process of `ggufspec compare --peer xllamacpp`: serve a model with llama.cpp until the parent goes.

Reads one line of JSON (attributes of `CommonParams` by dotted path) and answers `listening ADDRESS`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from xllamacpp import xllamacpp as llama

    params = llama.CommonParams()
    for path, value in json.loads(sys.stdin.readline()).items():
        *folders, name = path.split(".")
        target: Any = params
        for folder in folders:
            target = getattr(target, folder)
        if not hasattr(target, name):
            raise AttributeError(f"llama.cpp's parameters have no {path}")
        setattr(target, name, value_of(llama, name, value))
    server = llama.Server(params)
    print("listening", server.listening_address, flush=True)
    sys.stdin.read()


def value_of(llama: Any, name: str, value: Any) -> Any:
    """Enumerations travel by the names of llama.cpp's options."""
    if name == "types":
        prefix = "COMMON_SPECULATIVE_TYPE_"
        return [getattr(llama.common_speculative_type, prefix + v.upper().replace("-", "_")) for v in value]
    if name in ("cache_type_k", "cache_type_v"):
        return getattr(llama.ggml_type, "GGML_TYPE_" + value.upper())
    if name == "flash_attn_type":
        word = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}[value]
        return getattr(llama.llama_flash_attn_type, "LLAMA_FLASH_ATTN_TYPE_" + word)
    return value


if __name__ == "__main__":
    main()
