"""The errors of `lmchat`: those of turbomind, and those of sessions.

Error
├── InvalidRequest      an argument is wrong: "NAME is VALUE, expected WHAT"; `param` is the name
│   └── ContextFull     the request can never fit the context
├── Busy
│   └── SessionBusy     the session is generating
├── NotFound            no such session, turn, model folder or hub repository
├── ModelError          a model, tokenizer or template cannot be used
├── StoreError          the store of sessions cannot be read or written
├── Overloaded          too many requests are waiting; try again later
├── EngineClosed        the engine has been closed
├── Unreachable         the server of a remote engine does not answer
└── InternalError       a bug, or the machine's memory or open files; the engine continues
"""

from dataclasses import dataclass
from typing import TypeVar

from turbomind.errors import (
    Busy,
    ContextFull,
    EngineClosed,
    Error,
    InternalError,
    InvalidRequest,
    ModelError,
    NotFound,
)

PUBLIC = "_public"
"""Attribute of an error with its text for remote clients (`lmchat.public_text`)."""

LOGGABLE = "_loggable"
"""Attribute of an error whose message servers log at every level."""

E = TypeVar("E", bound=Error)


def with_public(error: E, text: str) -> E:
    """Sets the text of an error for remote clients, and returns the error."""
    setattr(error, PUBLIC, text)
    return error


def loggable(error: E) -> E:
    """Marks an error whose message holds nothing that users have written, and returns the error.

    It names files and folders of the machine, which the reader of a server's log has to mend.
    """
    setattr(error, LOGGABLE, True)
    return error


def context_full(seen: str, context: int) -> ContextFull:
    """Returns the error of what a context of `context` tokens cannot hold.

    Clients find out what went wrong by its phrase "maximum context length is N tokens".

    Args:
        seen: what was wrong, the value seen and the value expected.
        context: most tokens of prompt and reply together.
    """
    return ContextFull(f"{seen}: this model's maximum context length is {context} tokens")


class SessionBusy(Busy):
    """The session is generating already; a second generation is refused."""


class StoreError(Error):
    """The store of sessions cannot be read or written."""


class StoreClosed(EngineClosed, StoreError):
    """The store of sessions was closed, with the engine that had opened it."""


class Overloaded(Error):
    """Too many requests are waiting.

    Attributes:
        retry_after: predicted seconds until a retry can succeed.
    """

    def __init__(self, message: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unreachable(Error):
    """The server of a remote engine does not answer, or the connection to it was lost."""


@dataclass(frozen=True)
class Kind:
    """What a class of errors is over HTTP.

    Attributes:
        error: the class.
        status: the status of an answer.
        type: OpenAI's type of errors.
        code: a word for programs.
    """

    error: type[Error]
    status: int
    type: str
    code: str | None


BAD_REQUEST = "invalid_request_error"
SERVER = "server_error"
INTERNAL = Kind(InternalError, 500, SERVER, "internal_error")
KINDS = (
    Kind(ContextFull, 400, BAD_REQUEST, "context_length_exceeded"),
    Kind(InvalidRequest, 400, BAD_REQUEST, None),
    Kind(NotFound, 404, BAD_REQUEST, "not_found"),
    Kind(SessionBusy, 409, "conflict_error", "session_busy"),
    Kind(Busy, 409, "conflict_error", "session_busy"),
    Kind(Overloaded, 429, "rate_limit_error", "overloaded"),
    Kind(EngineClosed, 503, SERVER, "shutting_down"),
    Kind(StoreError, 503, SERVER, "store_unavailable"),
    INTERNAL,
)
"""The kinds of errors. The first that fits an error, or the code of an answer, decides."""


def kind_of(error: BaseException) -> Kind:
    """Returns what an error is over HTTP."""
    return next((kind for kind in KINDS if isinstance(error, kind.error)), INTERNAL)


def class_of(code: object, kind: object) -> type[Error]:
    """Returns the class of an error that an answer has.

    Args:
        code: its word for programs. Of an unknown one, `kind` decides.
        kind: OpenAI's type of the error.
    """
    for row in KINDS:
        if row.code is not None and row.code == code:
            return row.error
    return InternalError if kind == SERVER else InvalidRequest


__all__ = [
    "Busy",
    "ContextFull",
    "EngineClosed",
    "Error",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "SessionBusy",
    "StoreError",
    "Unreachable",
]
