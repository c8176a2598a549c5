"""Parameters of queries and headers that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query
from pydantic import AfterValidator

Number = Annotated[int, Query(ge=0, lt=10**9)]
"""A number from 0, such as the id of a turn."""

Details = Annotated[bool, Query(description="whether turns have all that is stored with them")]

TokenIds = Annotated[bool, Query(description="whether the answer has token ids")]

Text = Annotated[str | None, Query()]

SESSION_HEADER = "x-session-id"
"""Header that selects a session, as the field `session` does. A response of a session has it."""

NAMING = (SESSION_HEADER, "idempotency-key", "last-event-id")
"""Headers that name something of a user. A request has each of them at most once."""


def decoded(value: str) -> str:
    """Returns the value of a header, which ASGI servers decode as Latin-1, decoded as UTF-8.

    Raises:
        ValueError: it is not UTF-8. It would become another name than the same text in a body.
    """
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("other bytes, expected UTF-8") from None


IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=200),
    AfterValidator(lambda value: value and decoded(value)),
]
"""Names a request. One that repeats it gets the same reply."""

SessionName = Annotated[
    str | None,
    Header(alias=SESSION_HEADER),
    AfterValidator(lambda value: value and decoded(value)),
]
"""The id or the name of a session."""
