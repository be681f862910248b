"""Token bytes to text as they come: never half a character, never a byte of a stop string.

Both classes are text state machines that need no model. A generation loop feeds each token's piece (bytes) to a
`Detokenizer`, and what comes out to `StopStrings`.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Detokenizer:
    """Joins pieces into text and holds back a character until its last byte is there.

    `feed` returns the text that is certain; while the newest character is incomplete it returns "" and keeps
    everything, so one chunk may carry several tokens (llama-server sends the same chunks). Bytes that cannot be UTF-8
    come out as U+FFFD. The concatenation of all chunks and `flush` equals `b"".join(pieces).decode(errors="replace")`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, piece: bytes) -> str:
        self._held += self._decoder.decode(piece)
        if self.incomplete:
            return ""
        text, self._held = self._held, ""
        return text

    @property
    def incomplete(self) -> bool:
        """True while the bytes fed so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The rest at the end of generation; an unfinished character becomes U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        self._decoder.reset()
        return text


@dataclass(frozen=True)
class Stopped:
    """`text` may be sent; `stop` is the stop string that was met (it ends the answer), or None."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts the text at the first stop string, and holds back an end that may still become one."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops: Sequence[str] = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""

    def feed(self, text: str) -> Stopped:
        """The text that is free to go. After a stop was met, the caller ends the answer."""
        text = self._held + text
        # The earliest match wins, at one place the first of the list, as a left-to-right reader would see it.
        found = [(at, i) for i, stop in enumerate(self.stops) if (at := text.find(stop)) >= 0]
        if found:
            at, i = min(found)
            self._held = ""
            return Stopped(text[:at], self.stops[i])
        held = partial_suffix(text, self.stops)
        self._held = text[len(text) - held :]
        return Stopped(text[: len(text) - held])

    def flush(self) -> str:
        """The text still held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text


def partial_suffix(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `words`; 0 if there is none."""
    longest = 0
    for word in words:
        for n in range(min(len(text), len(word) - 1), longest, -1):
            if text.endswith(word[:n]):
                longest = n
                break
    return longest
