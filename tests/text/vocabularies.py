"""Small vocabularies made on the spot, as GGUF metadata, and tiny models that carry them.

The merges are trained on text that is cut only at line ends, so they cross every border a pre-tokenizer can draw:
a word cut in another place gives other ids.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from ggufspec.tokenizer import BYTE_OF

from .mixed_text import mixed_text

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>"]
USER = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["water", "Ġthese", "Ġpeople", "'ll", "123", "HTTP", "ĊĊĊ"]  # no merges lead to these


@cache
def _trained(byte_level: bool, n_vocab: int = 2000) -> tuple[list[str], list[str]]:
    """Token texts (base alphabet first, then in order of merging) and merges."""
    encoder = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]{1,16}\n*|\n+"), "isolated")
    raw = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    encoder.pre_tokenizer = raw if byte_level else cut
    alphabet = sorted(BYTE_OF) if byte_level else [chr(i) for i in range(32, 127)]
    trainer = trainers.BpeTrainer(vocab_size=n_vocab, initial_alphabet=alphabet, show_progress=False,
                                  limit_alphabet=256 if byte_level else 600)  # fmt: skip
    text = mixed_text(300_000, seed=7)
    for word in [*CONTROL, *USER, "<s>", "<unk>", "<0x0A>"]:
        text = text.replace(word, "")
    encoder.train_from_iterator([text if byte_level else text.replace(" ", "\u2581")], trainer)
    made = json.loads(encoder.to_str())["model"]
    tokens = [text for text, _ in sorted(made["vocab"].items(), key=lambda item: item[1])]
    return tokens, [" ".join(pair) for pair in made["merges"]]


def byte_bpe(pre: str) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a byte-level BPE vocabulary with pre-tokenizer `pre`."""
    tokens, merges = _trained(byte_level=True)
    words = [word for word in WORDS if word not in tokens]
    return {
        "model": "gpt2", "pre": pre, "tokens": CONTROL + USER + tokens + words, "merges": merges,
        "token_type": [3] * len(CONTROL) + [4] * len(USER) + [1] * (len(tokens) + len(words)),
        "bos_token_id": 0, "eos_token_id": 2, "add_bos_token": False,
    }  # fmt: skip


def sentencepiece() -> dict[str, Any]:
    """`tokenizer.ggml.*` of a vocabulary as Llama 2 and Gemma have it: pieces with scores, byte fallback."""
    tokens, _ = _trained(byte_level=False)
    special = ["<unk>", "<s>", "</s>", "<pad>", "<unused0>", "<start_of_turn>", "<end_of_turn>"]
    special += ["\n\n", "\n\n\n", "<think>", "</think>"]
    tokens = [text for text in tokens if text not in special]
    types = [2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4] + [6] * 256 + [1] * len(tokens)
    scores = [0.0] * (len(special) + 256) + [-float(i) for i in range(len(tokens))]
    return {
        "model": "llama", "pre": "default", "tokens": special + [f"<0x{i:02X}>" for i in range(256)] + tokens,
        "token_type": types, "scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
        "padding_token_id": 3,
    }  # fmt: skip


def gemma4() -> dict[str, Any]:
    """`tokenizer.ggml.*` of BPE with merges on raw UTF-8, byte fallback, as Gemma 4 has it."""
    tokens, merges = _trained(byte_level=False)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    runs = ["\n" * n for n in range(2, 9) if "\n" * n not in tokens]
    types = [3, 3, 3, 2, 3] + [6] * 256 + [1] * (len(tokens) + len(runs))
    return {
        "model": "gemma4", "pre": "gemma4", "tokens": special + [f"<0x{i:02X}>" for i in range(256)] + tokens + runs,
        "merges": merges, "token_type": types, "scores": [0.0] * len(types), "bos_token_id": 2, "eos_token_id": 1,
        "unknown_token_id": 3, "padding_token_id": 0,
    }  # fmt: skip


def metadata(keys: dict[str, Any]) -> dict[str, Any]:
    """The same keys under their full GGUF names."""
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def write_model(path: Path, keys: dict[str, Any], template: str | None = None, embedding: np.ndarray | None = None,
                head: np.ndarray | None = None, n_ctx: int = 4096) -> Path:  # fmt: skip
    """A one-layer llama whose layer adds nothing: the logits are head @ norm(embedding[token]); random by default."""
    n_vocab = len(keys["tokens"])
    if embedding is None:
        embedding = np.random.default_rng(0).standard_normal((n_vocab, 32)).astype(np.float32)
    n_embd = embedding.shape[1]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(n_embd)
    writer.add_vocab_size(n_vocab)
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    if template is not None:
        writer.add_chat_template(template)
    zero = np.zeros((n_embd, n_embd), np.float32)
    tensors = {"token_embd.weight": embedding, "output.weight": embedding if head is None else head,
               "output_norm.weight": np.ones(n_embd, np.float32), "blk.0.attn_norm.weight": np.ones(n_embd, np.float32),
               "blk.0.ffn_norm.weight": np.ones(n_embd, np.float32),
               **{f"blk.0.attn_{name}.weight": zero for name in ("q", "k", "v", "output")},
               "blk.0.ffn_gate.weight": np.zeros((32, n_embd), np.float32),
               "blk.0.ffn_up.weight": np.zeros((32, n_embd), np.float32),
               "blk.0.ffn_down.weight": np.zeros((n_embd, 32), np.float32)}  # fmt: skip
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
