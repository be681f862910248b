"""Text to token ids and back, as a GGUF's metadata describes it; the ids are llama.cpp's.

The merging is done by the `tokenizers` library. Around it stand the rules that belong to GGUF: which texts are cut
out as special tokens first, BOS and EOS, the set of tokens that end a generation, and the bytes of each token.
"""

import contextlib
import gc
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from .errors import FileError, RequestError, UnsupportedError
from .pretokenizers import REGEXES, PreTokenizer, pre_tokenizer
from .special_tokens import SpecialIds, eog_ids, find_special_ids

log = logging.getLogger(__name__)

SPACE = "\u2581"  # stands for a blank in SentencePiece vocabularies


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Family:
    """What a `tokenizer.ggml.model` value implies before any other key is read."""

    kind: str  # "bytes": BPE on the GPT-2 byte alphabet; "scores": SentencePiece; "merges": BPE on raw UTF-8
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = False


FAMILIES: dict[str, Family] = {
    "gpt2": Family("bytes", bos=11, eos=11),
    "llama": Family("scores", bos=1, eos=2, unk=0, add_bos=True, add_space_prefix=True),
    "gemma4": Family("merges", add_bos=True),
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible map: printable Latin-1 stands for itself, the other bytes for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF = _byte_alphabet()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A vocabulary is half a million small objects that all stay: looking through them for garbage is a third of the
    time it takes to build one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Tokenizer:
    """A vocabulary and its rules. Immutable after `from_metadata`; safe to share between threads."""

    def __init__(self, tokens: Sequence[str], types: list[int], family: Family, ids: SpecialIds,
                 encoder: tokenizers.Tokenizer, add_bos: bool, add_eos: bool, add_space_prefix: bool):  # fmt: skip
        self.tokens = tokens
        self.types = types
        self.family = family
        self.ids = ids
        self.add_bos = add_bos and ids.bos is not None
        self.add_eos = add_eos and ids.eos is not None
        self.add_space_prefix = add_space_prefix
        self._encoder = encoder
        self._has_blocker = encoder.get_vocab_size(with_added_tokens=False) > len(tokens)
        self._newlines = {text: i for i, text in enumerate(tokens) if text[0] == "\n" and not text.strip("\n")}
        self.eog: frozenset[int] = eog_ids(tokens, types, ids)
        self.special_tokens: dict[str, int] = _by_length(tokens, types, _SPECIAL)
        self._user_tokens: dict[str, int] = _by_length(tokens, types, {TokenType.USER_DEFINED})

    @classmethod
    @_no_garbage_collection()
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build from GGUF metadata (`tokenizer.ggml.*`).

        Raises FileError for keys that are missing, of the wrong type or contradict one another, UnsupportedError for a
        family or pre-tokenizer that this runtime does not have.
        """
        name = _get(metadata, "model", str)
        if name is None:
            raise FileError("tokenizer.ggml.model is missing: the file has no vocabulary to tokenize with")
        if name not in FAMILIES:
            raise UnsupportedError(f"unknown tokenizer: '{name}' (tokenizer.ggml.model); "
                                   f"supported: {', '.join(FAMILIES)}")  # fmt: skip
        family = FAMILIES[name]
        tokens = _tokens(metadata)
        vocab = {text: i for i, text in enumerate(tokens)}
        if len(vocab) != len(tokens):
            twice = next(i for i, text in enumerate(tokens) if vocab[text] != i)
            raise FileError(f"tokenizer.ggml.tokens: ids {twice} and {vocab[tokens[twice]]} have the same text "
                            f"{tokens[twice]!r}; every token must be different")  # fmt: skip
        types = _numbers(metadata, "token_type", len(tokens), int)
        if types is None:
            types = [int(TokenType.NORMAL)] * len(tokens)
        encoder, row = _ENCODERS[family.kind](metadata, vocab, types, family)
        ids = find_special_ids(metadata, vocab, types, family.bos, family.eos, family.unk)
        add_bos = _get(metadata, "add_bos_token", bool)
        default_bos = family.add_bos or (row is not None and row.add_bos)
        if name == "gemma4":
            add_bos = True  # llama.cpp overrides files whose flag says false
        prefix = _get(metadata, "add_space_prefix", bool)
        return cls(tokens, types, family, ids, encoder,
                   add_bos=default_bos if add_bos is None else add_bos,
                   add_eos=bool(_get(metadata, "add_eos_token", bool)),
                   add_space_prefix=family.kind == "scores" and (prefix is None or prefix))  # fmt: skip

    # -- vocabulary ---------------------------------------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        return len(self.tokens)

    @property
    def bos(self) -> int | None:
        return self.ids.bos

    @property
    def eos(self) -> int | None:
        return self.ids.eos

    @property
    def eot(self) -> int | None:
        return self.ids.eot

    @property
    def pad(self) -> int | None:
        return self.ids.pad

    @property
    def mask(self) -> int | None:
        return self.ids.mask

    def text(self, token: int | None) -> str:
        """The token's text as the file spells it, "" for None: what templates get as `bos_token`, `eos_token`."""
        return "" if token is None else self.tokens[self._check(token)]

    # -- encode -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts BOS in front and EOS behind where the vocabulary asks for it. With `parse_special` the texts
        of control tokens become their ids; user-defined tokens always do. Raises RequestError for lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: lone surrogate {text[error.start]!a} at character "
                               f"{error.start}") from None  # fmt: skip
        ids: list[int] = []
        if add_special and self.add_bos:
            ids.append(self.ids.bos)  # type: ignore[arg-type]  # add_bos implies an id
        after_special = True
        for part in partition(text, self.special_tokens if parse_special else self._user_tokens):
            if isinstance(part, int):
                ids.append(part)
            else:
                if self.family.kind != "bytes":
                    part = part.replace(" ", SPACE)
                    if self.add_space_prefix and after_special:
                        part = SPACE + part
                ids.extend(self._encode_part(part))
            after_special = isinstance(part, int)
        if add_special and self.add_eos:
            ids.append(self.ids.eos)  # type: ignore[arg-type]
        return ids

    def _ids(self, text: str) -> list[int]:
        # a batch of one: `encode` would hold the interpreter's lock, and a long text would stop all other threads
        return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_part(self, text: str) -> list[int]:
        if self.family.kind != "merges":
            ids = self._ids(text)
        else:
            ids = []
            for run in re.findall(r"\n+|[^\n]+", text):
                # A run of newlines that is a token is taken whole, whatever the merges say.
                token = self._newlines.get(run) if run[0] == "\n" else None
                ids += [token] if token is not None else self._ids(run)
        return [i for i in ids if i != self.n_vocab] if self._has_blocker else ids

    # -- decode -------------------------------------------------------------------------------------------------------

    def piece(self, token: int, special: bool = True) -> bytes:
        """The bytes a token adds to the text. Control and unknown tokens have bytes only with `special`."""
        text, kind = self.tokens[self._check(token)], self.types[token]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return text.encode() if special else b""
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if self.family.kind == "bytes":
            return _bytes_of(text)
        return text.replace(SPACE, " ").encode()

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The pieces joined; bytes that are no UTF-8 become U+FFFD. Raises RequestError for an id out of range."""
        ids, parts = list(ids), []
        pieces: dict[int, bytes] = {}
        for at in range(0, len(ids), _DECODED_AT_ONCE):
            some = ids[at : at + _DECODED_AT_ONCE]
            pieces |= {i: self.piece(i, special=not skip_special) for i in dict.fromkeys(some) if i not in pieces}
            parts.append(b"".join(map(pieces.__getitem__, some)))
        return b"".join(parts).decode(errors="replace")

    def _check(self, token: int) -> int:
        if not 0 <= token < len(self.tokens):
            raise RequestError(f"token id {token} is outside the vocabulary (0 to {len(self.tokens) - 1})")
        return token


_DECODED_AT_ONCE = 8192  # tokens; a longer list would hold the interpreter's lock, and other threads, for too long

_SPECIAL = {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}


def _by_length(tokens: Sequence[str], types: list[int], wanted: set[TokenType]) -> dict[str, int]:
    """Text to id of the tokens of these types, longest text first: the order in which they are searched."""
    picked = [(text, i) for i, (text, kind) in enumerate(zip(tokens, types)) if kind in wanted]
    return dict(sorted(picked, key=lambda item: -len(item[0].encode())))


def partition(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Cut special texts out: a list of ids and of the non-empty texts between them.

    A longer special text is cut out everywhere before a shorter one is looked for, so it wins also where the shorter
    one begins earlier; one regex alternation would decide the other way.
    """
    parts: list[str | int] = [text] if text else []
    for word, token in special.items():
        if word not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            first, *rest = part.split(word)
            cut.extend([first] if first else [])
            for between in rest:
                cut.append(token)
                cut.extend([between] if between else [])
        parts = cut
    return parts


def _bytes_of(text: str) -> bytes:
    """Bytes of a token written in the GPT-2 byte alphabet."""
    try:
        return bytes([BYTE_OF[char] for char in text])
    except KeyError:  # no byte: llama.cpp shows such a token by a mark, and so must a comparison
        out = b""
        for char in text:
            mark = f"[UNK_BYTE_0x{char.encode().hex()}{text}]"
            out += bytes([BYTE_OF[char]]) if char in BYTE_OF else mark.encode()
        return out


# -- reading the metadata ------------------------------------------------------------------------------------------


def _get(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not isinstance(value, kind):
        raise FileError(f"tokenizer.ggml.{key} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or isinstance(tokens, (str, bytes)) or not len(tokens):
        raise FileError("tokenizer.ggml.tokens is missing or empty, expected an array of strings")
    texts = _strings(tokens, "tokens")
    if "" in texts or any("\0" in text for text in texts):
        texts = [_until_nul(text) or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    return texts


def _strings(values: Any, key: str) -> list[str]:
    if hasattr(values, "to_list"):  # gguf_file.StringArray holds nothing but strings
        return values.to_list()
    texts = list(values)
    if any(type(text) is not str for text in texts):
        raise FileError(f"tokenizer.ggml.{key} holds something else than strings")
    return texts


def _until_nul(text: str) -> str:
    """llama.cpp reads these strings as C strings: a token whose text is a NUL character is an empty one there."""
    return text.partition("\0")[0] if "\0" in text else text


def _numbers(metadata: Mapping[str, Any], key: str, n: int, kind: type) -> list[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or len(values) < n:
        size = len(values) if hasattr(values, "__len__") else 0
        raise FileError(f"tokenizer.ggml.{key} has {size} entries, expected one for each of {n} tokens")
    try:
        if hasattr(values, "dtype"):
            return values[:n].astype(kind).tolist()
        return [kind(value) for value in values[:n]]
    except (TypeError, ValueError):
        raise FileError(f"tokenizer.ggml.{key} holds something else than numbers") from None


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise FileError("cannot find tokenizer merges in model file (tokenizer.ggml.merges)")
    texts = _strings(merges, "merges")
    pairs = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
    for i, (left, right) in enumerate(pairs):
        if not left or not right or "\0" in texts[i]:
            pairs[i] = _odd_merge(i, texts[i])
    if _NO_MERGE in pairs:
        pairs = [pair for pair in pairs if pair != _NO_MERGE]
    return list(dict.fromkeys(pairs))  # of equal entries the first one gives the rank


_NO_MERGE = ("", "")


def _odd_merge(i: int, text: str) -> tuple[str, str]:
    """A merge whose first piece begins with a blank, or that holds a NUL, where llama.cpp's string ends."""
    at = text.find(" ", 1)
    if at < 0:
        raise FileError(f"tokenizer.ggml.merges: entry {i} is {text!r}, expected two pieces with a blank between")
    left, right = _until_nul(text[:at]), _until_nul(text[at + 1 :])
    return (left, right) if left and right else _NO_MERGE


# -- the three kinds of encoder ---------------------------------------------------------------------------------------

_BLOCKER = "\0"  # no token text can hold a NUL, see _until_nul
_Made = tuple[tokenizers.Tokenizer, PreTokenizer | None]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    if options.get("unk_token") is None and not BYTE_OF.keys() <= vocab.keys():
        # A character without a token adds nothing to the ids, but it does keep its neighbours from merging. The
        # library would drop it first and then merge them, so it becomes one id past the end, dropped afterwards.
        vocab = {**vocab, _BLOCKER: len(vocab)}
        options["unk_token"] = _BLOCKER
    try:
        return models.BPE(vocab, merges, **options)
    except Exception:  # the library has no narrower class; it refuses merges whose pieces are no tokens
        known = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
        if len(known) == len(merges):
            raise
        log.warning("tokenizer.ggml.merges: %d of %d entries name no token and are left out",
                    len(merges) - len(known), len(merges))  # fmt: skip
        return models.BPE(vocab, known, **options)


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], family: Family) -> _Made:
    name = _get(metadata, "pre", str)
    if name is None:
        log.warning("tokenizer.ggml.pre is missing: using 'default'; the text may be cut differently than in training")
        name = "default"
    row = pre_tokenizer(name)
    encoder = tokenizers.Tokenizer(_bpe(vocab, _merges(metadata), ignore_merges=row.ignore_merges))
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in REGEXES[row.regexes]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return encoder, row


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], family: Family) -> _Made:
    """SentencePiece merges the neighbours whose concatenation is the token of the highest score.

    BPE does the same when every way to make a token from two tokens is a merge, ranked by the token's score.
    """
    scores = _numbers(metadata, "scores", len(vocab), float) or [0.0] * len(vocab)
    by_score = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    merges = [
        (left, text[at:])
        for text, token in by_score
        if types[token] != TokenType.BYTE
        for at in range(1, len(text))
        if (left := text[:at]) in vocab and text[at:] in vocab
    ]
    return _raw(vocab, merges, types, fuse_unk=True), None


def _raw_merges(metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], family: Family) -> _Made:
    return _raw(vocab, _merges(metadata), types, fuse_unk=False), None


def _raw(
    vocab: dict[str, int], merges: list[tuple[str, str]], types: list[int], fuse_unk: bool
) -> tokenizers.Tokenizer:
    unknown = next((text for text, i in vocab.items() if types[i] == TokenType.UNKNOWN), None)
    return tokenizers.Tokenizer(_bpe(vocab, merges, byte_fallback=True, fuse_unk=fuse_unk, unk_token=unknown))


_ENCODERS: dict[str, Callable[[Mapping[str, Any], dict[str, int], list[int], Family], _Made]] = {
    "bytes": _byte_level,
    "scores": _sentencepiece,
    "merges": _raw_merges,
}
