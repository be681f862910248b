"""A tiny model file that says a given text: what llama.cpp's output parser makes of that text can then be seen.

The text is cut into chunks, each a token of its own that no prompt contains; the model's only layer adds nothing and
its head maps each chunk to the next one, any other token to the first.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ggufspec.tokenizer import CHAR_OF

from .vocabularies import write_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def scripted_model(path: Path, chunks: Sequence[str], template: str, user_defined: Sequence[str] = ()) -> Path:
    """Write the model. Chunks must be different from one another and longer than one byte, or be in `user_defined`."""
    words = ["".join(CHAR_OF[byte] for byte in chunk.encode()) for chunk in chunks]
    fixed = [*SPECIAL, *user_defined]
    names = [chunk if chunk in user_defined else word for chunk, word in zip(chunks, words)]
    added = [name for name in names if name not in user_defined]
    tokens = [*fixed, *[CHAR_OF[byte] for byte in range(256)], *added]
    assert len(set(tokens)) == len(tokens), "the chunks are not unique"
    ids = {token: i for i, token in enumerate(tokens)}
    order = [ids[name] for name in names]
    rng = np.random.default_rng(0)
    embedding = np.sign(rng.standard_normal((len(tokens), 512))).astype(np.float32)
    start = embedding[ids[CHAR_OF[10]]]
    said = set(order)
    for i in range(len(tokens)):
        if i not in said:
            embedding[i] = start  # every token of a prompt leads to the first chunk
    head = np.zeros_like(embedding)
    for here, there in zip([None, *order], [*order, 2]):
        head[there] += start if here is None else embedding[here]
    merges = [f"{CHAR_OF[255]} {CHAR_OF[254]}"]  # the format wants some; this one never applies
    tokens.append(CHAR_OF[255] + CHAR_OF[254])
    embedding, head = (np.vstack([table, np.zeros((1, 512), np.float32)]) for table in (embedding, head))
    keys = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": merges, "bos_token_id": 0, "eos_token_id": 2,
        "token_type": [3] * 3 + [4] * len(user_defined) + [1] * (len(tokens) - len(fixed)), "add_bos_token": False,
    }  # fmt: skip
    return write_model(path, keys, template=template, embedding=embedding, head=head * 4)
