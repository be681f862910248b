"""Vocabularies of a few hundred tokens, as GGUF keys, that llama.cpp loads too."""

from ggufspec.gguf_write import Key
from ggufspec.tokenizer import CHAR_OF

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>")
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ c", "o r", "i s", "e n", "Ġ o",
    "Ġ w", "n d", "in g", "e d", "Ġ (", "Ġ =", "Ġa nd", "Ġ f", "Ġo f", "re t", "Ġ Ġ", "ĠĠ ĠĠ", "d e", "de f",
    "Ġ in", "s e", "l e",
)  # fmt: skip
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN = 1, 3, 4, 5, 6, 2


def byte_bpe(n_vocab: int, pre: str, *, bos: bool = False) -> list[Key]:
    """Byte-level BPE: 256 bytes, the merges, the special tokens, then unused ones up to `n_vocab`."""
    tokens = [*(CHAR_OF[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab is {n_vocab}, expected at least {len(tokens)}")
    types = [NORMAL] * (256 + len(MERGES)) + [CONTROL] * len(SPECIAL)
    types += [UNUSED] * (n_vocab - len(tokens))
    tokens += [f"<|unused_{i}|>" for i in range(n_vocab - len(tokens))]
    number = {token: i for i, token in enumerate(tokens)}
    return [
        Key("tokenizer.ggml.model", "str", "gpt2"),
        Key("tokenizer.ggml.pre", "str", pre),
        Key("tokenizer.ggml.tokens", "arr[str]", tokens),
        Key("tokenizer.ggml.token_type", "arr[i32]", types),
        Key("tokenizer.ggml.merges", "arr[str]", MERGES),
        Key("tokenizer.ggml.bos_token_id", "u32", number["<|endoftext|>"]),
        Key("tokenizer.ggml.eos_token_id", "u32", number["<|im_end|>"]),
        Key("tokenizer.ggml.padding_token_id", "u32", number["<|endoftext|>"]),
        Key("tokenizer.ggml.mask_token_id", "u32", number["<|mask|>"]),
        Key("tokenizer.ggml.add_bos_token", "bool", bos),
        Key("tokenizer.chat_template", "str", CHAT_TEMPLATE),
    ]


def sentence_pieces(n_vocab: int) -> list[Key]:
    """A SentencePiece vocabulary with byte fallback, as Gemma has it: special, bytes, scored pieces."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    words = ["the", "▁the", "▁a", "in", "ing", "▁of", "er", "re", "th", "he", "on", "an", "nd", "and", "▁and"]
    pieces = [chr(c) for c in range(33, 127)] + ["▁", *words]
    tokens = special + [f"<0x{b:02X}>" for b in range(256)] + pieces
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab is {n_vocab}, expected at least {len(tokens)}")
    types += [UNUSED] * (n_vocab - len(tokens))
    tokens += [f"<unused{i}>" for i in range(n_vocab - len(tokens))]
    scores = [0.0] * (len(special) + 256) + [-100.0 + len(p) for p in pieces]
    scores += [0.0] * (n_vocab - len(scores))
    return [
        Key("tokenizer.ggml.model", "str", "llama"),
        Key("tokenizer.ggml.pre", "str", "default"),
        Key("tokenizer.ggml.tokens", "arr[str]", tokens),
        Key("tokenizer.ggml.scores", "arr[f32]", scores),
        Key("tokenizer.ggml.token_type", "arr[i32]", types),
        Key("tokenizer.ggml.bos_token_id", "u32", 2),
        Key("tokenizer.ggml.eos_token_id", "u32", 1),
        Key("tokenizer.ggml.unknown_token_id", "u32", 3),
        Key("tokenizer.ggml.padding_token_id", "u32", 0),
        Key("tokenizer.ggml.add_bos_token", "bool", True),
        Key("tokenizer.ggml.add_space_prefix", "bool", False),
    ]


def twelve_letters(*, mask: bool = False) -> list[Key]:
    """The 12 tokens of the formula models; id 0 ends a text, id 11 is the mask of a drafter."""
    keys = [
        Key("tokenizer.ggml.model", "str", "gpt2"),
        Key("tokenizer.ggml.pre", "str", "gpt-2"),
        Key("tokenizer.ggml.tokens", "arr[str]", ["<|end|>", *"abcdefghijk"]),
        Key("tokenizer.ggml.token_type", "arr[i32]", [CONTROL] + [NORMAL] * 11),
        Key("tokenizer.ggml.merges", "arr[str]", ["a b"]),
        Key("tokenizer.ggml.bos_token_id", "u32", 0),
        Key("tokenizer.ggml.eos_token_id", "u32", 0),
        Key("tokenizer.ggml.add_bos_token", "bool", False),
    ]
    return keys + ([Key("tokenizer.ggml.mask_token_id", "u32", 11)] if mask else [])


def fragments(tokens: list[str]) -> list[int]:
    """Ids of the tokens that are a single byte from 0x80 on, which is no character by itself."""
    high = {*(CHAR_OF[byte] for byte in range(128, 256)), *(f"<0x{b:02X}>" for b in range(128, 256))}
    return [i for i, token in enumerate(tokens) if token in high]
