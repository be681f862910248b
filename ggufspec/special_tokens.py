"""The ids with a role: BOS, EOS, end of turn, infill marks, and the set that ends a generation.

A file names some of them by key; the others are found by their text, as llama.cpp does.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import FileError

log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.TokenType; importing it here would be a circle

EOT_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
             "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>")  # fmt: skip

EOG_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
             "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
             "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
             "<｜end▁of▁sentence｜>", "[e~[")  # fmt: skip

# field of SpecialIds: (GGUF key, texts that give the role when the key is missing)
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bos": ("bos_token_id", ()),
    "eos": ("eos_token_id", ()),
    "unk": ("unknown_token_id", ()),
    "sep": ("seperator_token_id", ()),  # the format's own spelling
    "pad": ("padding_token_id", ()),
    "mask": ("mask_token_id", ()),
    "eot": ("eot_token_id", EOT_TEXTS),
    "eom": ("eom_token_id", ("<|eom_id|>",)),
    "fim_pre": ("fim_pre_token_id", ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>",
                                     "▁<PRE>", "<|code_prefix|>", "<|prefix|>")),
    "fim_suf": ("fim_suf_token_id", ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>",
                                     "▁<SUF>", "<|code_suffix|>", "<|suffix|>")),
    "fim_mid": ("fim_mid_token_id", ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
                                     "▁<MID>", "<|code_middle|>", "<|middle|>")),
    "fim_pad": ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "fim_rep": ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "fim_sep": ("fim_sep_token_id", ("<|file_sep|>",)),
}  # fmt: skip

# Texts that llama.cpp turns into user-defined tokens in harmony vocabularies: they are always matched in text.
HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class SpecialIds:
    """One id per role, None where the vocabulary has none. Field names are the GGUF keys' without `_token_id`."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    eot: int | None = None
    eom: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None
    suppress: tuple[int, ...] = ()  # ids never to be sampled


def find_special_ids(metadata: Mapping[str, Any], vocab: Mapping[str, int], types: list[int],
                     bos: int | None, eos: int | None, unk: int | None) -> SpecialIds:  # fmt: skip
    """Ids by key, then by text, then the family's defaults. Marks tokens found by text as control in `types`.

    An id outside the vocabulary is ignored with a warning, as llama.cpp does. Raises FileError for a non-integer.
    """
    defaults = {"bos": bos, "eos": eos, "unk": unk}
    found: dict[str, int | None] = {}
    for field, (key, texts) in ROLES.items():
        default = defaults.get(field)
        found[field] = default if default is not None and default < len(vocab) else None
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            number = _integer(key, value)
            if 0 <= number < len(vocab):
                found[field] = number
                continue
            log.warning(
                "tokenizer.ggml.%s is %d, outside the vocabulary of %d tokens: ignored", key, number, len(vocab)
            )
        for text in texts:
            if text in vocab:
                found[field] = vocab[text]
                _make_control(types, vocab[text], text)
                break
    for text in EOG_TEXTS:
        if text in vocab:
            _make_control(types, vocab[text], text)
    if "<|return|>" in vocab and "<|call|>" in vocab:
        for text in HARMONY_TEXTS:
            if text in vocab:
                types[vocab[text]] = _USER_DEFINED
    suppress = metadata.get("tokenizer.ggml.suppress_tokens")
    ids = tuple(_integer("suppress_tokens", i) for i in suppress) if suppress is not None else ()
    return SpecialIds(**found, suppress=tuple(i for i in ids if 0 <= i < len(vocab)))  # type: ignore[arg-type]


def eog_ids(tokens: Sequence[str], types: Sequence[int], ids: SpecialIds) -> frozenset[int]:
    """The ids that end a generation: by text, and the EOS, EOT, EOM and infill pad, repository and separator ids."""
    vocab = {tokens[i]: i for i, kind in enumerate(types) if kind not in (1, 6)}
    eog = {vocab[text] for text in EOG_TEXTS if text in vocab}
    eog |= {i for i in (ids.eos, ids.eot, ids.eom, ids.fim_pad, ids.fim_rep, ids.fim_sep) if i is not None}
    if {"<|return|>", "<|call|>", "<|end|>"} <= vocab.keys():
        eog.discard(vocab["<|end|>"])
    if ("<|tool_response>" in vocab or "<|plamo:eos|>" in vocab) and "</s>" in vocab:
        eog.discard(vocab["</s>"])
    return frozenset(eog)


def _make_control(types: list[int], token: int, text: str) -> None:
    if types[token] != _CONTROL:
        log.info("token %d %r ends a generation or has a role, but is of type %d: treated as control",
                 token, text, types[token])  # fmt: skip
        types[token] = _CONTROL


def _integer(key: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, float, str)):
            raise TypeError
        return int(value)
    except (TypeError, ValueError):
        raise FileError(f"tokenizer.ggml.{key} is {value!r}, expected an integer") from None
