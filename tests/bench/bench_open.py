"""How long does a file with a 248,320-token vocabulary and its merges take to open?

    python tests/bench/bench_open.py [--tokens 248320] [--repeat 5]

Prints the best time of opening it, of decoding the two string arrays into lists, and the size of the header. The
limit is 1.5 s for both together. Words are random, with the lengths and the byte-level letters of a real
vocabulary.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from ggufspec.gguf_file import open_gguf
from ggufspec.gguf_write import Key, write_gguf


def make_vocabulary(path: Path, n_tokens: int) -> None:
    pick = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz" * 4 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-ĠĊåæçèéäöüðńĸ"
    tokens = [
        "".join(pick.choices(letters, k=1 + min(int(pick.expovariate(0.17)), 60))) + str(i) for i in range(n_tokens)
    ]
    merges = [f"{token[: len(token) // 2]} {token[len(token) // 2 :]}" for token in tokens[256:]]
    keys = [
        Key("general.architecture", "str", "qwen35"),
        Key("tokenizer.ggml.tokens", "arr[str]", tokens),
        Key("tokenizer.ggml.token_type", "arr[i32]", [1] * n_tokens),
        Key("tokenizer.ggml.merges", "arr[str]", merges),
    ]
    write_gguf(path, keys, [], [])


def measure(path: Path, repeat: int) -> tuple[float, float]:
    """Best seconds of opening, and of decoding tokens and merges."""
    opening, decoding = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        file = open_gguf(path)
        opened = time.perf_counter()
        file.get("tokenizer.ggml.tokens", list[str])
        file.get("tokenizer.ggml.merges", list[str])
        opening.append(opened - start)
        decoding.append(time.perf_counter() - opened)
    return min(opening), min(decoding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=248320)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        make_vocabulary(path, options.tokens)
        opening, decoding = measure(path, options.repeat)
        print(f"{options.tokens} tokens, header of {path.stat().st_size / 2**20:.1f} MiB")
        print(f"open {opening:.3f} s, decode both lists {decoding:.3f} s, limit 1.5 s")


if __name__ == "__main__":
    main()
