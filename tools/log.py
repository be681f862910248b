"""The log of a command: llama.cpp's levels on stderr, and to a file if asked."""

from __future__ import annotations

import logging
import sys

from ggufspec.tools.settings import CommonSettings

_LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: 15, 5: logging.DEBUG}
_COLORS = {logging.WARNING: "\x1b[35m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}


class _Format(logging.Formatter):
    def __init__(self, prefix: bool, timestamps: bool, colors: bool):
        parts = (["%(asctime)s"] if timestamps else []) + (["%(levelname)s"] if prefix else []) + ["%(message)s"]
        super().__init__(" ".join(parts))
        self.prefix, self.colors = prefix, colors

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if not self.prefix and record.levelno == logging.WARNING:
            line = f"warn: {line}"
        color = _COLORS.get(record.levelno) if self.colors else None
        return f"{color}{line}\x1b[0m" if color else line


class _File(logging.FileHandler):
    """A file that can't be written any more is told once, and no longer written; the program goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logging.getLogger("ggufspec").removeHandler(self)
        print(f"warn: --log-file {self.baseFilename}: {error.strerror}; the log ends here", file=sys.stderr)


def setup(settings: CommonSettings) -> None:
    """Install the handlers of the package's logger; calling again replaces them. OSError for a bad --log-file."""
    logger = logging.getLogger("ggufspec")
    logger.handlers.clear()
    logger.propagate = False
    if settings.verbosity < 0:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL + 1)
        return
    logger.setLevel(_LEVELS[min(settings.verbosity, 5)])
    colors = settings.log_colors == "on" or (settings.log_colors == "auto" and sys.stderr.isatty())
    handlers: list[tuple[logging.Handler, bool]] = [(logging.StreamHandler(), colors)]
    if settings.log_file:
        handlers.append((_File(settings.log_file), False))
    for handler, colored in handlers:
        handler.setFormatter(_Format(settings.log_prefix, settings.log_timestamps, colored))
        logger.addHandler(handler)
