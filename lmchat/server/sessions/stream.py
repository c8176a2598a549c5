"""The form of event streams of sessions, version 1.

Every event has a name and one JSON object. Unknown names and fields are to be ignored.

start
    `version`, `session` (its id), `turn` (the id that the reply's turn will have, or null).
progress
    `done`, `total`, `cached`: prompt tokens that have KV, all of them, and those that had it.
delta
    `kind` ("text" or "reasoning") and `text`; `token_ids` if the request wants them.
done
    The finished reply. Nothing follows.
error
    OpenAI's error object. Nothing follows.

The id of a delta is `TURN.REASONING.TEXT`: the reply's turn, and how many characters of each kind
have been sent. A client that sends the last id as `Last-Event-ID` gets what follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from lmchat.aio_stream import AsyncFollower
from lmchat.errors import Error
from lmchat.generation.parts import Delta, Progress
from lmchat.generation.reply import Reply
from lmchat.server.errors import HttpError, error_object
from lmchat.server.sessions import views

VERSION = 1

_PLACE = re.compile(r"(\d{1,10})\.(\d{1,10})\.(\d{1,10})")


@dataclass
class Place:
    """A place in a reply: its turn, and the numbers of characters before the place."""

    turn: int
    reasoning: int = 0
    text: int = 0

    @classmethod
    def parse(cls, given: str) -> Place:
        """Returns the place of an event's id.

        Raises:
            HttpError: it is no id of an event.
        """
        found = _PLACE.fullmatch(given)
        if found is None:
            raise HttpError(400, f"Last-Event-ID is {given[:50]!r}, expected the id of an event")
        return cls(*(int(number) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.turn}.{self.reasoning}.{self.text}"


async def events(
    follower: AsyncFollower,
    session_id: str,
    *,
    after: Place | None = None,
    token_ids: bool = False,
) -> AsyncIterator[bytes]:
    """Yields the events of a reply, those after a place if one is given."""
    turn = follower.turn_id
    at = Place(turn or 0)
    skip = after if after is not None and after.turn == at.turn else Place(at.turn)
    yield encoded("start", {"version": VERSION, "session": session_id, "turn": turn})
    try:
        async for part in follower.events():
            if isinstance(part, Progress):
                yield encoded(
                    "progress", {"done": part.done, "total": part.total, "cached": part.cached}
                )
            elif isinstance(part, Delta) and (data := _delta(part, at, skip, token_ids)):
                yield encoded("delta", data, str(at))
        reply: Reply = await follower.result()
        yield encoded("done", views.of_reply(reply, token_ids=token_ids))
    except Error as error:
        yield encoded("error", error_object(error))
    finally:
        await follower.aclose()


def _delta(part: Delta, at: Place, skip: Place, token_ids: bool) -> dict[str, Any] | None:
    """Returns what is new in a part and moves the place; None: nothing is."""
    before = at.reasoning if part.kind == "reasoning" else at.text
    known = skip.reasoning if part.kind == "reasoning" else skip.text
    end = before + len(part.text)
    if part.kind == "reasoning":
        at.reasoning = end
    else:
        at.text = end
    text = part.text[max(0, known - before) :]
    if not text and not (token_ids and part.token_ids and end >= known):
        return None
    found: dict[str, Any] = {"kind": part.kind, "text": text}
    if token_ids and len(text) == len(part.text):
        found["token_ids"] = list(part.token_ids)
    return found


def encoded(name: str, data: dict[str, Any], number: str | None = None) -> bytes:
    """Returns one event."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n".encode()
