"""The form of event streams of sessions, version 1.

Every event has a name and one JSON object. Unknown names and fields are to be ignored.

start
    `version`, `session` (its id), `turn` (the id that the reply's turn will have, or null); without
    a session `generation`, an id to stop it with.
progress
    `done`, `total`, `cached`: prompt tokens that have KV, all of them, and those that had it.
delta
    `kind` ("text" or "reasoning") and `text`; `token_ids`, and `logprobs` if the reply has them, if
    the request wants them; `choice` if it is not the first one; `before`, true for what a continued
    reply had before.
done
    The finished reply. Nothing follows.
error
    OpenAI's error object. Nothing follows.

The id of a delta is `TURN.REASONING.TEXT.TOKENS`: the reply's turn, and how many characters of each
kind and how many tokens have been sent. A client that sends the last id as `Last-Event-ID` gets
what follows it. Replies without a session have no ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from lmchat.aio.stream import AsyncFollower
from lmchat.errors import Error
from lmchat.generation.parts import Delta, Progress
from lmchat.generation.reply import Reply
from lmchat.server.errors import HttpError, error_object, named
from lmchat.server.http import json_answer
from lmchat.server.sessions import views
from lmchat.server.sessions.access import in_thread
from lmchat.server.sessions.bodies import FIELDS

VERSION = 1

_PLACE = re.compile(r"(\d{1,10})\.(\d{1,10})\.(\d{1,10})(?:\.(\d{1,10}))?")


@dataclass
class Place:
    """A place in a reply: its turn, and the numbers of characters and tokens before the place."""

    turn: int
    reasoning: int = 0
    text: int = 0
    tokens: int = 0

    @classmethod
    def parse(cls, given: str) -> Place:
        """Returns the place of an event's id.

        Raises:
            HttpError: it is no id of an event.
        """
        found = _PLACE.fullmatch(given)
        if found is None:
            raise HttpError(400, f"Last-Event-ID is {given[:50]!r}, expected the id of an event")
        return cls(*(int(number or 0) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.turn}.{self.reasoning}.{self.text}.{self.tokens}"


async def events(
    follower: AsyncFollower,
    session_id: str | None,
    *,
    after: Place | None = None,
    token_ids: bool = False,
    generation: str | None = None,
    whole: Callable[[Reply], Reply] = lambda reply: reply,
) -> AsyncIterator[bytes]:
    """Yields the events of a reply, those after a place if one is given.

    Args:
        follower: the reader of the reply.
        session_id: the session; None: the reply has none, and its events no ids.
        after: the place.
        token_ids: whether deltas have tokens.
        generation: id of a generation without a session.
        whole: returns the reply of the last event, from the finished one.
    """
    turn = follower.turn_id
    at = Place(turn or 0)
    skip = after if after is not None and after.turn == at.turn else Place(at.turn)
    head = {"version": VERSION, "session": session_id, "turn": turn}
    yield encoded("start", head if generation is None else {**head, "generation": generation})
    read = 0
    try:
        async for part in follower.events():
            read += 1
            if isinstance(part, Progress):
                yield encoded(
                    "progress", {"done": part.done, "total": part.total, "cached": part.cached}
                )
            elif isinstance(part, Delta) and (data := delta_data(part, at, skip, token_ids)):
                if read <= follower.before:
                    data["before"] = True
                yield encoded("delta", data, None if session_id is None else str(at))
        reply = whole(await follower.result())
        yield await in_thread(lambda: done(reply, token_ids))
    except Error as error:
        yield encoded("error", error_object(named(error, FIELDS)))
    finally:
        await follower.aclose()


def delta_data(part: Delta, at: Place, skip: Place, token_ids: bool) -> dict[str, Any] | None:
    """Returns what is new in a part and moves the place; None: nothing is."""
    before = at.reasoning if part.kind == "reasoning" else at.text
    known = skip.reasoning if part.kind == "reasoning" else skip.text
    new_tokens = max(0, skip.tokens - at.tokens)
    at.tokens += len(part.token_ids)
    if part.kind == "reasoning":
        at.reasoning += len(part.text)
    else:
        at.text += len(part.text)
    text = part.text[max(0, known - before) :]
    ids = part.token_ids[new_tokens:] if token_ids else ()
    if not text and not ids:
        return None
    found: dict[str, Any] = {"kind": part.kind, "text": text}
    if part.choice:
        found["choice"] = part.choice
    if token_ids:
        found["token_ids"] = list(ids)
        if part.logprobs:
            found["logprobs"] = views.of_logprobs(part.logprobs[new_tokens:])
    return found


def encoded(name: str, data: dict[str, Any], number: str | None = None) -> bytes:
    """Returns one event."""
    return _event(name, json.dumps(data).encode(), number)


def done(reply: Reply, token_ids: bool) -> bytes:
    """Returns the last event of a reply. With log-probabilities it may be large."""
    data = views.of_reply(reply, token_ids=token_ids)
    return _event("done", json_answer.encoded(data, ascii_only=True))


def _event(name: str, data: bytes, number: str | None = None) -> bytes:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: ".encode() + data + b"\n\n"
