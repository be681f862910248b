"""What a stream shows, and what is left when it ends inside a character."""

from typing import Any

from ggufspec.stream import TextStream


class Pieces:
    """Token i is the i-th of these bytes."""

    pieces = (b"a", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"b\xe2")

    def piece(self, token: int, special: bool = True) -> bytes:
        return self.pieces[token]


def run(tokens: list[int], *stop: str) -> tuple[str, str, str | None]:
    """(shown, rest, the stop string that was met)"""
    tokenizer: Any = Pieces()
    stream = TextStream(tokenizer, stop)
    shown = "".join(map(stream.push, tokens))
    held, rest = stream.finish()
    return shown + held, rest, stream.stopped_by


def test_half_a_character_at_the_end_is_a_rest() -> None:
    assert run([0, 1, 2]) == ("aé", "", None)
    assert run([0, 1]) == ("a", "\ufffd", None)
    assert run([0, 3]) == ("a", "\ufffd", None)
    assert run([3, 4, 5]) == ("😀b", "\ufffd", None), "what stands before the half is text"


def test_a_rest_is_no_stop_string() -> None:
    assert run([0, 1], "\ufffd") == ("a", "\ufffd", None)
    assert run([0, 1], "ab") == ("a", "\ufffd", None), "a held beginning of a stop string comes out before it"
    assert run([0, 5], "b") == ("a", "", "b")
