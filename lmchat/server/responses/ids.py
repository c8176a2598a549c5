"""Ids of responses, conversations and items, which contain those of sessions and turns."""

from __future__ import annotations

import re
import secrets

from lmchat.server.errors import HttpError
from lmchat.store.records import SESSION_ID

_TURN = re.compile(rf"[a-z]+_({SESSION_ID})([1-9a-f][0-9a-f]{{0,7}}|0)")
_CONVERSATION = re.compile(rf"conv_({SESSION_ID})")


def of_turn(kind: str, session_id: str, turn: int) -> str:
    """Returns the id of a thing of a turn: kind "resp" (a response), "msg" or "rs" (items)."""
    return f"{kind}_{session_id}{turn:x}"


def unstored(kind: str) -> str:
    """Returns an id that names nothing stored."""
    return f"{kind}_{secrets.token_hex(16)}"


def of_conversation(session_id: str) -> str:
    """Returns a conversation's id."""
    return f"conv_{session_id}"


def turn_of(kind: str, text: str) -> tuple[str, int]:
    """Returns the session's and the turn's id.

    Raises:
        HttpError: the text is no id of this kind; the answer is the same as for an absent object.
    """
    found = _TURN.fullmatch(text)
    if found is None or not text.startswith(f"{kind}_"):
        raise not_found(kind, text)
    return found[1], int(found[2], 16)


def session_of(text: str) -> str:
    """Returns the id of a conversation's session; raises HttpError as `turn_of()`."""
    found = _CONVERSATION.fullmatch(text)
    if found is None:
        raise not_found("conv", text)
    return found[1]


def not_found(kind: str, text: str) -> HttpError:
    """Returns the answer for an id that names nothing, or something of another owner."""
    names = {"resp": "Response", "conv": "Conversation"}
    what = names.get(kind, "Item")
    return HttpError(404, f"{what} with id {text[:80]!r} not found.", code="not_found")
