"""The errors of `lmchat`: those of turbomind, and those of sessions.

Error
├── InvalidRequest      an argument is wrong: its name, the value seen, the value expected
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
