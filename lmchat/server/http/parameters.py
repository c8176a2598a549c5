"""Parameters of queries and headers that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query

Number = Annotated[int, Query(ge=0, lt=10**9)]
"""A number from 0, such as the id of a turn."""

Details = Annotated[bool, Query(description="whether turns have all that is stored with them")]

TokenIds = Annotated[bool, Query(description="whether the answer has token ids")]

Text = Annotated[str | None, Query()]

IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)
]
"""Names a request. One that repeats it gets the same reply."""
