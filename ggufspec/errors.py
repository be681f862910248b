"""The errors a user can meet. Each message is one line: what was found, where, what was expected, what to do.

Commands print the message and exit with status 1; they never show a traceback for these.
"""


class GgufspecError(Exception):
    """Base of every error that is the input's fault, not the program's."""


class FileError(GgufspecError):
    """A file cannot be read as what it claims to be (GGUF, imatrix, saved slot...)."""


class UnsupportedError(GgufspecError):
    """The input is well formed, but this runtime has no code for it; the message names the thing."""


class ConfigError(GgufspecError):
    """Options, metadata or a target/drafter pair contradict one another; the message gives both values."""


class PlacementError(GgufspecError):
    """A model, cache or split does not fit the devices it was asked to use."""


class RequestError(GgufspecError):
    """One request is wrong or cannot be served; `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status = status
        self.kind = kind
