"""The text of one stream: tokens in, showable text out, and why it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .detokenizer import Detokenizer, StopStrings

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no UTF-8


class TextStream:
    """Feeds tokens through the detokenizer and watches for stop strings.

    `push` returns the text that is now safe to show. Once a stop string is complete, `stopped_by` holds it, and
    neither it nor anything after it is ever returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], show_special: bool = True):
        self.tokenizer = tokenizer
        self.show_special = show_special
        self.detokenizer = Detokenizer()
        self.stops = StopStrings(stop)
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        return self._release(self.detokenizer.feed(self.tokenizer.piece(token, special=self.show_special)))

    def finish(self) -> tuple[str, str]:
        """Everything still held, when the stream ends for another reason than a stop string: the text, and U+FFFD
        for a character that the stream ended inside of. No stop string is looked for in the latter.
        """
        if self.stopped_by is not None:
            return "", ""
        rest = REPLACEMENT if self.detokenizer.incomplete else ""
        text = self._release(self.detokenizer.flush().removesuffix(rest))
        return (text, "") if self.stopped_by is not None else (text + self.stops.flush(), rest)

    def _release(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        out = self.stops.feed(text)
        self.stopped_by = out.stop
        return out.text
